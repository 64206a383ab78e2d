# SPDX-License-Identifier: Apache-2.0
"""Exchanges over logical nodes of several GPUs, by NVSHMEM: random plans beside all-to-all-v bit for bit with rows
between nodes counted, late ranks, six masks beside float64, memory given back, and a rank that ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from places import NEEDS_A_GPU, over_nvshmem

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "comm"))
import logical_nodes  # noqa: E402

pytestmark = [pytest.mark.gpu, NEEDS_A_GPU]
SHAPES = [(4, 2), (4, 1), (8, 4), (8, 2)]  # ranks, ranks of a node
SIZE = logical_nodes.Size(plans=500, repetitions=100, tokens=512, heads=(8, 2), head_dim=64)
TIMEOUT_S = 5.0  # of the group in which a rank ends


def run(main, world: int, *args, timeout_s: float) -> list:
    return over_nvshmem(main, world, *args, timeout_s=timeout_s, grace_s=15.0, backend="cpu:gloo,cuda:nccl")


@pytest.mark.parametrize("world, node_size", SHAPES)
def test_rows_sums_and_attention(world, node_size):
    results = run(logical_nodes.main, world, node_size, SIZE, timeout_s=110.0)
    for rank, (faults, lines) in enumerate(results):
        print(*lines, sep="\n")
        assert not faults, f"rank {rank}: {len(faults)} faults, {faults[:5]}"


@pytest.mark.parametrize("world, node_size, verb", [(4, 2, "put"), (4, 1, "end"), (8, 4, "end"), (8, 2, "put")])
def test_a_rank_that_ends_is_named(world, node_size, verb):
    run(logical_nodes.end_in_an_exchange, world, node_size, SIZE, verb, TIMEOUT_S, timeout_s=60.0)
