# SPDX-License-Identifier: Apache-2.0
"""Several tensors with the same rows as one buffer on the wire, and the moves of rows in and out of it.

One tensor travels in its own dtype. Tensors of one dtype (K and V, say) share a row. Tensors of different
dtypes (bf16 outputs and their float32 lse) share a row of bytes, each starting at a multiple of 16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from magi_attention.comm.layout import A2AVLayout, Rows
from magi_attention.comm.transport import Transport, Work

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
        shapes = tuple(x.shape[1:] for x in tensors)
        spans, at = [], 0
        if len(set(dtypes)) == 1:
            dtype = dtypes[0]
            for shape in shapes:
                spans.append((at, at + math.prod(shape)))
                at = spans[-1][1]
        else:
            dtype = torch.uint8
            for shape, part in zip(shapes, dtypes):
                spans.append((at, at + math.prod(shape) * part.itemsize))
                at = -(-spans[-1][1] // _ALIGN_BYTES) * _ALIGN_BYTES
        return cls(dtype, at, tuple(dtypes), shapes, tuple(spans))

    def columns(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """``buffer`` (rows, width) seen as one (rows, *shape) view per tensor."""
        rows = buffer.shape[0]
        return [
            buffer[:, a:b].view(dtype).view(rows, *shape)
            for (a, b), dtype, shape in zip(self.spans, self.dtypes, self.shapes)
        ]


def gather_rows(tensors: Sequence[torch.Tensor], rows: Rows, pack: RowPack) -> torch.Tensor:
    """The wire buffer (rows.count, pack.width) with these rows of all tensors, in the wire's dtypes."""
    if len(tensors) == 1:
        part = rows.take(tensors[0]).to(pack.dtype)
        return part.contiguous().reshape(rows.count, pack.width)
    buffer = tensors[0].new_empty((rows.count, pack.width), dtype=pack.dtype)
    for column, x in zip(pack.columns(buffer), tensors):
        rows.take_into(column, x)
    return buffer


Finish = Callable[[], None]


def start_cast(
    transport: Transport, layout: A2AVLayout, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> tuple[Work, Finish]:
    """Puts the rows on the wire. Call the second result after the wait: it moves rows into ``outputs``."""
    pack = RowPack.of(inputs, [x.dtype for x in inputs])
    wire = gather_rows(inputs, layout.send, pack)
    direct = _place_in_output(outputs, layout.recv)
    arrived = wire.new_empty((layout.recv.count, pack.width)) if direct is None else direct
    work = transport.all_to_all_v(arrived, wire, layout.recv_counts, layout.send_counts, async_op=True)
    # why now: a local copy needs no wait, and the caller may change the input after the wait
    for x, y in zip(inputs, outputs):
        if layout.self_in.count:
            layout.self_out.put(y, layout.self_in.take(x))

    def finish() -> None:
        if direct is None and layout.recv.count:
            for column, y in zip(pack.columns(arrived), outputs):
                layout.recv.put(y, column)

    return work, finish


def _place_in_output(outputs: Sequence[torch.Tensor], recv: Rows) -> torch.Tensor | None:
    """The part of a single output that can take arriving rows without a second copy."""
    if len(outputs) != 1 or recv.start is None or not outputs[0].is_contiguous():
        return None
    y = outputs[0]
    return y.narrow(0, recv.start, recv.count).view(recv.count, math.prod(y.shape[1:]))


def start_reduce(
    transport: Transport, layout: A2AVLayout, inputs: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
) -> tuple[Work, Callable[[], list[tuple[Rows, list[torch.Tensor]]]]]:
    """Sends the rows of ``inputs`` back where the cast had them from, in ``dtypes`` on the wire. Call the
    second result after the wait: it lists, ranks ascending, the target rows of each rank's contribution and
    its parts, one (rows, ...) tensor per input."""
    pack = RowPack.of(inputs, dtypes)
    wire = gather_rows(inputs, layout.recv, pack)
    arrived = wire.new_empty((layout.send.count, pack.width))
    work = transport.all_to_all_v(arrived, wire, layout.send_counts, layout.recv_counts, async_op=True)
    local = [layout.self_out.take(x) for x in inputs]

    def contributions() -> list[tuple[Rows, list[torch.Tensor]]]:
        columns = pack.columns(arrived)
        return [
            (rows, local if at is None else [c.narrow(0, at, rows.count) for c in columns])
            for rows, at in layout.segments
        ]

    return work, contributions
