# SPDX-License-Identifier: Apache-2.0
"""The schedule of a backward: size of its m-blocks, way of dq, splits, and order of documents.

* Size: m-blocks have 64, 80 or 128 queries (``block_m.py``).
* Splits: in deterministic order single tiles may be split (``tile_splits.py``), or all of them (``head_splits.py``).
* Way of dq: clearing ``dq_accum`` and rounding it takes as long whatever the mask. Where queries see few keys that is
  a good part of the time. Then the first writer of an m-block stores, and a single contribution is written rounded
  (``docs/log/ffa_backward_first_stores.md``).
* Order: packed documents are mostly faster one after the other (``docs/log/ffa_backward_order.md``).

The thresholds are measured on an H100 (``docs/log/ffa_backward_modes.md`` says what each mode is worth).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from magi_attention.common.enum import AttnMaskType
from magi_attention.common.plan_cache import Kind
from magi_attention.common.slices import SliceTable
from magi_attention.kernels.ffa.peer_kv import RemoteKeys
from magi_attention.kernels.ffa.plans import RangeTensors
from magi_attention.kernels.ffa.schedule.block_m import MANY_WORK_TILES, select_block_m
from magi_attention.kernels.ffa.schedule.head_splits import MANY_SEGMENTS, head_splits, head_splits_in_no_order
from magi_attention.kernels.ffa.schedule.simulate import NARROW, TILE, WIDE, fewest_whole, tile_steps
from magi_attention.kernels.ffa.schedule.tile_splits import NONE, Split, can_split, select_tile_split
from magi_attention.kernels.ffa.schedule.work_tiles import (
    LARGE_L2_GROUPS,
    WorkTileShape,
    gain_by_document,
    heads_per_l2_group_deterministic,
)
from magi_attention.kernels.types import AttnOptions
from magi_attention.native.tile_plan import TilePlan

_LONGER_THAN_HALVES = 3072  # queries that a key sees, from which on wide steps are faster than halves of the heads
_LEAST_BY_DOCUMENT = 0.08  # what one document after the other has to gain, as a logarithm
# Keys that a query sees, from which on documents that are not causal gain more one after the other, in no order, than
# where the first writer stores (docs/log/ffa_backward_modes.md).
_LONG_DOCUMENTS = 2100
# The same in deterministic order, over the larger L2 groups of one or two query heads in a work tile.
_LEAST_OF_OTHERS = 0.2  # than causal documents
_ANY = -0.9  # if it can be told
_SHORT_OF_TWO = 2000  # keys that a query sees on average, up to which it may be anything with two query heads
_FEW_OF_ONE = 5  # work tiles for each SM, the same with one
_CAUSAL, _FULL = AttnMaskType.CAUSAL.to_int_type(), AttnMaskType.FULL.to_int_type()


class _Stores(NamedTuple):
    """The first writer stores if a query sees at most so many keys on average: in the plan's own order, and by
    document, which has to gain so much then; and if so large a part of the blocks of 64 queries has a single
    contribution."""

    most: int
    most_by_document: int = 0
    least_gain: float = 0.0
    least_single: float = 0.0


_NEVER = _Stores(-1, -1)
# By what was measured; head dims of 65 to 128 unless another is named.
_OF_FEW = _Stores(1100, 1100, _LEAST_BY_DOCUMENT)  # work tiles for each SM
_OF_MANY = _Stores(3600, 10_000, -0.04)
_OF_SMALL_GROUPS = _Stores(400, 520, -0.04)  # of query heads of a kv head
_OF_PARTS = _Stores(640)  # where heads are shared out
_OF_FEW_KEYS = _Stores(1100)  # the same, where queries are many times as many
_OF_DIM_64 = _Stores(640, least_single=1 / 3)
_OF_DIM_256 = _Stores(130, 520, -0.04)
_LEAST_GROUP = 4  # query heads of a kv head, from which on groups are not small
_LEAST_SINGLE = 0.1  # of all blocks: so many single contributions gain more than it costs the kernel to look for them
_LEAST_SUM = 32 * 2**20  # bytes of the sum of dq, in all but the first two cases; less stays in L2
_FEW_KEYS = 4  # queries for each key, from which on keys are few


class BwdSchedule(NamedTuple):
    """``block_m`` queries each; ``num_head_splits``: 0 for as few parts of the heads as the library chooses.

    ``first_writer``: the first writer to a block of dq stores, so that nothing is cleared. ``by_document``: work tiles
    are taken up one document after the other. ``split``: tiles whose query heads are shared out, in deterministic
    order. ``direct_dq_store``: the main kernel writes dq of blocks of one visit, if that is in 16 bits and not
    accumulated.
    """

    block_m: int
    num_head_splits: int
    first_writer: bool = False
    by_document: bool = False
    split: Split = NONE
    direct_dq_store: bool = False

    def has_order(self, is_deterministic: bool) -> bool:
        """Whether the plan says in which order work tiles are taken up, where there is no work list.

        In deterministic order, or where the first writer stores, kernels follow the order of the tiles, and have work
        tiles only where that is by document.
        """
        if is_deterministic or self.first_writer:
            return self.by_document
        return self.block_m == WIDE


UNKNOWN = BwdSchedule(NARROW, 0)  # right for any mask, and without a schedule of the host
_MAX_SHAPES = 1024


class RecentSchedules:
    """The schedule of the last backward of each shape whose mask the host knew.

    The host learns of range tensors on a GPU when the GPU gets to them. Where each training step has a mask of its own,
    all layers may be launched by then. Masks of one run are alike, so such calls take the schedule of the last mask
    that the host knew, but for what it has to make for each mask.
    """

    def __init__(self) -> None:
        self._schedules: dict[tuple[object, ...], BwdSchedule] = {}

    def best(
        self, schedule: BwdSchedule, q_shape: tuple[int, ...], v_shape: tuple[int, ...], options: AttnOptions
    ) -> BwdSchedule:
        """``schedule`` as ``select_schedule`` gives it; a better one if the host does not know the mask.

        With ``deterministic`` always ``schedule``: the bits must not depend on what the host knows.
        """
        if options.deterministic:
            return schedule
        key = q_shape, v_shape, options.is_plain
        found = self._schedules.get(key)
        if schedule is UNKNOWN:
            return schedule if found is None else found._replace(by_document=False)
        if found is not schedule:
            if len(self._schedules) >= _MAX_SHAPES:
                self._schedules.clear()
            self._schedules[key] = schedule
        return schedule


SCHEDULES: Kind[tuple[object, ...], BwdSchedule] = Kind("schedule of a backward")
_GAINS: Kind[tuple[object, ...], float] = Kind("gain of one document after the other")


def select_schedule(
    q_shape: tuple[int, ...], v_shape: tuple[int, ...], mask: SliceTable | RangeTensors | RemoteKeys,
    options: AttnOptions, num_sms: int,
) -> BwdSchedule:  # fmt: skip
    """``q_shape`` (Tq, Hq, D), ``v_shape`` (Tk, Hk, Dv); ``num_sms``: SMs of the device. Kept with the
    slices, which never change.

    Nothing is known of range tensors on a GPU: those get ``UNKNOWN``.
    """
    slices: SliceTable | RangeTensors
    if isinstance(mask, RemoteKeys):
        is_remote, slices, keys = True, mask.mask.slices, mask.mask.total_k
    else:
        is_remote, slices, keys = False, mask, v_shape[0]
    if not isinstance(slices, SliceTable):
        return UNKNOWN
    return schedule_of(q_shape, v_shape, slices, keys, is_remote, options, num_sms)


def schedule_of(
    q_shape: tuple[int, ...], v_shape: tuple[int, ...], slices: SliceTable, keys: int, is_remote: bool,
    options: AttnOptions, num_sms: int,
) -> BwdSchedule:  # fmt: skip
    """As ``select_schedule``, of ``slices`` over so many ``keys``, of which some arrive if ``is_remote``."""
    key = (q_shape, v_shape, keys, is_remote, options.deterministic, options.is_plain, num_sms)
    kept = slices.cache.find(SCHEDULES, key)
    if kept is None:
        found = _choose(q_shape, v_shape, slices, keys, is_remote, options, num_sms)
        is_counted = options.deterministic or found.first_writer
        if is_counted and options.is_plain and not (is_remote or found.split != NONE or not slices.area):
            share = tile_steps(slices, q_shape[0], keys).single[found.block_m]
            found = found._replace(direct_dq_store=share >= _LEAST_SINGLE)
        kept = slices.cache.get(SCHEDULES, key, partial(BwdSchedule, *found))
    return kept


def _choose(
    q_shape: tuple[int, ...], v_shape: tuple[int, ...], slices: SliceTable, keys: int, is_remote: bool,
    options: AttnOptions, num_sms: int,
) -> BwdSchedule:  # fmt: skip
    work_tiles = -(-keys // TILE) * v_shape[1]
    has_wide = options.is_plain and 64 < max(q_shape[2], v_shape[2]) <= 128  # there is a kernel

    def by_rounding(is_deterministic: bool) -> BwdSchedule:
        if not options.is_plain:
            return BwdSchedule(NARROW, 0)
        return BwdSchedule(select_block_m(slices, q_shape, v_shape, keys, num_sms, is_deterministic), 0)

    found = by_rounding(options.deterministic)
    case = _Case(q_shape, v_shape, slices, keys, is_remote, num_sms, work_tiles)
    if options.deterministic:
        return _deterministic(case, found, has_wide)
    if not is_remote:
        if parts := head_splits_in_no_order(slices, q_shape, v_shape, num_sms):
            return BwdSchedule(NARROW, parts)
        if tile_steps(slices, q_shape[0], keys).segments >= MANY_SEGMENTS:
            return found
    seen = slices.area / max(q_shape[0], 1)
    if found.block_m == WIDE and seen >= _LONG_DOCUMENTS and case.is_many and not case.is_causal:
        if case.q_shape[1] >= _LEAST_GROUP * v_shape[1] and _gain_by_document(case) > _OF_MANY.least_gain:
            return found._replace(by_document=True)
    stores = _NEVER if not options.is_plain or not slices.area else _stores_of(case)
    is_by_document = seen <= stores.most_by_document and _gain_by_document(case) > stores.least_gain
    if is_by_document or (seen <= stores.most and case.single_share >= stores.least_single):
        return by_rounding(is_deterministic=True)._replace(first_writer=True, by_document=is_by_document)
    if found.block_m == WIDE and case.is_many and _gain_by_document(case) > _LEAST_BY_DOCUMENT:
        return found._replace(by_document=True)
    return found


class _Case(NamedTuple):
    """What of a call its schedule depends on; ``work_tiles`` of whole tiles."""

    q_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    slices: SliceTable
    keys: int
    is_remote: bool
    num_sms: int
    work_tiles: int

    @property
    def dim(self) -> int:
        """As kernels pad it."""
        return next((n for n in (64, 128) if n >= max(self.q_shape[2], self.v_shape[2])), 256)

    @property
    def sum_bytes(self) -> int:
        return 4 * self.q_shape[0] * self.q_shape[1] * self.dim

    @property
    def single_share(self) -> float:
        """The share for blocks of 64 queries."""
        return tile_steps(self.slices, self.q_shape[0], self.keys).single[NARROW]

    @property
    def is_causal(self) -> bool:
        """Whether any slice has a diagonal."""
        return bool((self.slices.array[:, 4] != _FULL).any())

    @property
    def is_whole(self) -> bool:
        return self.work_tiles >= fewest_whole(self.num_sms)

    @property
    def is_many(self) -> bool:
        return self.work_tiles >= MANY_WORK_TILES * self.num_sms


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


def _deterministic(case: _Case, found: BwdSchedule, has_wide: bool) -> BwdSchedule:
    if case.is_many or case.is_remote:
        return found._replace(by_document=case.is_whole and _is_by_document_deterministic(case))
    if case.is_whole and has_wide and can_split(case.q_shape[1] // case.v_shape[1]):
        split = select_tile_split(case.slices, case.q_shape, case.v_shape, case.num_sms, found.block_m)
        if split != NONE:
            return BwdSchedule(WIDE, 0, split=split)
    elif found.block_m == NARROW or case.slices.area < _LONGER_THAN_HALVES * max(case.keys, 1):
        parts = head_splits(case.slices, case.q_shape, case.v_shape, case.num_sms)
        if parts:
            return BwdSchedule(NARROW, parts)
    return found._replace(by_document=case.is_whole and _is_by_document_deterministic(case))


def _is_by_document_deterministic(case: _Case) -> bool:
    """With one or two query heads in a work tile L2 groups are larger than else, and L2 keeps less of them; with head
    dims up to 64, where a step is short, work tiles of one document that wait for each other would cost more than
    that."""
    shape = _shape_of(case)
    if shape.group > LARGE_L2_GROUPS or case.dim == 64:
        return _gain_by_document(case) > _LEAST_BY_DOCUMENT
    heads = heads_per_l2_group_deterministic(-(-case.keys // TILE), shape, 1)
    return _gain_by_document(case, heads) > _least_of_few_heads(case, shape.group)


def _least_of_few_heads(case: _Case, group: int) -> float:
    """What one document after the other has to gain. Tiles of causal documents wait for each other less if they come
    one after the other, which the estimate does not count: so mostly it may be anything."""
    if (case.slices.array[:, 4] != _CAUSAL).any():
        return _LEAST_OF_OTHERS
    if group == 1:
        is_any = case.work_tiles <= _FEW_OF_ONE * case.num_sms
    else:
        is_any = case.slices.area < _SHORT_OF_TWO * case.q_shape[0]
    return _ANY if case.is_many and (is_any or case.dim == 256) else _LEAST_BY_DOCUMENT


def _shape_of(case: _Case) -> WorkTileShape:
    heads_kv = case.v_shape[1]
    return WorkTileShape(heads_kv, case.q_shape[1] // max(heads_kv, 1), case.num_sms, case.num_sms)


def _gain_by_document(case: _Case, heads: int | None = None) -> float:
    """See ``work_tiles.gain_by_document``. Kept with the slices, which never change."""
    shape = _shape_of(case)

    def estimate() -> float:
        plan = TilePlan.of_table(case.slices, case.q_shape[0], case.keys, TILE, 2, is_transposed=True, is_kept=True)
        return gain_by_document(plan, shape, heads)

    return case.slices.cache.get(_GAINS, (case.q_shape[0], case.keys, shape, heads), estimate)
