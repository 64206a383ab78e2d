# SPDX-License-Identifier: Apache-2.0
"""Among how many units the query heads of a tile of keys are shared out in the backward, where dq is summed in order.

By default there are about two units for each multiprocessor, which is enough where tiles are alike, and where dq is
summed in no order the kernels split units of uneven tiles themselves. In order a few long tiles would be waited for.
Where some tiles can be split that is the better way (``split_tiles.py``): in wide steps, of groups of 2, 4, 8 ... query
heads. Elsewhere half of the heads in every unit mends it, but the halves of dk and dv pass through memory,
and where one tile takes more than an even share, as of causal documents, halves were measured to be no faster.
"""

from __future__ import annotations

import numpy as np

from magi_attention.common.plan_cache import Kind
from magi_attention.common.slices import SliceTable
from magi_attention.kernels.ffa.schedule.simulate import TILE, fewest_whole, starts_of, tile_steps

_MOST_DIM = 128  # head dims above it take two passes over the same tiles
_UNIT_STEPS = 3  # what it takes to begin and end a unit, in steps
_MOST_UNITS = 3  # for each multiprocessor, from which on the last ones are short enough
# Halves must take no more than this share of the time as it is; measured, as is that of the even share, on 48 masks
# of 4,096 tokens and 64 heads on 8.
_GAIN = 0.9
_HEAD_PARTS: Kind[tuple[int, int, int, int, int], int] = Kind("head parts")


def head_parts_in_turns(
    slices: SliceTable, q_shape: tuple[int, ...], v_shape: tuple[int, ...], processors: int
) -> int:
    """2 where halves of the heads end sooner by enough, else 0: as few parts as the library chooses.

    ``q_shape`` (Tq, Hq, D), ``v_shape`` (Tk, Hk, Dv); ``processors``: multiprocessors of the device. Kept with the
    slices, which never change.
    """
    (total_q, heads, dim), (total_k, heads_kv, dim_v) = q_shape, v_shape
    if max(dim, dim_v) > _MOST_DIM or not total_k or not heads_kv or heads % (2 * heads_kv):
        return 0
    key = (total_q, total_k, heads, heads_kv, processors)
    return slices.cache.get(_HEAD_PARTS, key, lambda: _head_parts(slices, *key))


def _head_parts(slices: SliceTable, total_q: int, total_k: int, heads: int, heads_kv: int, processors: int) -> int:
    if not fewest_whole(processors) <= -(-total_k // TILE) * heads_kv < _MOST_UNITS * processors:
        return 0
    found = tile_steps(slices, total_q, total_k)
    steps = found.narrow[found.order] * (heads // heads_kv)
    if steps.max() * processors > steps.sum() * heads_kv:
        return 0
    whole, halves = (_end(np.repeat(steps / parts + _UNIT_STEPS, parts * heads_kv), processors) for parts in (1, 2))
    return 2 if halves <= _GAIN * whole else 0


def _end(times: np.ndarray, processors: int) -> float:
    return float((starts_of(times, processors) + times).max())
