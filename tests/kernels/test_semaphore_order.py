# SPDX-License-Identifier: Apache-2.0
"""Semaphore order of the deterministic backward: no CTA waits for ever, and sums have one order, whichever are slow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from semaphore_model import (
    MANY_TILES,
    Schedule,
    WorkTile,
    begins_apart,
    expected_starts,
    mode_of,
    run,
    segments_by_order,
    work_tiles_of,
)

from magi_attention.testing import masks
from magi_attention.testing.libraries import planner_or_skip

TILE, BLOCK, WIDE_BLOCK = 16, 8, 10  # as 128, 64 and 80


@pytest.fixture(scope="module", autouse=True)
def planner():
    planner_or_skip()


def check(slices, total_q: int, total_k: int, schedule: Schedule, seed: int, block: int = BLOCK) -> tuple[bool, str]:
    """Two runs with different CTAs slow; the mode that was used."""
    tiles = segments_by_order(slices, total_q, total_k, TILE, block)
    work_tiles = work_tiles_of(tiles, schedule)
    first, second = (run(work_tiles, schedule.ctas, np.random.default_rng([seed, n])) for n in (0, 1))
    assert first == second, "the order depends on who is slow"
    contributions = [(u.head, head, at, u.order_idx) for u in work_tiles for head, at in u.steps]
    assert sorted(contributions) == sorted((*key, order_idx) for key, found in first.items() for order_idx in found)
    return mode_of(tiles, schedule)


@settings(max_examples=60, deadline=None, print_blob=True)
@given(
    seed=st.integers(0, 2**31),
    sizes=st.tuples(st.integers(1, 260), st.integers(1, 260)),
    count=st.integers(1, 30),
    schedule=st.builds(
        Schedule,
        ctas=st.integers(1, 12),
        kinds=st.integers(1, 3),
        heads=st.integers(1, 3),
        most_timed=st.sampled_from((0, 1024)),
        l2_groups=st.integers(1, 3),
        last_kinds=st.integers(0, 3),
        few_heads=st.sampled_from((0, 4)),
        few_if_kept=st.sampled_from((0, 1, 3)),
        most_apart=st.sampled_from((0, 1, 2)),
        traversed=st.sampled_from((0.0, 0.5, 1.5)),
    ),
    block=st.sampled_from((BLOCK, WIDE_BLOCK)),
)
def test_random_masks(seed, sizes, count, schedule, block):
    check(masks.random_slices(np.random.default_rng(seed), *sizes, max_slices=count), *sizes, schedule, seed, block)


@settings(max_examples=40, deadline=None, print_blob=True)
@given(
    seed=st.integers(0, 2**31),
    total=st.integers(1, 400),
    count=st.integers(1, 12),
    ctas=st.integers(1, 3 * MANY_TILES),
    kinds=st.integers(1, 3),
    heads=st.integers(1, 2),
)
def test_work_tiles_that_begin_apart(seed, total, count, ctas, kinds, heads):
    """One L2 group of work tiles of one or two query heads, whose traversals wrap around."""
    schedule, rng = Schedule(ctas, kinds, heads, few_if_kept=4, most_apart=2), np.random.default_rng(seed)
    ends = np.unique(rng.integers(0, total + 1, count))
    slices = masks.varlen([0, *ends[(ends > 0) & (ends < total)].tolist(), total], int(rng.integers(0, 2)))
    check(slices.array, total, total, schedule, seed)
    tiles = segments_by_order(slices.array, total, total, TILE, BLOCK)
    assert begins_apart(tiles, "timed", schedule)
    for work_tile in work_tiles_of(tiles, schedule):
        at = [block for head, block in work_tile.steps if head == 0]
        assert sum(b > a for a, b in zip(at, at[1:], strict=False)) <= len(tiles[work_tile.order_idx]), "wraps once"


@settings(max_examples=60, deadline=None, print_blob=True)
@given(
    seed=st.integers(0, 2**31),
    total=st.integers(1, 400),
    count=st.integers(1, 30),
    ctas=st.integers(1, 40),
    kinds=st.integers(1, 3),
    heads=st.sampled_from((1, 2, 4)),
    parts=st.sampled_from((2, 4)),
    edges=st.tuples(st.integers(0, 26), st.integers(0, 26)),
    most_timed=st.sampled_from((0, 1024)),
)
def test_tiles_that_are_split(seed, total, count, ctas, kinds, heads, parts, edges, most_timed):
    """Any run of tiles, on masks of any kind: parts of a tile may begin one after the other."""
    schedule = Schedule(ctas, kinds, heads * parts, most_timed=most_timed, split=(*sorted(edges), parts))
    rng = np.random.default_rng(seed)
    if rng.random() < 0.5:
        ends = np.unique(rng.integers(0, total + 1, count))
        slices = masks.varlen([0, *ends[(ends > 0) & (ends < total)].tolist(), total], int(rng.integers(0, 2))).array
    else:
        slices = masks.random_slices(rng, total, total, max_slices=count)
    check(slices, total, total, schedule, seed)


def test_parts_may_have_other_targets():
    """Those of a tile that begin when others end, one after the other."""
    tiles = segments_by_order(masks.varlen([0, 90, 100, 300, 400], 1).array, 400, 400, TILE, BLOCK)
    work_tiles = work_tiles_of(tiles, Schedule(6, 1, 8, split=(3, 9, 2)))
    targets = [(u.order_idx, {(at, target) for (_, at), target in zip(u.steps, u.targets)}) for u in work_tiles]
    pairs = list(zip(targets[3:15:2], targets[4:15:2]))
    assert len(work_tiles) == len(tiles) + 6 and all(a[0] == b[0] for a, b in pairs)
    assert any(a[1] != b[1] for a, b in pairs)
    wholes = targets[:3] + targets[15:]
    assert any(len({at for at, _ in found}) < len(found) for _, found in wholes), "one for each part of its heads"


def test_every_mode_of_the_order_is_met():
    total, found = 400, set()
    families = {
        "timed": masks.varlen([0, 90, 100, 300, 400], 1),
        "waves of bands": masks.sliding_window(total, 60),
        "tiles": masks.random_slices(np.random.default_rng(3), total, total, max_slices=40),
    }
    schedules = (
        Schedule(7, 1, 2),
        Schedule(8, 2, 2, l2_groups=2),
        Schedule(30, 2, 1),
        Schedule(6, 2, 2, l2_groups=3, last_kinds=1),
        Schedule(5, 1, 1, most_timed=0, l2_groups=2),
    )
    for seed, slices in enumerate(families.values()):
        for schedule in schedules:
            for block in (BLOCK, WIDE_BLOCK):
                found.add(check(getattr(slices, "array", slices), total, total, schedule, seed, block))
    assert {mode for _, mode in found} == {"timed", "waves", "tiles"} and (True, "waves") in found


def test_later_l2_groups_have_targets_of_their_own():
    """Where work tiles traverse in both directions: those behind the first begin at other times."""
    tiles = segments_by_order(masks.varlen([0, 90, 100, 300, 400], 1).array, 400, 400, TILE, BLOCK)
    work_tiles = work_tiles_of(tiles, Schedule(6, 2, 2, l2_groups=3, last_kinds=1))
    targets = [{(u.order_idx, u.head % 2): u.targets for u in work_tiles if u.head // 2 == group} for group in range(3)]
    assert targets[0] != targets[1]
    assert targets[2] == {key: targets[1][key] for key in targets[2]} and len(targets[2]) == len(tiles)
    one_way = Schedule(16, 2, 1, l2_groups=2)
    assert one_way.is_one_way and len(expected_starts(tiles, "timed", False, one_way)) == 1


def test_a_wrong_order_is_found():
    """Two work tiles start with a block at which the other has the first target."""
    blocks = ((0, 0), (0, 1))
    circle = [WorkTile(0, 0, blocks, (1, 0)), WorkTile(1, 0, blocks[::-1], (1, 0))]
    with pytest.raises(AssertionError, match="waits for another"):
        run(circle, 2, np.random.default_rng(0))


def test_work_tiles_taken_before_the_last_one_is_added_may_wait_in_a_circle():
    """As the kernel once took them: the work tile that a CTA waits for may be the one that it has in hand."""
    tiles = segments_by_order(np.array([[0, 200, 0, 200, 1]]), 200, 200, TILE, BLOCK)
    work_tiles, stuck = work_tiles_of(tiles, Schedule(5, 1, 1)), 0
    for seed in range(20):
        run(work_tiles, 5, np.random.default_rng(seed))
        try:
            run(work_tiles, 5, np.random.default_rng(seed), early=3)
        except AssertionError:
            stuck += 1
    assert stuck
