# SPDX-License-Identifier: Apache-2.0
"""In which order tiles are taken while rows arrive, against a walk through every tile, block by block."""

from __future__ import annotations

import heapq
import re

import numpy as np
import pytest
import torch

from magi_attention.common.slices import SliceTable
from magi_attention.functional.one_launch.base import _L2_GROUP_BYTES
from magi_attention.kernels.ffa.arrival import Pace
from magi_attention.kernels.ffa.peer_kv import TILE, RemoteMask
from magi_attention.kernels.ffa.plans import PlanShape
from magi_attention.native import abi
from magi_attention.native.ffa import FfaTile
from magi_attention.native.planner.tile_plan import TilePlan
from magi_attention.testing.libraries import csrc_or_skip
from magi_attention.testing.masks import random_slices

pytestmark = pytest.mark.usefixtures("planner")

ROWS, PACK, HEADS = 1024, 8, 64  # tokens of a rank, query heads of a kv head, query heads
PAIR = 1e-8  # so that keys of one tile take about as long as a signal


def random_mask(seed: int, late: float = 1.0) -> RemoteMask:
    rng = np.random.default_rng(seed)
    base, tiles = ROWS + TILE, int(rng.integers(1, 17))
    local, remote = (random_slices(rng, ROWS, keys, max_slices=6) for keys in (ROWS, TILE * tiles))
    remote[:, 2:4] += base
    signals = int(rng.integers(1, tiles + 1))
    arrivals = np.sort(np.concatenate([np.arange(signals), rng.integers(0, signals, tiles - signals)]))[::-1]
    if rng.random() < 0.5:
        arrivals = rng.permutation(arrivals)
    when = late * np.cumsum(rng.uniform(0, 1e-3, signals))
    pace = Pace(when, PAIR, 2.5 * PAIR, heads=PACK, l2_group_heads=HEADS)
    table = SliceTable(np.concatenate([local, remote]))
    return RemoteMask(table, ROWS, base, arrivals.astype(np.int32), pace, 0)


def plan_of(mask: RemoteMask, is_transposed: bool) -> tuple[TilePlan, np.ndarray]:
    """The plan and its second order."""
    tile = FfaTile(TILE if is_transposed else 128 // PACK, 2, 1)
    words = mask.plan(PlanShape(ROWS, mask.total_k, tile, is_transposed), torch.device("cpu"))[0].numpy().copy()
    plan = TilePlan(words)
    return plan, words[abi.TilePlanHeader.from_buffer(words).words_first_order :][: len(plan.tiles)]


def waits(mask: RemoteMask, plan: TilePlan, tile: int) -> list[tuple[float, float]]:
    """(seconds of work before it, when its rows are there) of each block of keys that a tile of queries comes to."""
    first, count = plan.tiles[tile, 2:4].tolist()
    found, done = [], 0
    for low, high in plan.records[first : first + count, 0:2].tolist():
        keys = np.arange(high - 1, max(low, mask.base) - 1, -1)
        for key in keys[(keys == high - 1) | ((keys - mask.base) % TILE == TILE - 1)].tolist():
            signal = mask.arrivals[(key - mask.base) // TILE]
            found.append(((done + high - 1 - key) * 128 * mask.pace.pair, mask.pace.signals[signal]))
        done += high - low
    return [*found, (done * 128 * mask.pace.pair, 0.0)]


@pytest.mark.parametrize("seed", range(20))
def test_tiles_of_keys_go_as_they_arrive(seed: int) -> None:
    print("seed", seed)
    mask = random_mask(seed, late=10.0)  # all of them
    plan, first = plan_of(mask, is_transposed=True)
    assert np.array_equal(np.sort(first), np.arange(len(plan.tiles)))
    when = np.concatenate([np.full(mask.base // TILE, -1.0), mask.pace.signals[mask.arrivals]])[first]
    cost = plan.tiles[first, 4]
    assert (np.diff(when) >= 0).all() and (np.diff(cost)[np.diff(when) == 0] <= 0).all()


def idle(mask: RemoteMask, plan: TilePlan, order: np.ndarray) -> float:
    """Seconds that multiprocessors wait, if tiles are taken in this order, each for all heads."""
    free, lost, walks = [0.0] * 116, 0.0, [waits(mask, plan, tile) for tile in range(len(plan.tiles))]
    for tile in np.repeat(order, HEADS // PACK).tolist():
        begin = now = heapq.heappop(free)
        walk = walks[tile]
        for before, there in walk:
            now = max(now, there - before)
        lost += now - begin
        heapq.heappush(free, now + walk[-1][0])
    return lost


@pytest.mark.parametrize("late", [0.5e-3, 1e-3, 2e-3])
def test_less_waiting_than_by_cost_or_by_the_last_arrival(late: float) -> None:
    """Under a causal mask the costliest tiles find most of what they need in time: shorter ones have less to do before
    they come to what arrives last. Under one of documents those that need nothing go first."""
    base, buffer = ROWS + TILE, 4096
    causal = [[0, ROWS, 0, ROWS, 1]]
    causal += [[q, q + 128, base, base + buffer * (q + 128) // ROWS, 0] for q in range(0, ROWS, 128)]
    documents = [[0, 512, 0, 512, 0], [512, 1024, 512, 768, 0], [512, 768, base, base + buffer // 2, 0]]
    documents += [[768, 1024, base + buffer // 2, base + buffer, 0]]
    arrivals = (np.arange(buffer // TILE) < 16).astype(np.int32)  # the second half of the keys first
    pace = Pace(np.array([late, 2 * late]), PAIR / 4, 0.0, PACK, HEADS)
    for rows in (causal, documents):
        mask = RemoteMask(SliceTable(np.array(rows)), ROWS, base, arrivals, pace, 0)
        plan, first = plan_of(mask, is_transposed=False)
        last = np.array([max(there for _, there in waits(mask, plan, t)) for t in range(len(plan.tiles))])
        by_arrival = np.lexsort((-plan.tiles[:, 4], last))
        found = {n: idle(mask, plan, o) for n, o in (("slack", first), ("cost", plan.order), ("last", by_arrival))}
        print(late, found)
        assert found["slack"] <= min(found["cost"], found["last"]) * 1.001 and found["slack"] < max(found.values())


def test_sections_are_those_of_the_kernel() -> None:
    source = (csrc_or_skip() / "ffa" / "common" / "fwd_scalars.h").read_text()
    factor, shift = re.search(r"kL2GroupBytes = (\d+)ll << (\d+);", source).groups()
    assert int(factor) << int(shift) == _L2_GROUP_BYTES
