# SPDX-License-Identifier: Apache-2.0
"""How fast links are, for each GPU: the one table for the planner, for what runs a plan and for the simulator.

Links in a node were measured on H100 and H200 GPUs with NVLink. ``MachineRates`` of `magi tune` take the place of those
of NVLink where a user gives them.

| | measured as |
|---|---|
| ``NVLINK_BYTES_PER_S``, ``NVLINK_LATENCY_S`` | what the put of one launch moves (docs/log/one_launch.md) |
| ``NCCL_BYTES_PER_S`` | received by all-to-all-v (group_collectives_h100x2.json, "by all-to-all") |
| ``GATHER_BYTES_PER_S`` | received by all-gather (context_parallel_h100x2.json and context_parallel_h200x4.json) |
| ``NCCL_LATENCY_S`` | a collective that moves next to nothing (all-gather of the same two) |

``NETWORK_BYTES_PER_S`` and ``NETWORK_LATENCY_S``, of links between nodes, are assumed: one InfiniBand NDR port of
400 Gb/s for each GPU. No network was measured.
"""

from __future__ import annotations

NVLINK_BYTES_PER_S = 300e9
NVLINK_LATENCY_S = 1e-5
NCCL_BYTES_PER_S = 210e9
GATHER_BYTES_PER_S = 280e9
NCCL_LATENCY_S = 3e-5

NETWORK_BYTES_PER_S = 50e9
NETWORK_LATENCY_S = 1e-5
