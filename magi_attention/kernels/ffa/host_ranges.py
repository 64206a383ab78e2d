# SPDX-License-Identifier: Apache-2.0
"""Masks given as range tensors on a GPU, read by the host without waiting for the GPU.

The backward is faster where the host knows the mask, because the host makes a better schedule than the device. The
first call of a mask starts a copy of its ranges to pinned memory and goes on with the schedule of the device. Later
calls find the slice table, once the copy has arrived. No call waits for the copy.

A copy stands for its tensors as long as they are the very same objects (weak references, so a new tensor in reused
memory never matches), with the same version counters and the same storage. Edits that bypass torch are not seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from magi_attention.common.slices import SliceTable
from magi_attention.kernels.ffa.operands import CudaRuntime
from magi_attention.kernels.ffa.plans import RangeSnapshot, has_version
from magi_attention.kernels.tables import SliceTables, table_from_host_ranges
from magi_attention.kernels.types import RangeTensors

_MAX_ENTRIES = 1024


@dataclass(eq=False)
class _Copy:
    snapshot: RangeSnapshot
    ranges: RangeTensors  # on the host, valid once the event is done
    arrived: Any  # event; None once it is done
    tables: dict[tuple[int, int], SliceTable]  # by (total_q, total_k)


class HostRanges:
    """Slice tables of range tensors on a GPU, of ``tables``. Those of a mask go when one of its tensors does."""

    def __init__(self, tables: SliceTables) -> None:
        self._tables = tables
        self._copies: dict[tuple[int, ...], _Copy] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def find(self, runtime: CudaRuntime, mask: RangeTensors, total_q: int, total_k: int) -> SliceTable | None:
        """The slices of the mask, without those that the device planner leaves out; None while they are on their way.

        The first call starts the copy, on the current stream. Never for inference tensors, which have no version
        counter, and never while a CUDA graph is captured, because a replay follows the ranges as they are then.
        """
        if runtime.is_capturing():
            return None
        key = id(mask.q_ranges), id(mask.k_ranges), id(mask.types)
        copy = self._copies.get(key)
        if copy is None or not copy.snapshot.is_of(mask):
            if has_version(mask):
                self._start(runtime, key, mask)
            return None
        if copy.arrived is not None:
            if not copy.arrived.query():
                return None
            copy.arrived = None
        table = copy.tables.get((total_q, total_k))
        if table is None:
            table = copy.tables[total_q, total_k] = self._table(copy.ranges, total_q, total_k)
        return table

    def _table(self, ranges: RangeTensors, total_q: int, total_k: int) -> SliceTable:
        return table_from_host_ranges(*ranges, total_q, total_k, self._tables)

    def _start(self, runtime: CudaRuntime, key: tuple[int, ...], mask: RangeTensors) -> None:
        copies = self._copies
        # Taken first: an edit during the copy must not be missed.
        snapshot = RangeSnapshot(mask, lambda _: copies.pop(key, None))
        q_ranges, k_ranges = runtime.to_host(mask.q_ranges.detach()), runtime.to_host(mask.k_ranges.detach())
        types = None if mask.types is None else runtime.to_host(mask.types.detach())
        on_host = RangeTensors(q_ranges, k_ranges, types)
        arrived = runtime.event()
        arrived.record(runtime.stream_object())
        if len(copies) >= _MAX_ENTRIES:
            copies.clear()
        copies[key] = _Copy(snapshot, on_host, arrived, {})
