# SPDX-License-Identifier: Apache-2.0
"""Several tensors with the same rows as one buffer on the wire, and the moves of rows in and out of it.

One tensor travels in its own dtype. Tensors of one dtype (K and V, say) share a row. Tensors of different
dtypes (bf16 outputs and their float32 lse) share a row of bytes, each starting at a multiple of 16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import torch

from magi_attention.comm.collectives.layout import A2AVLayout, Rows, copy_rows
from magi_attention.comm.transport.base import AllToAll, Work
from magi_attention.common.plan_cache import Kind
from magi_attention.native.rows import ALL_ROWS, Part, PreparedRows, RowList, row_kernels

_ALIGN_BYTES = 16


@dataclass(frozen=True, slots=True)
class RowPack:
    """How one wire row is made up. ``spans[i]``: begin and end of tensor i in a row of the buffer."""

    dtype: torch.dtype
    width: int
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[torch.Size, ...]
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> RowPack:
        """For rows of ``tensors`` that travel in ``dtypes``."""
        return _pack_of(tuple(x.shape[1:] for x in tensors), tuple(dtypes))

    def columns(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """``buffer`` (rows, width) seen as one (rows, *shape) view per tensor."""
        rows, start = buffer.shape[0], buffer.storage_offset()
        return [
            # why: one operation in place of three, on the path of every layer
            buffer.as_strided((rows, *shape), (self.width, *dense_strides(shape)), start + a)
            if dtype == self.dtype
            else buffer[:, a:b].view(dtype).view(rows, *shape)
            for (a, b), dtype, shape in zip(self.spans, self.dtypes, self.shapes)
        ]


@lru_cache(maxsize=512)
def _pack_of(shapes: tuple[torch.Size, ...], dtypes: tuple[torch.dtype, ...]) -> RowPack:
    is_alike, spans, at = len(set(dtypes)) == 1, [], 0
    for shape, part in zip(shapes, dtypes):
        spans.append((at, at + math.prod(shape) * (1 if is_alike else part.itemsize)))
        at = spans[-1][1] if is_alike else -(-spans[-1][1] // _ALIGN_BYTES) * _ALIGN_BYTES
    return RowPack(dtypes[0] if is_alike else torch.uint8, at, dtypes, shapes, tuple(spans))


@lru_cache(maxsize=512)
def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


def gather_rows(tensors: Sequence[torch.Tensor], rows: Rows, pack: RowPack) -> torch.Tensor:
    """The wire buffer (rows.count, pack.width) with these rows of all tensors, in the wire's dtypes."""
    if len(tensors) == 1 and rows.start is not None and tensors[0].dtype == pack.dtype:
        return rows.take(tensors[0]).contiguous().reshape(rows.count, pack.width)
    buffer = tensors[0].new_empty((rows.count, pack.width), dtype=pack.dtype)
    if not move_rows(buffer, tensors, rows, pack, is_packing=True):
        copy_rows(pack.columns(buffer), tensors, None, rows)
    return buffer


_Launch = tuple[PreparedRows, list[int], list[int], RowList]  # which has the list held while it runs
_LAUNCHES: Kind[tuple[object, ...], tuple[_Launch | None, RowPack]] = Kind("move of rows, and its pack for the id")


def move_rows(
    buffer: torch.Tensor, tensors: Sequence[torch.Tensor], rows: Rows, pack: RowPack, is_packing: bool
) -> bool:
    """Copies between a wire buffer and ``rows`` of the tensors by a launch prepared once; False if there is none."""
    if not buffer.is_cuda:
        return False
    key = (rows.name, is_packing, id(pack), buffer.get_device(), *[(x.stride(), x.dtype) for x in tensors])
    known = rows.cache.find(_LAUNCHES, key)
    if known is None:
        known = rows.cache.get(_LAUNCHES, key, partial(_prepared_move, buffer, tensors, rows, pack, is_packing))
    if known[0] is None:
        return False
    launch, wire_offsets, tensor_offsets, _ = known[0]
    if rows.count:
        at, addresses = buffer.data_ptr(), []
        for x, wire_offset, offset in zip(tensors, wire_offsets, tensor_offsets):
            pair = (x.data_ptr() + offset, at + wire_offset)
            addresses += pair if is_packing else pair[::-1]
        launch.run(addresses)
    return True


def _prepared_move(
    buffer: torch.Tensor, tensors: Sequence[torch.Tensor], rows: Rows, pack: RowPack, is_packing: bool
) -> tuple[_Launch | None, RowPack]:
    return _prepare_move(buffer, tensors, rows, pack, is_packing), pack


