# SPDX-License-Identifier: Apache-2.0
"""How many queries an m-block of a backward has: 64, or where that is faster 80 or 128.

Head dims of 65 to 128 may have 80 (``docs/log/ffa_backward_wide.md``), smaller ones 128 (``docs/log/head_dims.md``).
Larger m-blocks are faster for their size, but segments round to larger blocks. By how much is counted. How much they
gain depends on whether work tiles are many, and on whether dq is deterministic.
"""

from __future__ import annotations

from magi_attention.common.slices import SliceTable
from magi_attention.kernels.ffa.schedule.simulate import NARROW, TILE, WIDE, WIDEST, fewest_whole, tile_steps

# So many queries in m-blocks of 80 take as long as one in m-blocks of 64, by what was measured: where work tiles are
# many; and in deterministic order, if a work tile has all query heads of its tile.
_MOST_OF_MANY = 1.05
_MOST_DETERMINISTIC = 1.075
# Where work tiles are few, with a work list; and if a key sees so many queries on average, with or without one.
_MOST_OF_FEW = 1.02
_MOST_OF_FEW_LONG = 1.03
_LONG_OF_FEW = 1950
_MOST_OF_SMALL_DIMS = 1.12  # the same of m-blocks of 128
_FEW_DIM = 96  # head dims up to this take m-blocks of 80 only where work tiles are many
MANY_WORK_TILES = 3  # for each SM, from which on there is no work list


def select_block_m(
    slices: SliceTable, q_shape: tuple[int, ...], v_shape: tuple[int, ...], keys: int, num_sms: int,
    is_deterministic: bool,
) -> int:  # fmt: skip
    """The fastest for a call without softcap and dropout. ``q_shape`` (Tq, Hq, D), ``v_shape`` (Tk, Hk, Dv), of which
    ``keys`` tokens count; ``num_sms``: SMs of the device."""
    dim, work_tiles = max(q_shape[2], v_shape[2]), -(-keys // TILE) * v_shape[1]
    if dim > 64:
        larger, most = WIDE, _most_of_wide(slices, keys, dim, work_tiles, num_sms, is_deterministic)
    else:
        larger, most = WIDEST, 0.0 if is_deterministic else _MOST_OF_SMALL_DIMS
    if dim > 128 or not most or not q_shape[0]:
        return NARROW
    steps = tile_steps(slices, q_shape[0], keys)
    found = steps.wide if larger == WIDE else steps.widest
    return larger if 0 < int(found.sum()) * larger <= most * int(steps.narrow.sum()) * NARROW else NARROW


def _most_of_wide(
    slices: SliceTable, keys: int, dim: int, work_tiles: int, num_sms: int, is_deterministic: bool
) -> float:
    """m-blocks of 80 may have so many times the queries that those of 64 have; 0: never."""
    is_whole = work_tiles >= fewest_whole(num_sms)
    if is_whole if is_deterministic else work_tiles >= MANY_WORK_TILES * num_sms:
        return _MOST_DETERMINISTIC if is_deterministic else _MOST_OF_MANY
    if dim <= _FEW_DIM:
        return 0.0
    if slices.area >= _LONG_OF_FEW * max(keys, 1):
        return _MOST_OF_FEW_LONG
    return _MOST_OF_FEW if is_whole else 0.0
