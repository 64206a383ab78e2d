# SPDX-License-Identifier: Apache-2.0
"""Which steps a backward takes: of 64 queries or of 80, and among how many units the query heads of a tile are shared
out, see ``docs/notes/ffa_backward_wide.md``; and whether the sum of dq is cleared.

Steps of 80 are the faster ones for their size, but round to larger blocks. By how much more is counted; how much they
gain depends on whether units are many, and on whether dq is summed in order, where halves of the heads are for steps of
64 alone.

To clear the sum of dq takes as long whatever the mask. Where keys see few queries that is a good part of the time, and
it is faster if whoever comes first to a block stores (``docs/notes/ffa_backward_turns.md``).
"""

from __future__ import annotations

from typing import NamedTuple

from magi_attention.common.slices import SliceTable
from magi_attention.kernels.ffa_plans import RangeTensors
from magi_attention.kernels.ffa_remote import RemoteKeys
from magi_attention.kernels.hand_out import NARROW, TILE, WIDE, fewest_whole, tile_steps
from magi_attention.kernels.head_parts import head_parts_in_turns
from magi_attention.kernels.types import AttnOptions

# So many queries in wide steps take as long as one in narrow steps, by what was measured: where units are many; and in
# turns, if a unit has all query heads of its tile.
_MOST_OF_MANY = 1.05
_MOST_IN_TURNS = 1.075
# Where units are few, and listed; and if a key sees so many queries on average, listed or not.
_MOST_OF_FEW = 1.02
_MOST_OF_FEW_LONG = 1.03
_LONG_OF_FEW = 1950
_LONGER_THAN_HALVES = 3072  # the same, from which on wide steps are faster than halves of the heads
_MANY_UNITS = 3  # for each multiprocessor, from which on units are not listed
# Whoever comes first stores if a key sees at most so many queries on average, where units are listed and where they
# are many; with so many keys at most; and with so many query heads of a kv head, as with one it was slower. Measured
# with up to 131,072 keys and groups of 8 and 12.
_MOST_STORED_OF_FEW = 1100
_MOST_STORED = 3600
_MOST_KEYS_STORED = 2**17
_LEAST_GROUP_STORED = 4


class Steps(NamedTuple):
    """``query_block`` queries each; ``head_parts``: 0 for as few parts of the heads as the library chooses.

    ``first_stores``: whoever comes first to a block of dq stores, so that nothing is cleared.
    """

    query_block: int
    head_parts: int
    first_stores: bool = False


def steps_of(
    q_shape: tuple[int, ...], v_shape: tuple[int, ...], mask: SliceTable | RangeTensors | RemoteKeys,
    options: AttnOptions, processors: int,
) -> Steps:  # fmt: skip
    """``q_shape`` (Tq, Hq, D), ``v_shape`` (Tk, Hk, Dv); ``processors``: multiprocessors of the device. Kept with the
    slices, which never change.

    Of range tensors on a GPU nothing is known, so there steps are narrow.
    """
    is_remote = isinstance(mask, RemoteKeys)
    slices, keys = (mask.mask.slices, mask.mask.total_k) if is_remote else (mask, v_shape[0])
    if not isinstance(slices, SliceTable):
        return Steps(NARROW, 0)
    kept = slices.__dict__.setdefault("_steps", {})
    key = (q_shape, v_shape, keys, is_remote, options.deterministic, bool(options.softcap), processors)
    found = kept.get(key)
    if found is None:
        found = kept[key] = _choose(q_shape, v_shape, slices, keys, is_remote, options, processors)
    return found


def _choose(q_shape, v_shape, slices: SliceTable, keys: int, is_remote: bool, options, processors) -> Steps:
    units = -(-keys // TILE) * v_shape[1]
    has_wide = not options.softcap and 64 < max(q_shape[2], v_shape[2]) <= 128  # there is a kernel

    def by_rounding(in_turns: bool) -> Steps:
        wide = has_wide and wide_gains(slices, q_shape[0], keys, units, processors, in_turns)
        return Steps(WIDE if wide else NARROW, 0)

    found = by_rounding(options.deterministic)
    if is_remote:
        return found
    if options.deterministic:
        if found.query_block == WIDE and slices.area >= _LONGER_THAN_HALVES * max(keys, 1):
            return found
        parts = head_parts_in_turns(slices, q_shape, v_shape, processors)
        return Steps(NARROW, parts) if parts else found
    is_grouped = q_shape[1] >= _LEAST_GROUP_STORED * v_shape[1]
    if has_wide and is_grouped and storing_gains(slices, keys, units, processors):
        return by_rounding(in_turns=True)._replace(first_stores=True)
    return found


def storing_gains(slices: SliceTable, keys: int, units: int, processors: int) -> bool:
    """Whether it is faster if whoever comes first to a block of dq stores, with so many ``units`` of whole tiles."""
    if units < fewest_whole(processors) or keys > _MOST_KEYS_STORED:
        return False
    most = _MOST_STORED if units >= _MANY_UNITS * processors else _MOST_STORED_OF_FEW
    return 0 < slices.area <= most * keys


def wide_gains(slices: SliceTable, queries: int, keys: int, units: int, processors: int, in_turns: bool) -> bool:
    """Whether steps of 80 are faster, with so many ``units`` of whole tiles."""
    is_whole = units >= fewest_whole(processors)
    if is_whole if in_turns else units >= _MANY_UNITS * processors:
        most = _MOST_IN_TURNS if in_turns else _MOST_OF_MANY
    elif slices.area >= _LONG_OF_FEW * max(keys, 1):
        most = _MOST_OF_FEW_LONG
    elif is_whole:
        most = _MOST_OF_FEW
    else:
        return False
    steps = tile_steps(slices, queries, keys)
    narrow, wide = int(steps.narrow.sum()) * NARROW, int(steps.wide.sum()) * WIDE
    return 0 < wide <= most * narrow  # nothing is gained where there is nothing
