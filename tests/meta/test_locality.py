# SPDX-License-Identifier: Apache-2.0
"""Dispatch by locality: valid partitions, the same everywhere, never worse than where it starts, fewer rows for
documents."""

from __future__ import annotations

import numpy as np
import pytest

from magi_attention.common.slices import SliceTable
from magi_attention.config import DispatchConfig, DistAttnConfig, LocalityDispatchAlg, MinHeapDispatchAlg
from magi_attention.errors import ContractError
from magi_attention.meta.planner import build_plan
from magi_attention.meta.solver.locality import improve, key_masks
from magi_attention.testing.masks import random_slices


def planned(slices: SliceTable, total: int, world: int, alg, chunk: int, uneven: bool = False):
    return build_plan(slices, total, world, config=DistAttnConfig(DispatchConfig(chunk, uneven, alg)))


def packed(seed: int, total: int) -> SliceTable:
    rng = np.random.default_rng(seed)
    cuts = np.unique(np.concatenate([[0, total], rng.integers(1, total, size=12)]))
    rows = [[a, b, a, b, 1] for a, b in zip(cuts, cuts[1:])]
    return SliceTable(np.array(rows))


def modelled(plan, cost: float) -> float:
    """As the algorithm counts: rows in whole chunks."""
    size = plan.chunk_size
    received = []
    for rank in range(plan.cp_size):
        stages = [r for ranges in plan.stage_ranges[rank] for r in ranges.tolist()]
        received.append(len({c for a, b in stages for c in range(a // size, (b - 1) // size + 1)}) * size)
    rows = 0.7 * max(received) + 0.3 * sum(received) / plan.cp_size
    return (plan.areas.max() + cost * rows) / plan.areas.mean()


@pytest.mark.parametrize("seed", range(6))
def test_documents_need_fewer_rows_at_the_same_balance(seed: int) -> None:
    print("seed", seed)
    slices = packed(seed, 4096)
    before = planned(slices, 4096, 4, MinHeapDispatchAlg(), 128)
    after = planned(slices, 4096, 4, LocalityDispatchAlg(), 128)
    assert modelled(after, 150.0) <= modelled(before, 150.0) + 1e-9
    assert after.comm_matrix().sum() < before.comm_matrix().sum()
    assert len({len(part) for part in after.partitions}) == 1
    assert planned(slices, 4096, 4, LocalityDispatchAlg(), 128).fingerprint == after.fingerprint
    free = planned(slices, 4096, 4, LocalityDispatchAlg(row_cost=0), 128)
    assert free.areas.max() <= before.areas.max()


@pytest.mark.parametrize("uneven", [False, True])
def test_random_masks(uneven: bool) -> None:
    for seed in range(20):
        print("seed", seed)
        rng = np.random.default_rng(seed)
        total, world = int(rng.integers(40, 300)), int(rng.choice((2, 3, 5)))
        slices = SliceTable(random_slices(rng, total, total, max_slices=8))
        plan = planned(slices, total, world, LocalityDispatchAlg(), int(rng.integers(2, 8)), uneven)
        assert sorted(c for part in plan.partitions for c in part) == list(range(plan.num_chunks))


def test_masks_name_the_chunks_that_are_read() -> None:
    pieces = np.array([[0, 4, 0, 4, 1], [4, 8, 2, 9, 0], [4, 8, 3, 3, 0]])
    assert key_masks(pieces, np.array([0, 1, 1]), 3, 4) == [0b001, 0b111, 0]


def test_a_swap_that_brings_readers_home_is_found() -> None:
    masks = [0b0101, 0b1010, 0b0101, 0b1010]  # 0 and 2 read each other, so do 1 and 3
    energy, parts = improve([[0, 1], [2, 3]], [5, 5, 5, 5], masks, chunk_cost=1.0)
    assert sorted(map(sorted, parts)) == [[0, 2], [1, 3]] and energy == pytest.approx(1.0)


def test_bad_cost() -> None:
    with pytest.raises(ContractError, match="row_cost"):
        LocalityDispatchAlg(row_cost=-1)
