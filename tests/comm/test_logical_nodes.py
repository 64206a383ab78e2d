# SPDX-License-Identifier: Apache-2.0
"""The tests of logical nodes that GPUs run (``tests/gpu/test_logical_nodes_gpu.py``), small, by processes on a CPU."""

from __future__ import annotations

import logical_nodes
from logical_nodes import Size

from magi_attention.testing.spawn import run_processes


def test_plans_late_ranks_and_attention(library, tmp_path):
    size = Size(plans=6, repetitions=4, tokens=32, heads=(4, 2), head_dim=8, cpu=(library, tmp_path))
    for faults, lines in run_processes(4, logical_nodes.main, 2, size):
        print(*lines, sep="\n")
        assert not faults
