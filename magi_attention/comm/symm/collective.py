# SPDX-License-Identifier: Apache-2.0
"""Group cast and group reduce over buffers: rows go straight from the sender's tensors into the receiver's memory.

A cast is a put and, beside it, a copy of what has arrived to its place in the outputs; a reduce is a put and, beside
it, a sum of what has arrived, in float32 in the order of the ranks, so it gives the same bits on every run. No host
waits for anything. While rows travel, multiprocessors are used by the few CTAs of the put and by as few that copy or
add. Launches are prepared once per layout and shapes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from magi_attention.comm.collectives import args as args_of
from magi_attention.comm.collectives.layout import A2AVLayout, copy_rows
from magi_attention.comm.collectives.wire import dense_strides
from magi_attention.comm.symm.buffers import SymmBuffer, SymmGroup, symm_group, why_no_symm_buffers
from magi_attention.comm.symm.tables import PutTable, SymmTables
from magi_attention.comm.transport.base import Transport
from magi_attention.comm.transport.torch import TorchTransport
from magi_attention.common.plan_cache import PlanCache
from magi_attention.errors import ContractError
from magi_attention.native import abi

# CTAs of the put, and of the copy or the sum of what arrives. 12 send as fast as more, which get in each other's way;
# a copy keeps up by 12, a sum by 28 (docs/log/one_launch.md). Few transfers get a CTA each.
_CTAS = {"cast": (12, 12), "reduce": (12, 28)}
_CTAS_OF_FEW = {"cast": (16, 16), "reduce": (16, 32)}
_FEW = 16


def ctas_of(op: str, transfers: int, num_sms: int | None) -> tuple[int, int]:
    """How many CTAs of a "cast" or "reduce" send and how many copy or add, together at most ``num_sms`` if given."""
    put, other = (_CTAS_OF_FEW if transfers <= _FEW else _CTAS)[op]
    if num_sms is None or num_sms >= put + other:
        return put, other
    some = max(1, num_sms * put // (put + other))
    return some, max(1, num_sms - some)


_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_log = logging.getLogger("magi_attention.comm")


# -- whether -------------------------------------------------------------------------------------------------
def is_wanted(native: bool | None) -> bool:
    """``native`` if given, else what MAGI_ATTENTION_NATIVE_GRPCOLL says."""
    if native is not None:
        return native
    from magi_attention.env import comm

    return comm.is_native_grpcoll_enable()


def symm_group_for(
    transport: Transport, tensors: Sequence[torch.Tensor], dtypes: Sequence[Sequence[torch.dtype]], op: str = "cast"
) -> SymmGroup | None:
    """The buffers over which these tensors can travel, or None, with one line in the log that says why.

    ``dtypes``: of the tensors on the wire, and for a reduce of its outputs. Decided alike on all ranks: by what must be
    the same there, and for the first call of a group by asking them all.
    """
    if transport.size == 1:
        return None
    reason = _why_not(tensors, dtypes, op) or why_no_symm_buffers(transport, by_wish=True)
    if reason is not None:
        _say_once(reason)
        return None
    assert isinstance(transport, TorchTransport)
    return symm_group(transport, tensors[0].device)


def _why_not(tensors: Sequence[torch.Tensor], dtypes: Sequence[Sequence[torch.dtype]], op: str) -> str | None:
    if any(x.device.type != "cuda" for x in tensors):
        return f"The tensors are on {tensors[0].device.type}."
    if op == "lse":
        return "A reduce by lse weighs what arrives."
    if len(tensors) > abi.SYMM_TENSORS:
        return f"{len(tensors)} tensors travel, and buffers take {abi.SYMM_TENSORS}."
    for dtype in [d for side in dtypes for d in side]:
        if dtype not in _FLOATS:
            return f"Rows of {dtype} travel, and buffers take bfloat16, float16 and float32."
    if op != "cast" and any(len(set(side)) > 1 for side in dtypes):
        return "The tensors of one reduce have several dtypes."
    for x, dtype in zip(tensors, dtypes[0]):
        values = math.prod(x.shape[1:])
        if values == 0 or values * dtype.itemsize % 16 or (op != "cast" and values % 8):
            least = "16 bytes" if op == "cast" else "16 bytes and of 8 values"
            return f"Rows of shape {tuple(x.shape[1:])} in {dtype} are no multiple of {least}."
    return None


@lru_cache(maxsize=64)
def _say_once(reason: str) -> None:
    _log.warning("Group collectives go through all-to-all-v and not straight over NVLink: %s", reason)


# -- one layout over the buffers of one group ------------------------------------------------------------------
class SymmExchange:
    """The tables of a layout on the device, and launches for each shape of rows, prepared at its first use."""

    def __init__(self, layout: A2AVLayout, counts: np.ndarray, device: torch.device) -> None:
        self.layout, self.tables = layout, SymmTables.of(layout, counts)
        self._device = device
        tables = self.tables
        self._held = [self._on(x) for x in (tables.unpack, tables.src_rows, tables.needed_signals, tables.awaited)]
        self._unpack, self._src_rows, self._needed_signals, self._awaited = (x.data_ptr() for x in self._held)
        self._prepared: dict[tuple, tuple[SymmBuffer, tuple]] = {}
        self.cache = PlanCache()  # no table: all ranks make an exchange together, so no rank may drop its own
        self._count()
        layout.cache.include(self.cache)

    def _count(self) -> None:
        self.cache.count("tables", self._held, *self.tables.arrays)

    @classmethod
    def of(cls, transport: Transport, layout: A2AVLayout, group: SymmGroup, signature: tuple) -> SymmExchange:
        """That of ``layout``. Collective at the first call, when the counts of all ranks are compared."""
        found = layout.exchanges.get(group)
        if found is None:
            if group.is_capturing:
                raise ContractError(
                    "Ranks compare their counts at the first use of a layout, which cannot be done while a CUDA graph "
                    "is captured; pass a layout that an earlier call was given."
                )
            group.meet("the first use of a layout")
            counts = args_of.compare_ranks(transport, args_of.counts_of_layout(layout), signature)
            found = layout.exchanges[group] = cls(layout, np.array(counts, dtype=np.int64), group.device)
        return found

    def cast(
        self,
        group: SymmGroup,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        num_sms: int | None,
        stream: int,
    ) -> None:
        """Inputs and outputs as ``dense_rows`` makes them; enqueues everything on ``stream``, which is current."""
        key = ("cast", num_sms, *[(x.dtype, _row_bytes(x), _stride(x), _stride(y)) for x, y in zip(inputs, outputs)])
        put, unpack = self._launches(key, group, lambda: self._prepare_cast(group, inputs, outputs, num_sms))
        put([x.data_ptr() for x in inputs], stream)
        unpack([y.data_ptr() for y in outputs], stream)
        if self.layout.has_local_rows:
            copy_rows(outputs, inputs, self.layout.self_out, self.layout.self_in)

    def reduce(
        self,
        group: SymmGroup,
        inputs: Sequence[torch.Tensor],
        base: Sequence[torch.Tensor] | None,
        outputs: Sequence[torch.Tensor],
        num_sms: int | None,
        stream: int,
    ) -> None:
        """``inputs`` in the dtype of the wire; ``base`` and ``outputs`` contiguous."""
        of_base = None if base is None else base[0].dtype
        key = ("reduce", num_sms, of_base, outputs[0].dtype, *[(x.dtype, _row_bytes(x), _stride(x)) for x in inputs])
        put, recv_reduce = self._launches(
            key, group, lambda: self._prepare_reduce(group, inputs, of_base, outputs, num_sms)
        )
        own = [x.data_ptr() for x in inputs]
        put(own, stream)
        start = [0] * len(outputs) if base is None else [y.data_ptr() for y in base]
        recv_reduce(own, start, [y.data_ptr() for y in outputs], stream)

    def _launches(self, key: tuple, group: SymmGroup, prepare: Callable[[], tuple[SymmBuffer, tuple]]) -> tuple:
        known = self._prepared.get(key)
        if known is None or not group.holds(known[0]):  # the buffer has grown since
            known = self._prepared[key] = prepare()
        return known[1]

    def _prepare_cast(self, group: SymmGroup, inputs, outputs, num_sms: int | None) -> tuple[SymmBuffer, tuple]:
        tables, sizes = self.tables, [_row_bytes(x) for x in inputs]
        buffer, data_at = _buffer_with_room(group, "cast", tables.cast_rows, sizes)
        ctas, copying = ctas_of("cast", len(tables.cast.transfers), num_sms)
        put = self._put(group, buffer, tables.cast, inputs, data_at, ctas)
        num_transfers = len(tables.unpack)
        unpack = group.unpack(
            buffer, num_tensors=len(inputs), num_transfers=num_transfers, num_ctas=_at_most(copying, num_transfers),
            transfers=self._unpack, data_at=data_at, row_bytes=sizes, out_stride=[_stride(y) for y in outputs],
        )  # fmt: skip
        return buffer, (put, unpack)

    def _prepare_reduce(
        self, group: SymmGroup, inputs, of_base, outputs, num_sms: int | None
    ) -> tuple[SymmBuffer, tuple]:
        tables, sizes = self.tables, [_row_bytes(x) for x in inputs]
        buffer, data_at = _buffer_with_room(group, "reduce", tables.reduce_rows, sizes)
        ctas, adding = ctas_of("reduce", len(tables.reduce.transfers), num_sms)
        put = self._put(group, buffer, tables.reduce, inputs, data_at, ctas)
        recv_reduce = group.recv_reduce(
            buffer, inputs[0].dtype, outputs[0].dtype, of_base or torch.float32, rows=self.layout.input_rows,
            num_tensors=len(inputs), num_ctas=_at_most(adding, len(tables.needed_signals)),
            row_values=[math.prod(x.shape[1:]) for x in inputs], src_rows=self._src_rows,
            needed_signals=self._needed_signals,
            signals=self._awaited, data_at=data_at, own_stride=[_stride(x) for x in inputs],
        )  # fmt: skip
        return buffer, (put, recv_reduce)

    def _put(self, group: SymmGroup, buffer: SymmBuffer, table: PutTable, inputs, data_at: list[int], ctas: int):
        transfers, signals = self._on(table.transfers), self._on(table.signals)
        self._held += [transfers, signals]
        self._count()
        return group.put(
            buffer, num_tensors=len(inputs), num_transfers=len(table.transfers),
            num_ctas=_at_most(ctas, len(table.transfers)),
            transfers=transfers.data_ptr(), signals=signals.data_ptr(), source_stride=[_stride(x) for x in inputs],
            data_at=data_at, row_bytes=[_row_bytes(x) for x in inputs],
        )  # fmt: skip

    def _on(self, table: np.ndarray) -> torch.Tensor:
        # why a copy even if it is empty: a launch wants an address
        padded = table if table.size else np.zeros(4, dtype=np.int32)
        return torch.from_numpy(np.ascontiguousarray(padded)).to(self._device)


def start_symm_cast(
    exchange: SymmExchange,
    group: SymmGroup,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    num_sms: int | None,
    is_async: bool,
) -> tuple[Any, Callable[[], None]]:
    """As ``wire.start_cast``: what to wait for, and what to call after the wait."""
    rows = exchange.layout.output_rows
    with group.ordered(is_async) as ordered:
        sources = [dense_rows(x) for x in inputs]
        targets = [y if _is_dense(y) else _empty(rows, y, y.dtype) for y in outputs]
        exchange.cast(group, sources, targets, num_sms, ordered.stream)
        for y, target in zip(outputs, targets):
            if target is not y:
                y.narrow(0, 0, rows).copy_(target)
    return ordered.work, _keeping(inputs, outputs)


def start_symm_reduce(
    exchange: SymmExchange,
    group: SymmGroup,
    inputs: Sequence[torch.Tensor],
    wire: torch.dtype,
    outputs: Sequence[torch.Tensor],
    op: str,
    acc_reduce: bool,
    num_sms: int | None,
    is_async: bool,
) -> tuple[Any, Callable[[], None]]:
    """The whole reduce, by "sum" or "avg", into ``outputs``; to be used like ``start_symm_cast``."""
    layout = exchange.layout
    with group.ordered(is_async) as ordered:
        sources = [dense_rows(x.to(wire)) for x in inputs]
        base = [_packed(y) for y in outputs] if acc_reduce else None
        is_average = op == "avg"  # divided before it is rounded
        if is_average:
            targets = [_empty(layout.input_rows, y, torch.float32) for y in outputs]
        elif base is not None:
            targets = base
        else:
            targets = [y if _is_packed(y) else _empty(layout.input_rows, y, y.dtype) for y in outputs]
        exchange.reduce(group, sources, base, targets, num_sms, ordered.stream)
        for y, total in zip(outputs, targets):
            if is_average:
                terms = (layout.contributions(y.device) + int(acc_reduce)).clamp(min=1).to(torch.float32)
                total /= terms.view(-1, *[1] * (y.ndim - 1))
            if total is not y:
                y.copy_(total)
    return ordered.work, _keeping(inputs, outputs)


def _keeping(*tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Holds the tensors until the wait: the side stream may use them that long."""
    held = list(tensors)
    return held.clear


