# SPDX-License-Identifier: Apache-2.0
"""What turns cost by the model's clock, on 132 multiprocessors: the order is near enough to what happens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from turns_model import Schedule, layers_by_rank, units_of
from turns_times import Times, time_of

from magi_attention.kernels.hand_out import TILE, WIDE
from magi_attention.kernels.unit_walks import UnitShape, _heads_per_section
from magi_attention.testing import masks
from magi_attention.testing.libraries import planner_or_skip

CTAS = 132
UNEVEN = np.cumsum([0, 3000, 200, 1700, 100, 900, 1300, 992]).tolist()  # documents
LONG = [3503, 249, 924, 9659, 1248, 801]
MASKS = {
    "causal": masks.causal(8192),
    "full documents": masks.varlen(UNEVEN, 0),
    "causal documents": masks.varlen(UNEVEN, 1),
}
SHAPES = {"16 on 16": (16, 1), "32 on 16": (16, 2), "32 on 8": (8, 4), "48 on 8": (8, 6), "64 on 8": (8, 8)}


@pytest.fixture(scope="module", autouse=True)
def planner():
    planner_or_skip()


def schedule_of(tiles: int, heads_kv: int, group: int) -> Schedule:
    at_once = _heads_per_section(tiles, UnitShape(heads_kv, group, CTAS, CTAS))
    sections = -(-heads_kv // at_once)
    return Schedule(CTAS, at_once, group, sections=sections, last_kinds=heads_kv - (sections - 1) * at_once)


def cost_of(slices, total: int, heads: tuple[int, int], **changes) -> float:
    tiles = layers_by_rank(slices.array, total, total, TILE, WIDE)
    units = units_of(tiles, replace(schedule_of(len(tiles), *heads), **changes))
    return time_of(units, CTAS, Times()) / time_of(units, CTAS, Times(), in_turns=False)


@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize("name", MASKS)
def test_turns_cost_little(name, heads):
    slices = MASKS[name]
    cost = cost_of(slices, int(slices.array[:, 1].max()), SHAPES[heads])
    print(f"{cost:.3f}")
    assert 1.0 <= cost < 1.2


def test_what_each_rule_is_for():
    causal = MASKS["causal"]
    assert cost_of(causal, 8192, (16, 1), few_heads=0, late_halves=0) > 1.4, "all backwards"
    assert cost_of(causal, 8192, (8, 6), late_halves=0) > 1.08 > cost_of(causal, 8192, (8, 6)), "those behind are late"
    long = masks.varlen(np.cumsum([0, *LONG]).tolist(), 0)
    assert cost_of(long, 16384, (4, 8), has_later_turns=False) > 1.2 > 1.05 > cost_of(long, 16384, (4, 8)), "their own"


def test_by_hand():
    """Two CTAs at the same two blocks: the second waits for the first, once."""
    tiles = layers_by_rank(masks.full(256).array, 256, 256, TILE, TILE)
    times = Times(step=4.0, read=0.0, added=1.0, seen=0.5, begin=2.0, end=3.0)
    units = units_of(tiles, Schedule(2, 1, 1, few_heads=0))
    assert [u.turns for u in units] == [(0, 0), (1, 1)]
    assert time_of(units, 2, times, in_turns=False) == 2 + 2 * 4 + 1 + 3
    assert time_of(units, 2, times) == 2 + 2 * 4 + 1.5 + 1 + 3
