# SPDX-License-Identifier: Apache-2.0
"""Tile plans of masks: of slice tables, kept with the table; of range tensors, made on their device and remembered.

Each mask has two: one for the forward and, of the transposed mask, one for the backward. A remembered plan of range
tensors is used again only for the very same tensor objects (weak references, so a new tensor in reused memory never
matches), with the same version counters (so every in-place edit that torch knows of counts), the same storage and
the same stream. Edits that bypass torch, by a foreign kernel that got the raw address, are not seen: pass new
tensors then. While a CUDA graph is captured nothing is remembered and the planner becomes part of the graph, so that
a replay follows the ranges as they are then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch

from magi_attention.common.plan_cache import Kind, PlanCache
from magi_attention.common.slices import SliceTable
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.kernels.ffa.libraries import FfaLibraries
from magi_attention.kernels.tables import SliceTables, table_from_tensors
from magi_attention.kernels.types import RangeTensors
from magi_attention.native.ffa import FfaTile
from magi_attention.native.planner.schedule import ForwardSplits, WorkTileShape, forward_splits, with_schedule
from magi_attention.native.planner.tile_plan import TilePlan, plan_words

DEVICE_PLAN_BYTES = 64 * 2**20
_MAX_ENTRIES = 1024


class PlanShape(NamedTuple):
    """What of a call a plan depends on, besides the mask. The tiles of a transposed plan are of keys; ``schedule`` says
    which one lies behind it, made on the host: the work tiles of m-blocks of 80, or a work list. ``head_units`` of a
    forward: how often each tile is worked on."""

    total_q: int
    total_k: int
    tile: FfaTile
    is_transposed: bool = False
    schedule: WorkTileShape | None = None
    head_units: int = 0

    @property
    def rows(self) -> int:
        return self.total_k if self.is_transposed else self.total_q


@dataclass(eq=False)
class KeptOrder:
    """What backwards of one plan keep (``magi_ffa_bwd_params.order``); ``is_made`` once one has been launched."""

    words: torch.Tensor
    address: int
    is_made: bool = False


KEPT_ORDERS: Kind[tuple[object, ...], KeptOrder] = Kind("order of backwards", lambda kept: [kept.words])


class StreamOrder:
    """The streams behind which a tensor that was copied to a GPU is complete: the one of the copy, and those that wait
    for it."""

    def __init__(self, x: torch.Tensor, stream: int) -> None:
        self._streams = {stream}
        self._made = torch.cuda.current_stream(x.device).record_event() if x.is_cuda else None

    def join(self, x: torch.Tensor, stream: int, capturing: bool) -> None:
        """Work that the current stream gets from now on may read the tensor, which lives until that work is done.

        While a CUDA graph is captured nothing is added to it: torch waits for the device before a capture begins.
        """
        if stream in self._streams or capturing or self._made is None:
            return
        current = torch.cuda.current_stream(x.device)
        current.wait_event(self._made)
        x.record_stream(current)
        self._streams.add(stream)


class Kept(NamedTuple):
    """A plan, its address, and the orders that backwards keep with it; None if it is for one call. ``streams`` of a
    plan that several streams may use. ``work_list``: the address of the work list behind the plan, 0 for none.
    ``splits``: of a forward, where the host knows the mask."""

    plan: torch.Tensor
    address: int
    orders: PlanCache | None
    streams: StreamOrder | None = None
    work_list: int = 0
    splits: ForwardSplits | None = None

    def order_of(self, key: tuple[object, ...], num_bytes: int, capturing: bool) -> KeptOrder | None:
        """The order for calls of ``key``, to be held until the launch; None if none is kept.

        The first call fills it and the others read it, in stream order: the stream is part of the key. While a CUDA
        graph is captured none is made, because its memory would be the graph's.
        """
        if not num_bytes or self.orders is None:
            return None
        kept = self.orders.find(KEPT_ORDERS, key)
        if kept is None and not capturing:
            kept = self.orders.get(KEPT_ORDERS, key, partial(self._new_order, num_bytes))
        return kept

    def _new_order(self, num_bytes: int) -> KeptOrder:
        words = torch.zeros(num_bytes, dtype=torch.uint8, device=self.plan.device)
        return KeptOrder(words, words.data_ptr())


DEVICE_PLANS: Kind[tuple[PlanShape, torch.device], Kept] = Kind("tile plan, where kernels read it")


class PlannedMask(Protocol):
    """A mask that keeps its plans itself."""

    def plan(self, shape: PlanShape, device: torch.device) -> Kept: ...


class PlannedKeys(Protocol):
    """Keys whose mask keeps its plans itself: ``RemoteKeys``."""

    @property
    def mask(self) -> PlannedMask: ...


class _Entry(NamedTuple):
    snapshot: RangeSnapshot
    kept: Kept


class RangeSnapshot:
    """Range tensors as they were: the very objects, by weak references, and what changes with every edit that torch
    knows of. There is none of a mask without ``has_version``. ``forget`` is called when one of the tensors goes.

    Attributes one by one, because each call of a training step asks several times.
    """

    __slots__ = ("_k", "_q", "_state", "_types")

    def __init__(self, mask: RangeTensors, forget: Callable[[object], object] | None = None) -> None:
        q, k, types = mask
        self._state = self._state_of(q, k, types)
        self._q, self._k = weakref.ref(q, forget), weakref.ref(k, forget)
        self._types = _no_tensor if types is None else weakref.ref(types, forget)

    def is_of(self, mask: RangeTensors) -> bool:
        """Are these the same tensors, unedited?"""
        q, k, types = mask
        is_same = self._q() is q and self._k() is k and self._types() is types
        return is_same and self._state == self._state_of(q, k, types)

    @staticmethod
    def _state_of(q: torch.Tensor, k: torch.Tensor, types: torch.Tensor | None) -> tuple[object, ...]:
        of_types = None if types is None else (types._version, types.data_ptr(), types.shape)
        return q._version, q.data_ptr(), q.shape, k._version, k.data_ptr(), k.shape, of_types


def _no_tensor() -> None:
    return None


def has_version(mask: RangeTensors) -> bool:
    """Does torch count the edits of all tensors of the mask? It does not count those of inference tensors."""
    q, k, types = mask
    return not (q.is_inference() or k.is_inference() or (types is not None and types.is_inference()))


class RangePlans:
    """Makes and remembers plans. Those of range tensors go when a tensor of the mask does."""

    def __init__(self, libraries: FfaLibraries, on_host: bool = False, tables: SliceTables | None = None) -> None:
        self._libraries, self._tables = libraries, tables
        self._on_host = on_host
        self._entries: dict[tuple[object, ...], _Entry] = {}

    def plan(
        self,
        mask: SliceTable | RangeTensors | PlannedKeys,
        shape: PlanShape,
        device: torch.device,
        stream: int,
        capturing: bool,
    ) -> Kept:
        """The plan, to be held until the launch."""
        if isinstance(mask, SliceTable):
            kept = mask.cache.find(DEVICE_PLANS, (shape, device))
            if kept is None:
                if capturing:
                    raise ContractError(
                        "The tile plan of this mask cannot be copied to the GPU while a CUDA graph is captured; run "
                        "the call once before the capture."
                    )
                kept = mask.cache.get(DEVICE_PLANS, (shape, device), partial(_of_table, mask, shape, device, stream))
            if kept.streams is not None:
                kept.streams.join(kept.plan, stream, capturing)
            return kept
        if not isinstance(mask, RangeTensors):
            return mask.mask.plan(shape, device)
        return self.get(mask, shape, stream, capturing)

    def find(self, mask: RangeTensors, shape: PlanShape, stream: int) -> torch.Tensor | None:
        """A remembered plan that is still true, or None."""
        entry = self._entries.get(_key(mask, shape, stream))
        return entry.kept.plan if entry is not None and entry.snapshot.is_of(mask) else None

    def get(self, mask: RangeTensors, shape: PlanShape, stream: int, capturing: bool) -> Kept:
        """The plan, int32 on the device of the ranges; remembered unless in a graph or of an inference tensor."""
        key, entries = _key(mask, shape, stream), self._entries
        entry = None if capturing else entries.get(key)
        if entry is not None and entry.snapshot.is_of(mask):
            return entry.kept
        if capturing or not has_version(mask):
            plan = self._produce(mask, shape, stream, capturing)
            return Kept(plan, plan.data_ptr(), None)
        # Taken first: an edit while the plan is being made must not be missed.
        snapshot = RangeSnapshot(mask, lambda _: entries.pop(key, None))
        plan = self._produce(mask, shape, stream, capturing)
        if len(entries) >= _MAX_ENTRIES:
            entries.clear()
        kept = Kept(plan, plan.data_ptr(), PlanCache())
        entries[key] = _Entry(snapshot, kept)
        return kept

    def _produce(self, mask: RangeTensors, shape: PlanShape, stream: int, capturing: bool) -> torch.Tensor:
        num_slices = mask.q_ranges.shape[0]
        num_tiles = -(-shape.rows // shape.tile.tokens)
        # A slice adds at most one layer to a tile, which bounds the plan without looking at the ranges. The three parts
        # of a transposed one follow one another, so they meet in two tiles at most.
        layers = num_slices * (num_tiles + 2 if shape.is_transposed else num_tiles)
        words = plan_words(shape.rows, shape.tile.tokens, layers)
        is_small = num_slices and 4 * words <= DEVICE_PLAN_BYTES and shape.schedule is None
        if is_small and (capturing or not self._on_host):
            return self._on_device(mask, shape, words, stream)
        if capturing:
            raise UnsupportedError(
                f"{num_slices} slices over {num_tiles} tiles cannot be planned inside a CUDA graph; give the mask as a "
                "SliceTable (magi_attention.api.Mask), planned before the capture."
            )
        # By way of the host, which waits for the device, checks every range and needs no more memory than used.
        return table_plan(table_from_tensors(*mask, self._tables), shape, mask.q_ranges.device)

    def _on_device(self, mask: RangeTensors, shape: PlanShape, words: int, stream: int) -> torch.Tensor:
        num_slices, (rows, columns) = mask.q_ranges.shape[0], (shape.total_q, shape.total_k)
        planner = self._libraries.at_hand  # every library has the same
        # Held until everything is launched.
        q, k = mask.q_ranges.to(torch.int32).contiguous(), mask.k_ranges.to(torch.int32).contiguous()
        types = None if mask.types is None else mask.types.to(torch.int32).contiguous()
        at: tuple[int, int, int | None] = q.data_ptr(), k.data_ptr(), None if types is None else types.data_ptr()
        if shape.is_transposed:
            parts = torch.empty(15 * num_slices, dtype=torch.int32, device=mask.q_ranges.device)
            first = parts.data_ptr()
            to = (first, first + 24 * num_slices, first + 48 * num_slices)  # (3n, 2), (3n, 2), (3n,) words of 4 bytes
            planner.transpose_on_device(*at, num_slices, rows, columns, *to, stream)
            at, num_slices, rows, columns = to, 3 * num_slices, columns, rows
        plan = torch.empty(words, dtype=torch.int32, device=mask.q_ranges.device)
        planner.plan_on_device(
            *at, num_slices, rows, columns, shape.tile, plan.data_ptr(), words, stream,
        )  # fmt: skip
        return plan


def _key(mask: RangeTensors, shape: PlanShape, stream: int) -> tuple[object, ...]:
    q, k, types = mask
    return id(q), id(k), id(types), shape, stream


def _of_table(slices: SliceTable, shape: PlanShape, device: torch.device, stream: int) -> Kept:
    words, list_begin = _host_words(slices, shape)
    plan, orders = _to_device(words, device), PlanCache()
    slices.cache.include(orders)
    address = plan.data_ptr()
    work_list_at = address + 4 * list_begin if list_begin else 0
    return Kept(plan, address, orders, StreamOrder(plan, stream), work_list_at, _splits(words, shape, device))


def _splits(words: np.ndarray, shape: PlanShape, device: torch.device) -> ForwardSplits | None:
    if not shape.head_units or device.type != "cuda":
        return None
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return forward_splits(TilePlan(words), shape.head_units, sms)


def table_plan(slices: SliceTable, shape: PlanShape, device: torch.device) -> torch.Tensor:
    """The plan of a slice table, int32 on ``device``, complete when the current stream gets there: the host does not
    wait. ``ContractError`` if a slice reaches beyond the rows."""
    return _to_device(_host_words(slices, shape)[0], device)


def _host_words(slices: SliceTable, shape: PlanShape) -> tuple[np.ndarray, int]:
    """The words of a plan with its schedule behind it, and where its work list begins; 0 for none."""
    total_q, total_k, tile, is_transposed, schedule, _ = shape
    plan = TilePlan.of_table(slices, total_q, total_k, tile.tokens, tile.groups, is_transposed)
    if schedule is None:
        return plan.words.copy(), 0
    return with_schedule(plan.words, schedule), len(plan.words) if schedule.list_block_m else 0


def _to_device(words: np.ndarray, device: torch.device) -> torch.Tensor:
    made = torch.from_numpy(words)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made
