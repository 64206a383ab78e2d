# SPDX-License-Identifier: Apache-2.0
"""Attention over any number of GPUs as a discrete-event model: real plans, measured kernels and links, no GPU.

``traffic`` and ``spread`` count what ranks compute and send; ``kernels`` and ``machine`` hold what was measured;
``one_launch``, ``ours`` and ``peers`` put the one through the other, on the lanes of ``events``; ``ways`` and
``sweeps`` compare.
"""

from magi_attention.tools.simulate.kernels import KernelTimes, kind_of
from magi_attention.tools.simulate.machine import Calibration, Cluster
from magi_attention.tools.simulate.sweeps import Answer, answer, sweep
from magi_attention.tools.simulate.ways import OURS, WAYS, Case, Estimate, estimate

__all__ = [
    "OURS",
    "WAYS",
    "Answer",
    "Calibration",
    "Case",
    "Cluster",
    "Estimate",
    "KernelTimes",
    "answer",
    "estimate",
    "kind_of",
    "sweep",
]
