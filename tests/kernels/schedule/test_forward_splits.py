# SPDX-License-Identifier: Apache-2.0
"""Which work tiles of a forward are split: those that would end long after the others."""

from __future__ import annotations

import numpy as np
import pytest
from schedule_oracle import end_of

from magi_attention.common.slices import SliceTable
from magi_attention.native.schedule import ForwardSplits, forward_splits
from magi_attention.native.tile_plan import TilePlan
from magi_attention.testing.libraries import planner_or_skip

MOST_PARTS = 16  # of a work tile


@pytest.fixture(scope="module", autouse=True)
def planner():
    planner_or_skip()


def splits_of(blocks: np.ndarray, head_units: int, sms: int) -> ForwardSplits | None:
    """Of a plan whose tiles see so many blocks of 128 keys."""
    rows = [[128 * i, 128 * i + 128, 0, 128 * count, 0] for i, count in enumerate(blocks.tolist())]
    plan = TilePlan.build(SliceTable(rows), 128 * len(blocks), 128 * int(blocks.max(initial=1)), 128, 2)
    assert plan.tiles[plan.order, 5].tolist() == sorted(blocks.tolist(), reverse=True)
    return forward_splits(plan, head_units, sms)


def parts_of(blocks: np.ndarray, splits: ForwardSplits | None) -> list[int]:
    """Blocks of each work tile, in the order in which they are taken."""
    found = []
    for place, count in enumerate(blocks.tolist()):
        is_split = splits is not None and place < splits.tiles
        parts = min(splits.parts, max(1, count // splits.blocks)) if is_split else 1
        found += [count * (i + 1) // parts - count * i // parts for i in range(parts)]
    return found


def last_end(work: list[int], head_units: int, sms: int) -> float:
    """Each work tile is there once for each head unit."""
    return end_of(np.repeat(work, head_units), sms)


def test_the_last_work_tile_ends_sooner():
    draws = np.random.default_rng(5)
    num_split = 0
    for _ in range(100):
        seed = int(draws.integers(1 << 30))
        rng = np.random.default_rng(seed)
        tiles, head_units, sms = int(rng.integers(1, 200)), int(rng.integers(1, 9)), int(rng.integers(8, 133))
        blocks = rng.integers(1, 12, tiles)
        blocks[: rng.integers(0, 4)] = rng.integers(1, 2_000)
        blocks = np.sort(blocks)[::-1]
        splits = splits_of(blocks, head_units, sms)
        whole, work = last_end(blocks.tolist(), head_units, sms), parts_of(blocks, splits)
        note = f"seed {seed}: {tiles} tiles, {head_units} head units, {sms} SMs, {splits}"
        assert sum(work) == blocks.sum() and min(work) >= 1, note
        if splits is None:
            continue
        num_split += 1
        assert 0 < splits.tiles <= tiles and 1 < splits.parts <= MOST_PARTS, note
        share = blocks.sum() * head_units / sms
        # Nothing more is to be had where a tile has as many parts as there may be.
        assert last_end(work, head_units, sms) <= max(2.1 * max(share, 8), blocks[0] / MOST_PARTS + share + 1), note
        assert last_end(work, head_units, sms) < whole, note
    assert num_split > 10


def test_even_tiles_stay_whole():
    assert splits_of(np.full(128, 64), 8, 132) is None
    assert splits_of(np.arange(128, 0, -1), 8, 132) is None  # causal
    assert splits_of(np.array([], dtype=np.int64), 8, 132) is None
    assert splits_of(np.zeros(40, dtype=np.int64), 8, 132) is None
