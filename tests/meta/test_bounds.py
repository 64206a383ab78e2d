# SPDX-License-Identifier: Apache-2.0
"""Least rows: below what any dispatch moves, exhaustively for small masks; equal where that is known."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from magi_attention.api import Mask
from magi_attention.common.slices import SliceTable
from magi_attention.config import DispatchConfig, DistAttnConfig, MinHeapDispatchAlg
from magi_attention.meta.planner import build_plan, plan_for_partitions
from magi_attention.meta.predict.bounds import MOST_TOKENS, least_rows
from magi_attention.testing.masks import random_slices


@pytest.mark.parametrize("seed", range(12))
def test_no_partition_moves_fewer(seed: int) -> None:
    print("seed", seed)
    rng = np.random.default_rng(seed)
    if seed % 2:
        cuts = np.unique(np.concatenate([[0, 24], rng.integers(1, 24, size=2)]))
        slices = Mask.varlen(cuts.tolist(), causal=bool(rng.integers(2))).slices
    else:
        slices = SliceTable(random_slices(rng, 24, 24, max_slices=4))
    for order in list(permutations(range(6)))[::7]:
        parts = [sorted(order[:3]), sorted(order[3:])] if seed % 3 else [sorted(order[i : i + 2]) for i in (0, 2, 4)]
        plan = plan_for_partitions(slices, 24, 0, 4, parts)
        assert (least_rows(plan) or 0) <= plan.comm_matrix().sum()


def test_documents_that_fit_need_nothing_and_full_ones_need_all() -> None:
    whole = plan_for_partitions(Mask.varlen([0, 50, 100, 150, 200]).slices, 200, 0, 50, [[0, 1], [2, 3]])
    assert least_rows(whole) == 0 == whole.comm_matrix().sum()
    full = build_plan(Mask.full(240).slices, 240, 4)
    assert least_rows(full) == 3 * 240 == full.comm_matrix().sum()
    assert least_rows(build_plan(SliceTable(np.zeros((0, 5), dtype=np.int64)), 64, 2)) == 0


def test_one_causal_sequence() -> None:
    """Ranks need, of N keys, at least the square roots of 1/n, 2/n ... n/n of them."""
    tokens, ranks = 1 << 14, 8
    config = DistAttnConfig(DispatchConfig(alg=MinHeapDispatchAlg()))
    plan = build_plan(Mask.causal(tokens).slices, tokens, ranks, config=config)
    least = tokens * (np.sqrt(np.arange(1, ranks + 1) / ranks).sum() - 1)
    assert least_rows(plan) == pytest.approx(least, rel=0.01)


def test_long_sequences_are_not_counted() -> None:
    assert least_rows(build_plan(Mask.causal(MOST_TOKENS + 1).slices, MOST_TOKENS + 1, 2)) is None
