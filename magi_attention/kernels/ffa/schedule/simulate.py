# SPDX-License-Identifier: Apache-2.0
"""How long the tiles of a backward take, and when its work tiles start, as far as the host must foresee it."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np

from magi_attention.common.plan_cache import Kind
from magi_attention.common.slices import SliceTable
from magi_attention.native.loader import check, load
from magi_attention.native.tile_plan import TilePlan
from magi_attention.native.toolchain import PLANNER

TILE = 128  # keys
NARROW, WIDE = 64, 80  # queries of an m-block
WIDEST = 128  # the same with head dims up to 64
BEGIN_AND_END = 0.1  # of the time of an m-block of 80: what it takes to begin and end a work tile
IN_L2 = 192  # blocks of 80 queries of one head whose Q, dO and dq stay in L2


def fewest_whole(num_sms: int) -> int:
    """How many whole work tiles are enough: nearly two for each SM. With fewer the library splits the query heads of
    each tile (``bwd_num_head_splits`` in ``csrc/ffa/sm90/bwd/workspace.h``)."""
    return 19 * num_sms // 10


class TileSteps(NamedTuple):
    """Steps of 64, 80 and 128 queries of each tile of a transposed mask, by its number, (num_tiles,); and the order of
    the tiles in the plan.

    ``segments``: of a tile, on average. ``single``: by the queries of a step, the share of m-blocks with one
    contribution, whose dq may be stored directly.
    """

    narrow: np.ndarray
    wide: np.ndarray
    widest: np.ndarray
    order: np.ndarray
    segments: float
    single: dict[int, float]


_TILE_STEPS: Kind[tuple[int, int], TileSteps] = Kind("steps of tiles")


def tile_steps(slices: SliceTable, total_q: int, total_k: int) -> TileSteps:
    """Kept with the slices, which never change."""
    return slices.cache.get(_TILE_STEPS, (total_q, total_k), lambda: _tile_steps(slices, total_q, total_k))


def _tile_steps(slices: SliceTable, total_q: int, total_k: int) -> TileSteps:
    # Held for the launch that follows, whose plan it mostly is.
    plan = TilePlan.of_table(slices, total_q, total_k, TILE, 2, is_transposed=True, is_kept=True)
    narrow, wide, widest = (steps_of_tiles(plan, n) for n in (NARROW, WIDE, WIDEST))
    segments = len(plan.records) / max(len(plan.tiles), 1)
    single = {n: single_share(plan, n) for n in (NARROW, WIDE)}
    return TileSteps(narrow, wide, widest, plan.order.copy(), segments, single)


def single_share(plan: TilePlan, queries: int) -> float:
    """The share of m-blocks of so many queries that one segment of one tile of a transposed plan visits, and no
    other."""
    blocks = -(-plan.header.total_k // queries)
    low, high = plan.records[:, 0].astype(np.int64), plan.records[:, 1].astype(np.int64)
    first, end = low // queries, np.where(high > low, -(-high // queries), low // queries)
    change = np.bincount(first, minlength=blocks + 1) - np.bincount(end, minlength=blocks + 1)
    return float((np.cumsum(change)[:blocks] == 1).mean()) if blocks else 0.0


def steps_of_tiles(plan: TilePlan, queries: int) -> np.ndarray:
    """(num_tiles,) blocks of so many queries that each tile of a transposed plan visits, over all its segments."""
    low, high = plan.records[:, 0].astype(np.int64), plan.records[:, 1].astype(np.int64)
    before = np.concatenate([[0], np.cumsum(-(-high // queries) - low // queries)])
    begin, segments = plan.tiles[:, 2].astype(np.int64), plan.tiles[:, 3]
    steps: np.ndarray = before[begin + segments] - before[begin]
    return steps


class TileBlocks(NamedTuple):
    """For each tile of a transposed plan, (num_tiles,): the first block of 80 queries that it sees and how many, and
    whether these are in one segment; there are ``blocks``."""

    first: np.ndarray
    count: np.ndarray  # type: ignore[assignment]  # hides tuple.count, which nobody calls
    is_single: np.ndarray
    blocks: int

    @property
    def is_aligned(self) -> np.ndarray:
        """(num_tiles,) whether that is all from the first to the last of all blocks."""
        aligned: np.ndarray = self.is_single & (self.first + self.count == self.blocks)
        return aligned


def blocks_of_tiles(plan: TilePlan) -> TileBlocks:
    begin, segments = plan.tiles[:, 2].astype(np.int64), plan.tiles[:, 3]
    low = plan.records[:, 0].astype(np.int64) // WIDE
    first = np.where(segments > 0, low[np.minimum(begin, len(low) - 1)], 0) if len(low) else np.zeros_like(begin)
    return TileBlocks(first, steps_of_tiles(plan, WIDE), segments == 1, -(-plan.header.total_k // WIDE))


def starts_of(times: np.ndarray, num_ctas: int) -> np.ndarray:
    """When work tiles start that take so long, if the CTA that is free first takes the next one."""
    times = np.ascontiguousarray(times, dtype=np.float64)
    starts, library = np.empty(len(times)), load(PLANNER)
    status = library.magi_simulate_starts(times.ctypes.data, len(times), num_ctas, starts.ctypes.data)
    check(library, status, "Simulating the schedule")
    return starts


def groups_of(blocks: np.ndarray, wave: int) -> tuple[np.ndarray, np.ndarray]:
    """Tiles that follow one another, by the ``blocks`` (num_tiles,) that they visit: the longest that is left, and
    behind it the longest that still fit into what is left of ``wave``.

    ``(tiles, groups)``: each tile that visits something once, in this order, and the number of its group.
    """
    blocks = np.ascontiguousarray(blocks, dtype=np.int64)
    tiles, groups = np.empty((2, len(blocks)), dtype=np.int64)
    library, count = load(PLANNER), ctypes.c_int64()
    status = library.magi_group_tiles(
        blocks.ctypes.data, len(blocks), wave, tiles.ctypes.data, groups.ctypes.data, ctypes.byref(count)
    )
    check(library, status, "Grouping tiles")
    return tiles[: count.value], groups[: count.value]
