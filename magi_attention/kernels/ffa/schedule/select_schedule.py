# SPDX-License-Identifier: Apache-2.0
"""The schedule of a backward: size of its m-blocks, how dq is stored, splits, and order of documents.

* Size: m-blocks have 64, 80 or 128 queries (``block_m.py``).
* Splits: in deterministic order single tiles may be split (``tile_splits.py``), or all of them (``head_splits.py``).
* Store of dq: clearing ``dq_accum`` and rounding it takes as long whatever the mask. Where queries see few keys that is
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
from magi_attention.kernels.types import AttnOptions, RangeTensors
from magi_attention.native.tile_plan import TilePlan

# Queries that a key sees on average, from which on m-blocks of 80 are faster than splitting the heads in halves.
_MIN_QUERIES_WITHOUT_HALVES = 3072
# What taking one document after the other has to gain, by the estimate, which is a logarithm; -1.0: no estimate.
_MIN_GAIN = 0.08
# Keys that a query sees, from which on documents that are not causal gain more one after the other, with atomic dq,
# than where the first writer stores (docs/log/ffa_backward_modes.md).
_LONG_DOCUMENTS = 2100
# In deterministic order, over the larger L2 groups of one or two query heads in a work tile.
_MIN_GAIN_NOT_CAUSAL = 0.2  # documents with other masks than causal ones
_ANY_GAIN = -0.9  # any estimate will do
_ANY_GAIN_MAX_KEYS = 2000  # that a query sees on average, up to which any gain will do with two query heads
_ANY_GAIN_MAX_WORK_TILES = 5  # for each SM, the same with one
_CAUSAL, _FULL = AttnMaskType.CAUSAL.to_int_type(), AttnMaskType.FULL.to_int_type()


class _FirstWriterLimits(NamedTuple):
    """When the first writer limits. A query must see at most ``max_keys`` on average in the plan's own order, or
    ``max_keys_by_document`` by document, which has to gain ``min_gain``; and this share of the blocks of 64 queries
    must have a single contribution."""

    max_keys: int
    max_keys_by_document: int = 0
    min_gain: float = 0.0
    min_single_share: float = 0.0


_NEVER = _FirstWriterLimits(-1, -1)
# By what was measured; head dims of 65 to 128 unless another is named.
_FEW_WORK_TILES = _FirstWriterLimits(1100, 1100, _MIN_GAIN)  # for each SM
_MANY_WORK_TILES = _FirstWriterLimits(3600, 10_000, -0.04)
_SMALL_GROUPS = _FirstWriterLimits(400, 520, -0.04)  # of query heads of a kv head
_SPLIT_HEADS = _FirstWriterLimits(640)
_SPLIT_HEADS_FEW_KEYS = _FirstWriterLimits(1100)  # queries are many times as many as keys
_DIM_64 = _FirstWriterLimits(640, min_single_share=1 / 3)
_DIM_256 = _FirstWriterLimits(130, 520, -0.04)
_MIN_GROUP = 4  # query heads of a kv head, from which on groups are not small
_MIN_DIRECT_SHARE = 0.1  # single contributions, of all blocks, that gain more than it costs the kernel to look for them
_MIN_DQ_BYTES = 32 * 2**20  # of dq_accum, in all but the first two cases; less stays in L2
_FEW_KEYS_RATIO = 4  # queries for each key, from which on keys are few


class BwdSchedule(NamedTuple):
    """``block_m`` queries each; ``num_head_splits``: 0 for as few parts of the heads as the library chooses.

    ``first_writer``: the first writer to a block of dq stores, so that nothing is cleared. ``by_document``: work tiles
    are taken up one document after the other. ``split``: tiles whose query heads are split, in deterministic order.
    ``direct_dq_store``: the main kernel writes dq of blocks with a single contribution, if that is in 16 bits and not
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
            found = found._replace(direct_dq_store=share >= _MIN_DIRECT_SHARE)
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
        if case.q_shape[1] >= _MIN_GROUP * v_shape[1] and _gain_by_document(case) > _MANY_WORK_TILES.min_gain:
            return found._replace(by_document=True)
    limits = _NEVER if not options.is_plain or not slices.area else _first_writer_limits(case)
    is_by_document = seen <= limits.max_keys_by_document and _gain_by_document(case) > limits.min_gain
    if is_by_document or (seen <= limits.max_keys and case.single_share >= limits.min_single_share):
        return by_rounding(is_deterministic=True)._replace(first_writer=True, by_document=is_by_document)
    if found.block_m == WIDE and case.is_many and _gain_by_document(case) > _MIN_GAIN:
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


def _first_writer_limits(case: _Case) -> _FirstWriterLimits:
    """What was measured of calls of the kind. With keys of other ranks tiles are always whole."""
    if case.is_remote and not case.is_whole:
        return _NEVER
    if case.dim == 128 and case.is_whole and case.q_shape[1] >= _MIN_GROUP * case.v_shape[1]:
        return _MANY_WORK_TILES if case.is_many else _FEW_WORK_TILES
    if case.sum_bytes < _MIN_DQ_BYTES:
        return _NEVER
    if case.is_whole:
        return {64: _DIM_64, 128: _SMALL_GROUPS, 256: _DIM_256}[case.dim]
    if case.dim != 128:
        return _NEVER
    return _SPLIT_HEADS_FEW_KEYS if case.q_shape[0] >= _FEW_KEYS_RATIO * case.keys else _SPLIT_HEADS


def _deterministic(case: _Case, found: BwdSchedule, has_wide: bool) -> BwdSchedule:
    if case.is_many or case.is_remote:
        return found._replace(by_document=case.is_whole and _is_by_document_deterministic(case))
    if case.is_whole and has_wide and can_split(case.q_shape[1] // case.v_shape[1]):
        split = select_tile_split(case.slices, case.q_shape, case.v_shape, case.num_sms, found.block_m)
        if split != NONE:
            return BwdSchedule(WIDE, 0, split=split)
    elif found.block_m == NARROW or case.slices.area < _MIN_QUERIES_WITHOUT_HALVES * max(case.keys, 1):
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
        return _gain_by_document(case) > _MIN_GAIN
    heads = heads_per_l2_group_deterministic(-(-case.keys // TILE), shape, 1)
    return _gain_by_document(case, heads) > _min_gain_of_few_heads(case, shape.group)


def _min_gain_of_few_heads(case: _Case, group: int) -> float:
    """What one document after the other has to gain. Tiles of causal documents wait for each other less if they come
    one after the other, which the estimate does not count: so mostly it may be anything."""
    if (case.slices.array[:, 4] != _CAUSAL).any():
        return _MIN_GAIN_NOT_CAUSAL
    if group == 1:
        is_any = case.work_tiles <= _ANY_GAIN_MAX_WORK_TILES * case.num_sms
    else:
        is_any = case.slices.area < _ANY_GAIN_MAX_KEYS * case.q_shape[0]
    return _ANY_GAIN if case.is_many and (is_any or case.dim == 256) else _MIN_GAIN


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
