# SPDX-License-Identifier: Apache-2.0
"""Dispatch by locality: balanced, never more rows than by MinHeap, valid for any mask, zigzag of a causal sequence."""

from __future__ import annotations

import numpy as np
import pytest
from plan_oracle import least_work

from magi_attention.api import Mask
from magi_attention.common.slices import SliceTable
from magi_attention.config import DispatchConfig, DistAttnConfig, LocalityDispatchAlg, MinHeapDispatchAlg
from magi_attention.errors import ContractError
from magi_attention.meta.planner import build_plan
from magi_attention.testing.masks import random_slices


def planned(slices: SliceTable, total: int, world: int, alg, chunk: int, uneven: bool = False):
    return build_plan(slices, total, world, config=DistAttnConfig(DispatchConfig(chunk, uneven, alg)))


def packed(rng: np.random.Generator, total: int, documents: int, causal: bool = True) -> Mask:
    cuts = np.unique(np.concatenate([[0, total], rng.integers(1, total, size=documents)]))
    return Mask.varlen(cuts.tolist(), causal=causal)


def check_against_min_heap(slices: SliceTable, total: int, world: int, chunk: int, uneven: bool = False):
    before = planned(slices, total, world, MinHeapDispatchAlg(), chunk, uneven)
    after = planned(slices, total, world, LocalityDispatchAlg(), chunk, uneven)
    assert sorted(c for part in after.partitions for c in part) == list(range(after.num_chunks))
    then, now = (plan.comm_matrix().sum(axis=0) for plan in (before, after))
    assert now.max() <= then.max() and now.sum() <= then.sum()
    if after.partitions != before.partitions:
        assert after.areas.max() <= 1.01 * least_work(after)
    return before, after


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("world", [2, 5, 16])
def test_documents_need_fewer_rows_at_the_same_balance(seed: int, world: int) -> None:
    print("seed", seed)
    rng = np.random.default_rng(seed)
    total = world * 1024
    slices = packed(rng, total, 4 * world, bool(seed % 3)).slices
    before, after = check_against_min_heap(slices, total, world, 32)
    assert after.comm_matrix().sum() < 0.9 * before.comm_matrix().sum()
    assert {len(part) for part in after.partitions} == {32}
    assert planned(slices, total, world, LocalityDispatchAlg(), 32).fingerprint == after.fingerprint


@pytest.mark.parametrize("uneven", [False, True])
def test_random_masks(uneven: bool) -> None:
    for seed in range(40):
        print("seed", seed)
        rng = np.random.default_rng(seed)
        total, world = int(rng.integers(40, 600)), int(rng.choice((2, 3, 5, 8)))
        slices = SliceTable(random_slices(rng, total, total, max_slices=12))
        check_against_min_heap(slices, total, world, int(rng.integers(2, 8)), uneven)


def test_trees_and_blocks_and_no_pairs() -> None:
    rng = np.random.default_rng(3)
    parents = [-1] + [int(rng.integers(0, node)) for node in range(1, 60)]
    tree = Mask.prefix_tree(rng.integers(1, 90, size=60), parents)
    for mask in (tree, Mask.block_causal([0, 900, 1500, 4000], 100), Mask.from_slices([[0, 1]], [[0, 1]], 0, 999, 999)):
        check_against_min_heap(mask.slices, mask.total_q, 4, 13)


def test_one_causal_sequence_is_zigzag() -> None:
    total, world = 4096, 8
    _, plan = check_against_min_heap(Mask.causal(total).slices, total, world, total // world // 16)
    assert plan.imbalance < 1.002
    assert all(len(plan.host_ranges(rank)) <= 3 for rank in range(world))
    zigzag = total * (3 / 4 + 1 / (4 * world)) - total / world  # rows that a rank fetches in the mean
    assert plan.comm_matrix().sum() / world < 1.02 * zigzag


def test_a_window_is_cut_into_contiguous_ranks() -> None:
    _, plan = check_against_min_heap(Mask.sliding_window(8192, (63, 0)).slices, 8192, 8, 64)
    assert all(len(plan.host_ranges(rank)) == 1 for rank in range(8))


def test_the_default() -> None:
    mask = packed(np.random.default_rng(0), 4096, 9)
    default = build_plan(mask.slices, 4096, 4)
    named = build_plan(mask.slices, 4096, 4, config=DistAttnConfig(DispatchConfig(alg=LocalityDispatchAlg())))
    assert DispatchConfig().alg == LocalityDispatchAlg() and default.fingerprint == named.fingerprint


def test_bad_cost() -> None:
    with pytest.raises(ContractError, match="row_cost"):
        LocalityDispatchAlg(row_cost=-1)
