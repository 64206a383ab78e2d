# SPDX-License-Identifier: Apache-2.0
"""Which steps a backward takes: of 64 queries or of 80, and among how many units the query heads of a tile are shared
out, see ``docs/notes/ffa_backward_wide.md``; and whether the sum of dq is cleared.

Steps of 80 are the faster ones for their size, but round to larger blocks. By how much more is counted; how much they
gain depends on whether units are many, and on whether dq is summed in order. There some tiles may be split by query
heads (``split_tiles.py``), in steps of 80; or where there is no kernel for that all of them, in steps of 64
(``head_parts.py``).

To clear the sum of dq takes as long whatever the mask. Where keys see few queries that is a good part of the time, and
it is faster if whoever comes first to a block stores (``docs/notes/ffa_backward_turns.md``). And packed documents are
mostly faster one after the other (``docs/notes/ffa_backward_order.md``).
"""

from __future__ import annotations

from typing import NamedTuple

from magi_attention.common.slices import SliceTable
from magi_attention.kernels.ffa_plans import RangeTensors
from magi_attention.kernels.ffa_remote import RemoteKeys
from magi_attention.kernels.hand_out import NARROW, TILE, WIDE, fewest_whole, tile_steps
from magi_attention.kernels.head_parts import head_parts_in_turns
from magi_attention.kernels.split_tiles import NONE, Split, can_split, split_in_turns
from magi_attention.kernels.types import AttnOptions
from magi_attention.kernels.unit_walks import UnitShape, gain_by_document
from magi_attention.native.tile_plan import TilePlan

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
_LEAST_GROUP_STORED = 4  # query heads of a kv head, from which on whoever comes first stores, as with one it was slower
_LEAST_BY_DOCUMENT = 0.08  # what one document after the other has to gain, as a logarithm


class _Stores(NamedTuple):
    """Whoever comes first stores if a key sees at most so many queries on average: in the plan's own order, and by
    document, which has to gain so much then. Measured with groups of 4 to 16."""

    most: int
    most_by_document: int
    least_gain: float


_OF_FEW = _Stores(1100, 1100, _LEAST_BY_DOCUMENT)  # where units are listed by the kernels
_OF_MANY = _Stores(3600, 10_000, -0.04)


class Steps(NamedTuple):
    """``query_block`` queries each; ``head_parts``: 0 for as few parts of the heads as the library chooses.

    ``first_stores``: whoever comes first to a block of dq stores, so that nothing is cleared. ``by_document``: units
    are taken up one document after the other. ``split``: tiles whose query heads are shared out, in turns.
    """

    query_block: int
    head_parts: int
    first_stores: bool = False
    by_document: bool = False
    split: Split = NONE

    def has_list(self, in_turns: bool, lists_itself: bool) -> bool:
        """Whether the plan says in which order units are taken up, which a kernel that ``lists_itself`` does not need.

        In turns, or where whoever comes first stores, kernels follow the order of the tiles, and have units only where
        that is by document.
        """
        if in_turns or self.first_stores:
            return self.by_document
        return self.query_block == WIDE and not lists_itself


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
    case = _Case(q_shape, v_shape, slices, keys, processors, units)
    if options.deterministic:
        return _in_turns(case, found, has_wide)
    is_grouped = q_shape[1] >= _LEAST_GROUP_STORED * v_shape[1]
    if has_wide and case.is_whole and is_grouped and slices.area:
        stores, seen = _OF_MANY if case.is_many else _OF_FEW, slices.area / keys
        is_by_document = seen <= stores.most_by_document and _gain_by_document(case) > stores.least_gain
        if is_by_document or seen <= stores.most:
            return by_rounding(in_turns=True)._replace(first_stores=True, by_document=is_by_document)
    if found.query_block == WIDE and case.is_many and _gain_by_document(case) > _LEAST_BY_DOCUMENT:
        return found._replace(by_document=True)
    return found


class _Case(NamedTuple):
    """What of a call steps depend on; ``units`` of whole tiles."""

    q_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    slices: SliceTable
    keys: int
    processors: int
    units: int

    @property
    def is_whole(self) -> bool:
        return self.units >= fewest_whole(self.processors)

    @property
    def is_many(self) -> bool:
        return self.units >= _MANY_UNITS * self.processors


def _in_turns(case: _Case, found: Steps, has_wide: bool) -> Steps:
    if case.is_many:
        return found._replace(by_document=_gain_by_document(case) > _LEAST_BY_DOCUMENT)
    if case.is_whole and has_wide and can_split(case.q_shape[1] // case.v_shape[1]):
        split = split_in_turns(case.slices, case.q_shape, case.v_shape, case.processors, found.query_block)
        if split != NONE:
            return Steps(WIDE, 0, split=split)
    elif found.query_block == NARROW or case.slices.area < _LONGER_THAN_HALVES * max(case.keys, 1):
        parts = head_parts_in_turns(case.slices, case.q_shape, case.v_shape, case.processors)
        if parts:
            return Steps(NARROW, parts)
    is_by_document = case.is_whole and _gain_by_document(case) > _LEAST_BY_DOCUMENT
    return found._replace(by_document=is_by_document)


def _gain_by_document(case: _Case) -> float:
    """See ``unit_walks.gain_by_document``. Kept with the slices, which never change."""
    heads_kv = case.v_shape[1]
    shape = UnitShape(heads_kv, case.q_shape[1] // max(heads_kv, 1), case.processors, case.processors)
    kept = case.slices.__dict__.setdefault("_gains_by_document", {})
    key = (case.q_shape[0], case.keys, shape)
    if key not in kept:
        plan = TilePlan.of_table(case.slices, case.q_shape[0], case.keys, TILE, 2, is_transposed=True, is_kept=True)
        kept[key] = gain_by_document(plan, shape)
    return kept[key]


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
