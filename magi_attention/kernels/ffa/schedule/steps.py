# SPDX-License-Identifier: Apache-2.0
"""Which steps a backward takes: of 64 queries or of 80 (``query_block.py``), and among how many units the query heads
of a tile are shared out; whether the sum of dq is cleared; and in which order packed documents are taken up.

In turns some tiles may be split by query heads (``split_tiles.py``), in steps of 80; or where there is no kernel for
that all of them, in steps of 64 (``head_parts.py``).

To clear the sum of dq, and to round it at the end, takes as long whatever the mask. Where queries see few keys that is
a good part of the time, and it is faster if whoever comes first to a block stores, and a sole visit writes what is
rounded (``docs/log/ffa_backward_first_stores.md``). And packed documents are mostly faster one after the other
(``docs/log/ffa_backward_order.md``).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from magi_attention.common.enum import AttnMaskType
from magi_attention.common.plan_cache import Kind
from magi_attention.common.slices import SliceTable
from magi_attention.kernels.ffa.peer_kv import RemoteKeys
from magi_attention.kernels.ffa.plans import RangeTensors
from magi_attention.kernels.ffa.schedule.block_m import MANY_UNITS, wide_gains
from magi_attention.kernels.ffa.schedule.head_splits import head_parts_in_turns
from magi_attention.kernels.ffa.schedule.simulate import NARROW, TILE, WIDE, fewest_whole, tile_steps
from magi_attention.kernels.ffa.schedule.tile_splits import NONE, Split, can_split, split_in_turns
from magi_attention.kernels.ffa.schedule.work_tiles import (
    LARGE_SECTIONS,
    UnitShape,
    gain_by_document,
    heads_per_section_in_turns,
)
from magi_attention.kernels.types import AttnOptions
from magi_attention.native.tile_plan import TilePlan

_LONGER_THAN_HALVES = 3072  # queries that a key sees, from which on wide steps are faster than halves of the heads
_LEAST_BY_DOCUMENT = 0.08  # what one document after the other has to gain, as a logarithm
# Keys that a query sees, from which on documents that are not causal gain more one after the other, in no order, than
# where whoever comes first stores (docs/log/ffa_backward_modes.md).
_LONG_DOCUMENTS = 2100
# The same in turns, over the larger sections of one or two query heads in a unit.
_LEAST_OF_OTHERS = 0.2  # than causal documents
_ANY = -0.9  # if it can be told
_SHORT_OF_TWO = 2000  # keys that a query sees on average, up to which it may be anything with two query heads
_FEW_OF_ONE = 5  # units for each multiprocessor, the same with one
_CAUSAL, _FULL = AttnMaskType.CAUSAL.to_int_type(), AttnMaskType.FULL.to_int_type()


class _Stores(NamedTuple):
    """Whoever comes first stores if a query sees at most so many keys on average: in the plan's own order, and by
    document, which has to gain so much then; and if so large a part of the blocks of 64 queries has a sole visit."""

    most: int
    most_by_document: int = 0
    least_gain: float = 0.0
    least_sole: float = 0.0


_NEVER = _Stores(-1, -1)
# By what was measured; head dims of 65 to 128 unless another is named.
_OF_FEW = _Stores(1100, 1100, _LEAST_BY_DOCUMENT)  # where units are listed by the kernels
_OF_MANY = _Stores(3600, 10_000, -0.04)
_OF_SMALL_GROUPS = _Stores(400, 520, -0.04)  # of query heads of a kv head
_OF_PARTS = _Stores(640)  # where heads are shared out
_OF_FEW_KEYS = _Stores(1100)  # the same, where queries are many times as many
_OF_DIM_64 = _Stores(640, least_sole=1 / 3)
_OF_DIM_256 = _Stores(130, 520, -0.04)
_LEAST_GROUP = 4  # query heads of a kv head, from which on groups are not small
_LEAST_SOLE = 0.1  # of all blocks: so many sole visits gain more than it costs the kernel to look for them
_LEAST_SUM = 32 * 2**20  # bytes of the sum of dq, in all but the first two cases; less stays in L2
_FEW_KEYS = 4  # queries for each key, from which on keys are few


class Steps(NamedTuple):
    """``block_m`` queries each; ``num_head_splits``: 0 for as few parts of the heads as the library chooses.

    ``first_writer``: whoever comes first to a block of dq stores, so that nothing is cleared. ``by_document``: units
    are taken up one document after the other. ``split``: tiles whose query heads are shared out, in turns.
    ``direct_dq_store``: the main kernel writes dq of blocks of one visit, if that is in 16 bits and not accumulated.
    """

    block_m: int
    num_head_splits: int
    first_writer: bool = False
    by_document: bool = False
    split: Split = NONE
    direct_dq_store: bool = False

    def has_order(self, in_turns: bool) -> bool:
        """Whether the plan says in which order units are taken up, where there is no work list.

        In turns, or where whoever comes first stores, kernels follow the order of the tiles, and have units only where
        that is by document.
        """
        if in_turns or self.first_writer:
            return self.by_document
        return self.block_m == WIDE


UNKNOWN = Steps(NARROW, 0)  # right for any mask, and without a schedule of the host
_MAX_SHAPES = 1024


class RecentSteps:
    """The steps of the last backward of each shape whose mask the host knew.

    The host learns of range tensors on a GPU when the GPU gets to them. Where each training step has a mask of its own,
    all layers may be launched by then. Masks of one run are alike, so such calls take the steps of the last mask that
    the host knew, but for what it has to make for each mask.
    """

    def __init__(self) -> None:
        self._steps: dict[tuple[object, ...], Steps] = {}

    def best(
        self, steps: Steps, q_shape: tuple[int, ...], v_shape: tuple[int, ...], options: AttnOptions
    ) -> Steps:  # fmt: skip
        """``steps`` as ``steps_of`` gives them; better ones if those are of a mask that the host does not know.

        With ``deterministic`` always ``steps``: the bits must not depend on what the host knows.
        """
        if options.deterministic:
            return steps
        key = q_shape, v_shape, bool(options.softcap)
        found = self._steps.get(key)
        if steps is UNKNOWN:
            return steps if found is None else found._replace(by_document=False)
        if found is not steps:
            if len(self._steps) >= _MAX_SHAPES:
                self._steps.clear()
            self._steps[key] = steps
        return steps


_STEPS: Kind[tuple[object, ...], Steps] = Kind("steps of a backward")
_GAINS: Kind[tuple[object, ...], float] = Kind("gain of one document after the other")


def steps_of(
    q_shape: tuple[int, ...], v_shape: tuple[int, ...], mask: SliceTable | RangeTensors | RemoteKeys,
    options: AttnOptions, processors: int,
) -> Steps:  # fmt: skip
    """``q_shape`` (Tq, Hq, D), ``v_shape`` (Tk, Hk, Dv); ``processors``: multiprocessors of the device. Kept with the
    slices, which never change.

    Of range tensors on a GPU nothing is known, so there steps are narrow.
    """
    slices: SliceTable | RangeTensors
    if isinstance(mask, RemoteKeys):
        is_remote, slices, keys = True, mask.mask.slices, mask.mask.total_k
    else:
        is_remote, slices, keys = False, mask, v_shape[0]
    if not isinstance(slices, SliceTable):
        return UNKNOWN
    key = (q_shape, v_shape, keys, is_remote, options.deterministic, bool(options.softcap), processors)
    kept = slices.cache.find(_STEPS, key)
    if kept is None:
        found = _choose(q_shape, v_shape, slices, keys, is_remote, options, processors)
        is_counted = options.deterministic or found.first_writer
        if is_counted and not (is_remote or options.softcap or found.split != NONE or not slices.area):
            share = tile_steps(slices, q_shape[0], keys).sole[found.block_m]
            found = found._replace(direct_dq_store=share >= _LEAST_SOLE)
        kept = slices.cache.get(_STEPS, key, partial(Steps, *found))
    return kept


def _choose(
    q_shape: tuple[int, ...], v_shape: tuple[int, ...], slices: SliceTable, keys: int, is_remote: bool,
    options: AttnOptions, processors: int,
) -> Steps:  # fmt: skip
    units = -(-keys // TILE) * v_shape[1]
    has_wide = not options.softcap and 64 < max(q_shape[2], v_shape[2]) <= 128  # there is a kernel

    def by_rounding(in_turns: bool) -> Steps:
        wide = has_wide and wide_gains(slices, q_shape[0], keys, units, processors, in_turns)
        return Steps(WIDE if wide else NARROW, 0)

    found = by_rounding(options.deterministic)
    case = _Case(q_shape, v_shape, slices, keys, is_remote, processors, units)
    if options.deterministic:
        return _in_turns(case, found, has_wide)
    seen = slices.area / max(q_shape[0], 1)
    if found.block_m == WIDE and seen >= _LONG_DOCUMENTS and case.is_many and not case.is_causal:
        if case.q_shape[1] >= _LEAST_GROUP * v_shape[1] and _gain_by_document(case) > _OF_MANY.least_gain:
            return found._replace(by_document=True)
    stores = _NEVER if options.softcap or not slices.area else _stores_of(case)
    is_by_document = seen <= stores.most_by_document and _gain_by_document(case) > stores.least_gain
    if is_by_document or (seen <= stores.most and case.sole_share >= stores.least_sole):
        return by_rounding(in_turns=True)._replace(first_writer=True, by_document=is_by_document)
    if found.block_m == WIDE and case.is_many and _gain_by_document(case) > _LEAST_BY_DOCUMENT:
        return found._replace(by_document=True)
    return found


class _Case(NamedTuple):
    """What of a call steps depend on; ``units`` of whole tiles."""

    q_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    slices: SliceTable
    keys: int
    is_remote: bool
    processors: int
    units: int

    @property
    def dim(self) -> int:
        """As kernels pad it."""
        return next((n for n in (64, 128) if n >= max(self.q_shape[2], self.v_shape[2])), 256)

    @property
    def sum_bytes(self) -> int:
        return 4 * self.q_shape[0] * self.q_shape[1] * self.dim

    @property
    def sole_share(self) -> float:
        """The share for blocks of 64 queries."""
        return tile_steps(self.slices, self.q_shape[0], self.keys).sole[NARROW]

    @property
    def is_causal(self) -> bool:
        """Whether any slice has a diagonal."""
        return bool((self.slices.array[:, 4] != _FULL).any())

    @property
    def is_whole(self) -> bool:
        return self.units >= fewest_whole(self.processors)

    @property
    def is_many(self) -> bool:
        return self.units >= MANY_UNITS * self.processors


def _stores_of(case: _Case) -> _Stores:
    """What was measured of calls of the kind. With keys of other ranks tiles are always whole."""
    if case.is_remote and not case.is_whole:
        return _NEVER
    if case.dim == 128 and case.is_whole and case.q_shape[1] >= _LEAST_GROUP * case.v_shape[1]:
        return _OF_MANY if case.is_many else _OF_FEW
    if case.sum_bytes < _LEAST_SUM:
        return _NEVER
    if case.is_whole:
        return {64: _OF_DIM_64, 128: _OF_SMALL_GROUPS, 256: _OF_DIM_256}[case.dim]
    if case.dim != 128:
        return _NEVER
    return _OF_FEW_KEYS if case.q_shape[0] >= _FEW_KEYS * case.keys else _OF_PARTS


def _in_turns(case: _Case, found: Steps, has_wide: bool) -> Steps:
    if case.is_many or case.is_remote:
        return found._replace(by_document=case.is_whole and _is_by_document_in_turns(case))
    if case.is_whole and has_wide and can_split(case.q_shape[1] // case.v_shape[1]):
        split = split_in_turns(case.slices, case.q_shape, case.v_shape, case.processors, found.block_m)
        if split != NONE:
            return Steps(WIDE, 0, split=split)
    elif found.block_m == NARROW or case.slices.area < _LONGER_THAN_HALVES * max(case.keys, 1):
        parts = head_parts_in_turns(case.slices, case.q_shape, case.v_shape, case.processors)
        if parts:
            return Steps(NARROW, parts)
    return found._replace(by_document=case.is_whole and _is_by_document_in_turns(case))


def _is_by_document_in_turns(case: _Case) -> bool:
    """With one or two query heads in a unit sections are larger than else, and L2 keeps less of them; with head dims up
    to 64, where a step is short, units of one document that wait for each other would cost more than that."""
    shape = _shape_of(case)
    if shape.group > LARGE_SECTIONS or case.dim == 64:
        return _gain_by_document(case) > _LEAST_BY_DOCUMENT
    heads = heads_per_section_in_turns(-(-case.keys // TILE), shape, 1, 2 if case.dim == 256 else 1)
    return _gain_by_document(case, heads) > _least_of_few_heads(case, shape.group)


def _least_of_few_heads(case: _Case, group: int) -> float:
    """What one document after the other has to gain. Tiles of causal documents wait for each other less if they come
    one after the other, which the estimate does not count: so mostly it may be anything."""
    if (case.slices.array[:, 4] != _CAUSAL).any():
        return _LEAST_OF_OTHERS
    if group == 1:
        is_any = case.units <= _FEW_OF_ONE * case.processors
    else:
        is_any = case.slices.area < _SHORT_OF_TWO * case.q_shape[0]
    return _ANY if case.is_many and (is_any or case.dim == 256) else _LEAST_BY_DOCUMENT


def _shape_of(case: _Case) -> UnitShape:
    heads_kv = case.v_shape[1]
    return UnitShape(heads_kv, case.q_shape[1] // max(heads_kv, 1), case.processors, case.processors)


def _gain_by_document(case: _Case, heads: int | None = None) -> float:
    """See ``unit_walks.gain_by_document``. Kept with the slices, which never change."""
    shape = _shape_of(case)

    def estimate() -> float:
        plan = TilePlan.of_table(case.slices, case.q_shape[0], case.keys, TILE, 2, is_transposed=True, is_kept=True)
        return gain_by_document(plan, shape, heads)

    return case.slices.cache.get(_GAINS, (case.q_shape[0], case.keys, shape, heads), estimate)
