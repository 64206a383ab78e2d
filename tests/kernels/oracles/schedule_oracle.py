# SPDX-License-Identifier: Apache-2.0
"""What tests of schedules count by: m-blocks that tiles visit, the end of the last work tile, what a cache misses."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from magi_attention.common.mask import Mask
from magi_attention.common.slices import SliceTable
from magi_attention.native.planner.abi import TRAVERSAL_WRAP
from magi_attention.native.planner.tile_plan import TilePlan
from magi_attention.testing import masks

TILE, NARROW, WIDE = 128, 64, 80  # keys of a tile; queries of m-blocks


def plan_of(slices, total_q: int, total_k: int) -> TilePlan:
    """The transposed plan of a backward."""
    table = slices if isinstance(slices, SliceTable) else SliceTable(slices)
    return TilePlan.of_table(table, total_q, total_k, TILE, 2, is_transposed=True)


def random_documents(rng: np.random.Generator, total: int, causal: bool = False) -> Mask:
    """Documents of one length, or up to twelve of any length."""
    edges = rng.integers(0, total + 1, int(rng.integers(1, 12)))
    if rng.random() < 0.3:
        edges = np.arange(0, total, int(rng.choice((64, 500, 512, 1280, 2048))))
    inside = np.unique(edges[(edges > 0) & (edges < total)]).tolist()
    return Mask.varlen([0, *inside, total], causal=causal)


def random_mask(rng: np.random.Generator, total: int) -> Mask:
    kind = int(rng.integers(0, 6))
    if kind == 0:
        return Mask.full(total) if rng.random() < 0.5 else Mask.causal(total)
    if kind == 1:
        return Mask.sliding_window(total, (int(rng.integers(0, total)), 0))
    if kind == 2:
        block = -(-total // 32)
        return Mask.block_sparse(rng.random((32, 32)) < 0.4, block)
    if kind == 3:
        rows = masks.random_slices(rng, total, total, max_slices=int(rng.integers(1, 12)))
        return Mask(SliceTable(rows), total, total)
    return random_documents(rng, total, causal=kind == 4)


def segments_of(plan: TilePlan, tile: int, queries: int = WIDE) -> list[tuple[int, int]]:
    """First and end block of so many queries of each segment that a tile visits."""
    begin, segments = plan.tiles[tile, 2:4].tolist()
    records = plan.records[begin : begin + segments, :2].tolist()
    return [(low // queries, -(-high // queries)) for low, high in records]


def steps_of(plan: TilePlan, queries: int = WIDE) -> np.ndarray:
    """(tiles,) blocks of so many queries that each visits."""
    tiles = range(len(plan.tiles))
    steps = [sum(end - first for first, end in segments_of(plan, tile, queries)) for tile in tiles]
    return np.array(steps, dtype=np.int64)


def end_of(times: Iterable[float], num_ctas: int) -> float:
    """When the last work tile ends, if the CTA that is free first takes the next one."""
    free_at = [0.0] * num_ctas
    for time in times:
        heapq.heapreplace(free_at, free_at[0] + float(time))
    return max(free_at)


def blocks_of(plan: TilePlan, tile: int, descending: int) -> list[int]:
    """In the order in which the kernel visits them."""
    visited: list[int] = []
    for first, end in segments_of(plan, tile):
        blocks = list(range(first, end))
        back = min(first if descending == TRAVERSAL_WRAP else descending, len(blocks))
        visited += blocks[::-1][:back] + blocks[: len(blocks) - back]
    return visited


def misses(plan: TilePlan, work_tiles: np.ndarray, num_ctas: int, kept: int) -> float:
    """The share of visited blocks that are not among the last ``kept`` ones, in order of time. ``work_tiles`` (work
    tiles, 3): tile, head, descending blocks."""
    waiting = iter(work_tiles.tolist())
    at_work = [(0.0, cta, iter(()), 0) for cta in range(num_ctas)]
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    steps = missed = 0
    while at_work:
        time, cta, left, head = heapq.heappop(at_work)
        block = next(left, None)
        if block is None:
            work_tile = next(waiting, None)
            if work_tile is not None:
                blocks = iter(blocks_of(plan, work_tile[0], work_tile[2]))
                heapq.heappush(at_work, (time + 0.1, cta, blocks, work_tile[1]))
            continue
        steps += 1
        missed += (head, block) not in cache
        cache[head, block] = None
        cache.move_to_end((head, block))
        if len(cache) > kept:
            cache.popitem(last=False)
        heapq.heappush(at_work, (time + 1, cta, left, head))
    return missed / steps
