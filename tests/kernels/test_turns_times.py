# SPDX-License-Identifier: Apache-2.0
"""What turns cost by the model's clock, on 132 multiprocessors: the order is near enough to what happens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from turns_model import Schedule, layers_by_rank, schedule_of, units_of
from turns_times import Times, time_of

from magi_attention.kernels.hand_out import NARROW, TILE, WIDE
from magi_attention.testing import masks
from magi_attention.testing.libraries import planner_or_skip

CTAS = 132
WIDE_TIMES = Times()
NARROW_TIMES = Times(step=1.5, seen=0.5)  # head dim 64, steps of 64
UNEVEN = np.cumsum([0, 3000, 200, 1700, 100, 900, 1300, 992]).tolist()  # documents
LONG = [3503, 249, 924, 9659, 1248, 801]
MASKS = {
    "causal": masks.causal(8192),
    "full documents": masks.varlen(UNEVEN, 0),
    "causal documents": masks.varlen(UNEVEN, 1),
    "window": masks.sliding_window(8192, 512),
}
SHAPES = {f"{kv * group} on {kv}": (kv, group) for kv, group in ((8, 1), (16, 1), (16, 2), (8, 4), (8, 6), (8, 8))}


@pytest.fixture(scope="module", autouse=True)
def planner():
    planner_or_skip()


def cost_of(
    slices, total: int, heads: tuple[int, int], times: Times = WIDE_TIMES, may_be_twice: bool = True, **changes
) -> float:
    tiles = layers_by_rank(slices.array, total, total, TILE, WIDE if times is WIDE_TIMES else NARROW)
    dim = 128 if times is WIDE_TIMES else 64
    schedule = schedule_of(total, *heads, dim, CTAS, may_be_twice)
    units = units_of(tiles, replace(schedule, **changes))
    return time_of(units, CTAS, times) / time_of(units, CTAS, times, in_turns=False)


SHORT = ((1024, (24, 1)), (1024, (32, 1)), (2048, (8, 1)), (4096, (8, 2)), (4096, (8, 3)))


@pytest.mark.parametrize("total, heads", SHORT, ids=str)
@pytest.mark.parametrize("name", ("causal", "window"))
def test_short_calls_too(name, total, heads):
    """Head dim 64: few tiles of many heads, units that begin together, windows that half of the tiles see cut off."""
    slices = masks.causal(total) if name == "causal" else masks.sliding_window(total, total // 4)
    cost = cost_of(slices, total, heads, NARROW_TIMES)
    print(f"{cost:.3f}")
    assert 1.0 <= cost < 1.2


@pytest.mark.parametrize("is_narrow", (False, True), ids=("128", "64"))
@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize("name", MASKS)
def test_turns_cost_little(name, heads, is_narrow):
    slices = MASKS[name]
    times = NARROW_TIMES if is_narrow else WIDE_TIMES
    cost = cost_of(slices, int(slices.array[:, 1].max()), SHAPES[heads], times)
    print(f"{cost:.3f}")
    assert 1.0 <= cost < 1.2


def test_what_each_rule_is_for():
    causal = MASKS["causal"]
    assert cost_of(causal, 8192, (16, 1), may_be_twice=False, few_heads=0, late_halves=0) > 1.4, "all backwards"
    assert cost_of(causal, 8192, (8, 6), late_halves=0) > 1.08 > cost_of(causal, 8192, (8, 6)), "those behind are late"
    short, narrow = masks.causal(4096), NARROW_TIMES
    shorter = masks.causal(1024)
    assert cost_of(short, 4096, (8, 1), narrow, most_apart=0) > 1.3, "apart"
    assert cost_of(short, 4096, (8, 1), narrow) < 1.12
    assert cost_of(short, 4096, (8, 2), narrow, most_apart=1) > 1.15, "two heads, too"
    assert cost_of(short, 4096, (8, 2), narrow) < 1.05
    assert cost_of(short, 4096, (8, 3), narrow, few_if_kept=0) > 1.15, "one way however few"
    assert cost_of(shorter, 1024, (24, 1), narrow, few_if_kept=0) > 1.5 > 1.15 > cost_of(shorter, 1024, (24, 1), narrow)
    assert cost_of(causal, 8192, (16, 1), narrow, may_be_twice=False) > 1.2, "large sections"
    assert cost_of(causal, 8192, (16, 1), narrow) < 1.15
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
