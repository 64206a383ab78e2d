# SPDX-License-Identifier: Apache-2.0
"""Whether a backward splits the query heads of all tiles, with deterministic or with atomic dq.

By default there are about two work tiles for each SM. That is enough where tiles are alike, and with atomic dq the host
splits single uneven tiles (``work_list.py``). With deterministic dq a few long tiles would be waited for. Where single
tiles can be split, that is better (``tile_splits.py``): with m-blocks of 80 and groups of 2, 4, 8 ... query heads. For
other calls half of the heads in every work tile helps, but the halves of dk and dv pass through memory. Where one tile
takes more than an even share, as of causal documents, halves were measured to be no faster.

With atomic dq tiles are split where they have many segments, or where a few are so long that those of the last kv heads
would end alone (``docs/log/sparse.md``).
"""

from __future__ import annotations

import numpy as np

from magi_attention.common.plan_cache import Kind
from magi_attention.common.slices import SliceTable
from magi_attention.kernels.ffa.schedule.simulate import TILE, fewest_whole, starts_of, tile_steps
from magi_attention.kernels.ffa.schedule.work_tiles import WorkTileShape, heads_per_l2_group

_MOST_DIM = 128  # nothing was measured with head dims above it
_BEGIN_AND_END = 3  # what it takes to begin and end a work tile, in steps
_MOST_WORK_TILES = 3  # for each SM, from which on the last ones are short enough
# Halves must take no more than this share of the time as it is; measured, as is that of the even share, on 48 masks
# of 4,096 tokens and 64 heads on 8.
_GAIN = 0.9
# Segments of a tile, from which on it is traversed once for each head, with atomic dq (kManySegments in
# csrc/ffa/sm90/bwd/schedule/split.cuh). CTAs are at different blocks of queries then, so fewer heads at a time help.
MANY_SEGMENTS = 4
# With atomic dq: how much longer than an even share all may take, as it is and with parts.
_ALONE, _ENOUGH = 1.25, 1.1
_HEAD_SPLITS: Kind[tuple[int, int, int, int, int], int] = Kind("head splits of a backward")


def head_splits(slices: SliceTable, q_shape: tuple[int, ...], v_shape: tuple[int, ...], num_sms: int) -> int:
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


def head_splits_in_no_order(
    slices: SliceTable, q_shape: tuple[int, ...], v_shape: tuple[int, ...], num_sms: int
) -> int:
    """Into how many parts the query heads of all tiles are split; 0: as few as the library chooses. Shapes as above.

    Partial sums of dk and dv take no more memory than those of dq.
    """
    (total_q, heads, dim), (total_k, heads_kv, dim_v) = q_shape, v_shape
    tiles, group = -(-total_k // TILE), heads // max(heads_kv, 1)
    if max(dim, dim_v) > _MOST_DIM or group < 4 or tiles * heads_kv < fewest_whole(num_sms):
        return 0
    found = tile_steps(slices, total_q, total_k)
    # The longest tiles of the last L2 group begin when the groups before it end.
    longest, share = found.narrow.max(initial=0) * group, found.narrow.sum() * heads / num_sms
    shape = WorkTileShape(heads_kv, group, num_sms, num_sms)

    def end(parts: int) -> float:
        at_last = heads_per_l2_group(tiles * parts, shape) / heads_kv
        return float(max(share, (1 - at_last) * share + longest / parts))

    least = 2 if found.segments >= MANY_SEGMENTS else 1
    if least == 1 and end(1) <= _ALONE * share:
        return 0
    most = min(group // 2, total_q * heads // (2 * total_k * heads_kv))
    options = [n for n in range(least, most + 1) if group % n == 0]
    return next((n for n in options if end(n) <= _ENOUGH * share), options[-1]) if options else 0


def _end(times: np.ndarray, num_sms: int) -> float:
    return float((starts_of(times, num_sms) + times).max())
