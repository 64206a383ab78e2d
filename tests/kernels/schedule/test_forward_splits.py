# SPDX-License-Identifier: Apache-2.0
"""Which work tiles of a forward are split: those that would end long after the others."""

from __future__ import annotations

import numpy as np
import pytest
from schedule_oracle import end_of

from magi_attention.common.slices import SliceTable
from magi_attention.native.planner.schedule import ForwardSplits, forward_splits
from magi_attention.native.planner.tile_plan import TilePlan
from magi_attention.testing.libraries import planner_or_skip

MOST_PARTS = 16  # of a work tile


@pytest.fixture(scope="module", autouse=True)
def planner():
    planner_or_skip()


def splits_of(blocks: np.ndarray, head_units: int, sms: int) -> ForwardSplits | None:
    """The splits of a plan whose tiles see so many blocks of 128 keys."""
    rows = [[128 * i, 128 * i + 128, 0, 128 * count, 0] for i, count in enumerate(blocks.tolist())]
    plan = TilePlan.build(SliceTable(rows), 128 * len(blocks), 128 * int(blocks.max(initial=1)), 128, 2)
    return forward_splits(plan, head_units, sms)


def test_the_last_work_tile_ends_sooner():
    draws, num_split = np.random.default_rng(5), 0
    for _ in range(100):
        seed = int(draws.integers(1 << 30))
        rng = np.random.default_rng(seed)
        tiles, head_units, sms = int(rng.integers(1, 200)), int(rng.integers(1, 9)), int(rng.integers(8, 133))
        blocks = rng.integers(1, 12, tiles)
        blocks[: rng.integers(0, 4)] = rng.integers(1, 2_000)
        blocks = np.sort(blocks)[::-1]
        splits = splits_of(blocks, head_units, sms)
        if splits is None:
            continue
        num_split += 1
        note = f"seed {seed}: {tiles} tiles, {head_units} head units, {sms} SMs, {splits}"
        assert 0 < splits.tiles <= tiles and 1 < splits.parts <= MOST_PARTS, note
        work: list[int] = []  # blocks of each work tile, in the order in which they are taken
        for place, count in enumerate(blocks.tolist()):
            parts = min(splits.parts, max(1, count // splits.blocks)) if place < splits.tiles else 1
            work += [count * (i + 1) // parts - count * i // parts for i in range(parts)]
        assert min(work) >= 1, note
        whole, end = (end_of(np.repeat(x, head_units), sms) for x in (blocks, work))
        share = blocks.sum() * head_units / sms
        # Nothing more is to be had where a tile has as many parts as there may be.
        assert end < whole and end <= max(2.1 * max(share, 8), blocks[0] / MOST_PARTS + share + 1), note
    assert num_split > 10


def test_even_tiles_stay_whole():
    for blocks in (np.full(128, 64), np.arange(128, 0, -1), np.zeros(0, dtype=np.int64), np.zeros(40, dtype=np.int64)):
        assert splits_of(blocks, 8, 132) is None
