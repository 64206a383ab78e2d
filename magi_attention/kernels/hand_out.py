# SPDX-License-Identifier: Apache-2.0
"""How the backward hands out its units, as far as the host must foresee it: how long tiles are, and who gets which."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from magi_attention.common.slices import SliceTable
from magi_attention.native.tile_plan import TilePlan

TILE = 128  # keys
NARROW, WIDE = 64, 80  # queries of a step


def fewest_whole(processors: int) -> int:
    """How many units of whole tiles are enough: nearly two for each multiprocessor. With fewer the library shares out
    the query heads of each tile, see ``bwd_head_parts`` in ``csrc/ffa/sm90/bwd_layout.h``."""
    return 19 * processors // 10


class TileSteps(NamedTuple):
    """Steps of each tile of a transposed mask, by its number, (num_tiles,); and the order of the tiles in the plan."""

    narrow: np.ndarray
    wide: np.ndarray
    order: np.ndarray


def tile_steps(slices: SliceTable, total_q: int, total_k: int) -> TileSteps:
    """Kept with the slices, which never change."""
    kept = slices.__dict__.setdefault("_tile_steps", {})
    key = (total_q, total_k)
    if key not in kept:
        # Held for the launch that follows, whose plan it mostly is.
        plan = TilePlan.of_table(slices, total_q, total_k, TILE, 2, is_transposed=True, is_kept=True)
        kept[key] = TileSteps(steps_of_tiles(plan, NARROW), steps_of_tiles(plan, WIDE), plan.order.copy())
    return kept[key]


def steps_of_tiles(plan: TilePlan, queries: int) -> np.ndarray:
    """(num_tiles,) blocks of so many queries that each tile of a transposed plan visits, over all its layers."""
    low, high = plan.records[:, 0].astype(np.int64), plan.records[:, 1].astype(np.int64)
    before = np.concatenate([[0], np.cumsum(-(-high // queries) - low // queries)])
    begin, layers = plan.tiles[:, 2].astype(np.int64), plan.tiles[:, 3]
    return before[begin + layers] - before[begin]


def starts_of(times: np.ndarray, places: int) -> np.ndarray:
    """When units start that take so long and are taken up in this order by whoever of ``places`` is free first."""
    ends, starts = [0.0] * places, np.empty(len(times))
    for i, time in enumerate(times.tolist()):
        starts[i] = ends[0]
        heapq.heapreplace(ends, ends[0] + time)
    return starts
