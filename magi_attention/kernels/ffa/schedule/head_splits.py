# SPDX-License-Identifier: Apache-2.0
"""Whether a deterministic backward splits the query heads of all tiles in halves.

By default there are about two work tiles for each SM. That is enough where tiles are alike, and with atomic dq the host
splits single uneven tiles (``work_list.py``). With deterministic dq a few long tiles would be waited for. Where single
tiles can be split, that is better (``tile_splits.py``): with m-blocks of 80 and groups of 2, 4, 8 ... query heads. For
other calls half of the heads in every work tile helps, but the halves of dk and dv pass through memory. Where one tile
takes more than an even share, as of causal documents, halves were measured to be no faster.
"""

from __future__ import annotations

import numpy as np

from magi_attention.common.plan_cache import Kind
from magi_attention.common.slices import SliceTable
from magi_attention.kernels.ffa.schedule.simulate import TILE, fewest_whole, starts_of, tile_steps

_MOST_DIM = 128  # head dims above it take two passes over the same tiles
_BEGIN_AND_END = 3  # what it takes to begin and end a work tile, in steps
_MOST_WORK_TILES = 3  # for each SM, from which on the last ones are short enough
# Halves must take no more than this share of the time as it is; measured, as is that of the even share, on 48 masks
# of 4,096 tokens and 64 heads on 8.
_GAIN = 0.9
_HEAD_SPLITS: Kind[tuple[int, int, int, int, int], int] = Kind("head splits of a backward")


def head_splits(
    slices: SliceTable, q_shape: tuple[int, ...], v_shape: tuple[int, ...], num_sms: int
) -> int:
    """2 where halves of the heads end sooner by enough, else 0: as few parts as the library chooses.

    ``q_shape`` (Tq, Hq, D), ``v_shape`` (Tk, Hk, Dv); ``num_sms``: SMs of the device. Kept with the
    slices, which never change.
    """
    (total_q, heads, dim), (total_k, heads_kv, dim_v) = q_shape, v_shape
    if max(dim, dim_v) > _MOST_DIM or not total_k or not heads_kv or heads % (2 * heads_kv):
        return 0
    key = (total_q, total_k, heads, heads_kv, num_sms)
    return slices.cache.get(_HEAD_SPLITS, key, lambda: _head_splits(slices, *key))


def _head_splits(slices: SliceTable, total_q: int, total_k: int, heads: int, heads_kv: int, num_sms: int) -> int:
    if not fewest_whole(num_sms) <= -(-total_k // TILE) * heads_kv < _MOST_WORK_TILES * num_sms:
        return 0
    found = tile_steps(slices, total_q, total_k)
    steps = found.narrow[found.order] * (heads // heads_kv)
    if steps.max() * num_sms > steps.sum() * heads_kv:
        return 0
    whole, halves = (_end(np.repeat(steps / parts + _BEGIN_AND_END, parts * heads_kv), num_sms) for parts in (1, 2))
    return 2 if halves <= _GAIN * whole else 0


def _end(times: np.ndarray, num_sms: int) -> float:
    return float((starts_of(times, num_sms) + times).max())
