# SPDX-License-Identifier: Apache-2.0
"""How long tiles are and who gets which work tile, as the host foresees it."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from magi_attention.common.slices import to_dense
from magi_attention.errors import ContractError
from magi_attention.kernels.ffa.schedule.simulate import groups_of, starts_of, steps_of_tiles
from magi_attention.native.tile_plan import TilePlan, transposed
from magi_attention.testing.libraries import planner_or_skip
from magi_attention.testing.masks import random_slices


@pytest.fixture(scope="module", autouse=True)
def planner():
    planner_or_skip()


@pytest.mark.parametrize("queries", (64, 80))
@pytest.mark.parametrize("seed", range(20))
def test_steps_are_blocks_of_queries_that_a_tile_visits(seed, queries):
    """For each layer, those from the first pair to the last, by the intervals of its tokens; so no block with a pair in
    it is left out, and of one slice none is visited without."""
    rng = np.random.default_rng(seed)
    total = int(rng.integers(1, 700))
    drawn = random_slices(rng, total, total, max_slices=1 if seed % 2 else 6)
    plan = TilePlan.build(transposed(drawn, total, total), total, total, 128, 2)
    steps = steps_of_tiles(plan, queries)
    dense = to_dense(drawn, total, total).astype(bool)
    for tile, (begin, layers) in enumerate(plan.tiles[:, 2:4].tolist()):
        visited: list[int] = []
        for layer in range(begin, begin + layers):
            seen = [q for low, high in plan.intervals[layer].tolist() if low < high for q in (low, high - 1)]
            visited += range(min(seen) // queries, max(seen) // queries + 1)
        assert steps[tile] == len(visited), (seed, tile)
        pairs = dense[:, 128 * tile : 128 * (tile + 1)].any(1)
        needed = {q // queries for q in np.flatnonzero(pairs).tolist()}
        assert needed <= set(visited) and (len(drawn) > 1 or len(visited) == len(needed)), (seed, tile)


def test_work_tiles_go_to_the_cta_that_is_free_first():
    assert starts_of(np.array([5, 3, 4, 1]), 2).tolist() == [0, 0, 3, 5]
    assert starts_of(np.array([3.0]), 4).tolist() == [0] and len(starts_of(np.zeros(0), 4)) == 0


@pytest.mark.parametrize("seed", range(20))
def test_starts_of_many_work_tiles(seed):
    rng = np.random.default_rng(seed)
    times, num_ctas = rng.random(int(rng.integers(1, 500))), int(rng.integers(1, 40))
    free_at, want = [0.0] * num_ctas, []
    for time in times.tolist():
        want.append(free_at[0])
        heapq.heapreplace(free_at, free_at[0] + time)
    assert starts_of(times, num_ctas).tolist() == want


@pytest.mark.parametrize("seed", range(40))
def test_groups_of_tiles(seed):
    """Each tile that visits something once, and always the longest that fits, of equal ones the last."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, int(rng.integers(2, 60)), int(rng.integers(0, 200)))
    wave = int(rng.integers(1, 100))
    left, want = sorted((count, tile) for tile, count in enumerate(blocks.tolist()) if count), []
    for number in range(len(left)):
        fitting = left[-1:]
        room = wave
        while fitting:
            count, tile = fitting[-1]
            want.append((tile, number))
            left.remove((count, tile))
            room -= count
            fitting = [one for one in left if one[0] <= room]
    tiles, groups = groups_of(blocks, wave)
    assert list(zip(tiles.tolist(), groups.tolist())) == want


def test_nowhere_to_go():
    with pytest.raises(ContractError, match="num_ctas 0"):
        starts_of(np.ones(3), 0)
