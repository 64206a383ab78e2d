# SPDX-License-Identifier: Apache-2.0
"""How the backward hands out its units, as far as the host must foresee it: how long tiles are, and who gets which."""

from __future__ import annotations

import heapq

import numpy as np

from magi_attention.native.tile_plan import TilePlan


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
