# SPDX-License-Identifier: Apache-2.0
"""What tests of schedules count by: m-blocks that tiles visit, the end of the last work tile."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np

from magi_attention.common.mask import Mask
from magi_attention.common.slices import SliceTable
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
    return np.array([sum(end - first for first, end in segments_of(plan, tile, queries)) for tile in tiles])


def visits_of(plan: TilePlan, total_q: int, queries: int) -> np.ndarray:
    """How many segments visit each block of so many queries."""
    visits = np.zeros(-(-total_q // queries), dtype=int)
    for tile in range(len(plan.tiles)):
        for first, end in segments_of(plan, tile, queries):
            visits[first:end] += 1
    return visits


def end_of(times: Iterable[float], num_ctas: int) -> float:
    """When the last work tile ends, if the CTA that is free first takes the next one."""
    free_at = [0.0] * num_ctas
    for time in times:
        heapq.heapreplace(free_at, free_at[0] + float(time))
    return max(free_at)