def _prepare_move(
    buffer: torch.Tensor, tensors: Sequence[torch.Tensor], rows: Rows, pack: RowPack, is_packing: bool
) -> _Launch | None:
    """The launch; in bytes where each tensor begins in a wire row, and where its rows begin in the tensor; the list."""
    kernels = row_kernels(buffer)
    if kernels is None:
        return None
    parts, size = [], pack.dtype.itemsize
    for column, x in zip(pack.columns(buffer), tensors):
        part = Part.of(x, column) if is_packing else Part.of(column, x)
        part = None if part is None else part.as_copy(x.element_size())
        if part is None or not part.elements:
            return None
        # A buffer with no rows or one may have any stride.
        stride = {"out_stride" if is_packing else "in_stride": pack.width * size}
        parts.append(part._replace(**stride))
    listed = ALL_ROWS if rows.start is not None else rows.listed(buffer.device)
    lists = (ALL_ROWS, listed) if is_packing else (listed, ALL_ROWS)
    launch = kernels.prepare_copy(parts, *lists, rows.count)
    strides = [part.in_stride if is_packing else part.out_stride for part in parts]
    starts = [(rows.start or 0) * stride for stride in strides]
    return None if launch is None else (launch, [begin * size for begin, _ in pack.spans], starts, listed)


class Arrived:
    """What a reduce received: of input i ``columns[i]`` of ``wire`` (rows, width), and ``local[i]`` from this rank."""

    def __init__(self, layout: A2AVLayout, wire: torch.Tensor, pack: RowPack, local: list[torch.Tensor]) -> None:
        self.layout, self.wire, self.pack, self.local = layout, wire, pack, local

    @cached_property
    def columns(self) -> list[torch.Tensor]:
        return self.pack.columns(self.wire)

    def segments(self) -> list[tuple[Rows, list[torch.Tensor]]]:
        """Ranks ascending: target rows of the rank's contribution and its parts, a (rows, ...) tensor per input."""
        return [
            (rows, self.local if at is None else [c.narrow(0, at, rows.count) for c in self.columns])
            for rows, at in self.layout.segments
        ]


Finish = Callable[[], None]


def start_cast(
    transport: AllToAll, layout: A2AVLayout, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> tuple[Work, Finish]:
    """Puts the rows on the wire. Call the second result after the wait: it moves rows into ``outputs``."""
    pack = RowPack.of(inputs, [x.dtype for x in inputs])
    wire = gather_rows(inputs, layout.send, pack)
    direct = _place_in_output(outputs, layout.recv)
    arrived = wire.new_empty((layout.recv.count, pack.width)) if direct is None else direct
    work = transport.all_to_all_v(arrived, wire, layout.recv_counts, layout.send_counts, async_op=True)
    # why now: a local copy needs no wait, and the caller may change the input after the wait
    if layout.has_local_rows:
        copy_rows(outputs, inputs, layout.self_out, layout.self_in)

    def finish() -> None:
        if direct is None and layout.recv.count:
            if not move_rows(arrived, outputs, layout.recv, pack, is_packing=False):
                copy_rows(outputs, pack.columns(arrived), layout.recv, None)

    return work, finish


def start_fetch(
    transport: AllToAll, layout: A2AVLayout, inputs: Sequence[torch.Tensor]
) -> tuple[Work, Callable[[], list[torch.Tensor]]]:
    """``start_cast`` into tensors of its own, which the second result gives after the wait.

    Where rows arrive in the order in which they are wanted, these are views of what arrived and nothing is copied.
    """
    is_in_place = layout.recv.start == 0 and layout.recv.count == layout.output_rows
    if not is_in_place or layout.has_local_rows:
        outputs = [x.new_empty((layout.output_rows, *x.shape[1:])) for x in inputs]
        work, finish = start_cast(transport, layout, inputs, outputs)

        def scattered() -> list[torch.Tensor]:
            finish()
            return outputs

        return work, scattered
    pack = RowPack.of(inputs, [x.dtype for x in inputs])
    wire = gather_rows(inputs, layout.send, pack)
    arrived = wire.new_empty((layout.recv.count, pack.width))
    work = transport.all_to_all_v(arrived, wire, layout.recv_counts, layout.send_counts, async_op=True)
    return work, lambda: pack.columns(arrived)


def _place_in_output(outputs: Sequence[torch.Tensor], recv: Rows) -> torch.Tensor | None:
    """The part of a single output that can take arriving rows without a second copy."""
    if len(outputs) != 1 or recv.start is None or not outputs[0].is_contiguous():
        return None
    y = outputs[0]
    return y.narrow(0, recv.start, recv.count).view(recv.count, math.prod(y.shape[1:]))


def start_reduce(
    transport: AllToAll, layout: A2AVLayout, inputs: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
) -> tuple[Work, Callable[[], Arrived]]:
    """Sends the rows of ``inputs`` back where the cast had them from, in ``dtypes`` on the wire. Call the
    second result after the wait."""
    pack = RowPack.of(inputs, dtypes)
    wire = gather_rows(inputs, layout.recv, pack)
    arrived = wire.new_empty((layout.send.count, pack.width))
    work = transport.all_to_all_v(arrived, wire, layout.send_counts, layout.recv_counts, async_op=True)
    local = [layout.self_out.take(x) for x in inputs] if layout.has_local_rows else []

    return work, lambda: Arrived(layout, arrived, pack, local)
