# SPDX-License-Identifier: Apache-2.0
"""Which steps a backward takes: of 64 queries or of 80, and among how many units the query heads of a tile are shared
out, see ``docs/notes/ffa_backward.md``.

Steps of 80 are the faster ones, but round to larger blocks, so it counts how many queries a key sees on average.
Where there are few units for each multiprocessor, rounding weighs more; and where dq is summed in order, halves of the
heads are for narrow steps alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from magi_attention.common.slices import SliceTable
from magi_attention.kernels.ffa_plans import RangeTensors
from magi_attention.kernels.ffa_remote import RemoteKeys
from magi_attention.kernels.head_parts import head_parts_in_turns
from magi_attention.kernels.types import AttnOptions
from magi_attention.kernels.unit_walks import STEP

NARROW = 64  # queries of a step; STEP of a wide one
_TILE = 128  # keys
# Queries that a key sees, on average, from which on steps of 80 were measured to be faster: where units are few; where
# they are many; and where dq is summed in order, if halves would be no help, and else.
LONG = 2100
LONG_OF_MANY = 1024
LONG_IN_TURNS = 800
LONGER_THAN_HALVES = 3072
_MANY_UNITS = 3.0  # for each multiprocessor, from which on units are not listed
_WHOLE_UNITS = 1.9  # from which on a unit has all query heads of its tile


class Steps(NamedTuple):
    """``query_block`` queries each; ``head_parts``: 0 for as few parts of the heads as the library chooses."""

    query_block: int
    head_parts: int


def steps_of(
    q_shape: tuple[int, ...], v_shape: tuple[int, ...], mask: SliceTable | RangeTensors | RemoteKeys,
    options: AttnOptions, processors: Callable[[], int],
) -> Steps:  # fmt: skip
    """``q_shape`` (Tq, Hq, D), ``v_shape`` (Tk, Hk, Dv). Kept with the slices, which never change.

    Of range tensors on a GPU nothing is known, so there steps are narrow.
    """
    is_remote = isinstance(mask, RemoteKeys)
    slices, keys = (mask.mask.slices, mask.mask.total_k) if is_remote else (mask, v_shape[0])
    if not isinstance(slices, SliceTable):
        return Steps(NARROW, 0)
    kept = slices.__dict__.setdefault("_steps", {})
    key = (q_shape, v_shape, keys, is_remote, options.deterministic, bool(options.softcap))
    found = kept.get(key)
    if found is None:
        found = kept[key] = _choose(q_shape, v_shape, slices, keys, is_remote, options, processors)
    return found


def _choose(q_shape, v_shape, slices: SliceTable, keys: int, is_remote: bool, options, processors) -> Steps:
    can_be_wide = not options.softcap and 64 < max(q_shape[2], v_shape[2]) <= 128
    seen, units = slices.area / max(keys, 1), -(-keys // _TILE) * v_shape[1] / processors()
    if not options.deterministic:
        is_long = seen >= (LONG_OF_MANY if units >= _MANY_UNITS else LONG)
        return Steps(STEP if can_be_wide and is_long else NARROW, 0)
    if can_be_wide and seen >= LONGER_THAN_HALVES:
        return Steps(STEP, 0)
    parts = 0 if is_remote else head_parts_in_turns(slices, q_shape, v_shape, processors)
    is_long = not parts and units >= _WHOLE_UNITS and seen >= LONG_IN_TURNS
    return Steps(STEP if can_be_wide and is_long else NARROW, parts)