def _buffer_with_room(group: SymmGroup, name: str, rows: int, sizes: Sequence[int]) -> tuple[SymmBuffer, list[int]]:
    """The buffer, and where each tensor begins in it."""
    data_at, at = [], group.control_bytes
    for size in sizes:
        data_at.append(at)
        at += rows * size
    return group.buffer(name, max(at - group.control_bytes, 1)), data_at


def _at_most(ctas: int, useful: float) -> int:
    return max(1, min(ctas, math.ceil(useful)))


# -- rows of tensors ------------------------------------------------------------------------------------------
def _row_bytes(x: torch.Tensor) -> int:
    return math.prod(x.shape[1:]) * x.element_size()


def _stride(x: torch.Tensor) -> int:
    """Bytes from row to row; of no row or one, torch may say anything."""
    return x.stride(0) * x.element_size() if x.shape[0] > 1 else _row_bytes(x)


def _is_dense(x: torch.Tensor) -> bool:
    """Are rows dense, at addresses that bulk copies take?"""
    shape = tuple(x.shape[1:])
    return x.stride()[1:] == dense_strides(shape) and not x.data_ptr() % 16 and not _stride(x) % 16 and _stride(x) > 0


def _is_packed(x: torch.Tensor) -> bool:
    return _is_dense(x) and _stride(x) == _row_bytes(x)


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy whose rows are dense and aligned."""
    return x if _is_dense(x) else x.clone(memory_format=torch.contiguous_format)


def _packed(x: torch.Tensor) -> torch.Tensor:
    return x if _is_packed(x) else x.clone(memory_format=torch.contiguous_format)


def _empty(rows: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return like.new_empty((rows, *like.shape[1:]), dtype=dtype)
