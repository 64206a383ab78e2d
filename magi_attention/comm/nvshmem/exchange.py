# SPDX-License-Identifier: Apache-2.0
"""One group cast over nodes, and its reduce, by one-sided transfers: ``docs/design/two_levels.md``.

A cast is one launch of puts, forwards among them, and a wait; a reduce is puts, sums of the node that go on to the
owner, a wait, and the sum of the owner. Epochs are counted in device memory, so no argument changes between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from magi_attention.comm.collectives.wire import RowPack
from magi_attention.comm.nvshmem.tables import Arena, ExchangeTables, SumTable, exchange_tables
from magi_attention.common.two_level.transfers import Region, TransferPlan
from magi_attention.errors import ContractError, PeerFailureError
from magi_attention.native import abi
from magi_attention.native.nvshmem import Nvshmem


class _Address:
    """Device memory at an address, as torch takes it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        data = (address, False)  # may be written
        self.__cuda_array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": data, "version": 3}


def symmetric_memory(library: Nvshmem, num_bytes: int) -> torch.Tensor:
    """Zeroed memory at the same offset on all ranks that joined, (num_bytes,) uint8; collective.

    ``library.free(memory.data_ptr())`` gives it back, collectively, when nothing uses it any more.
    """
    address = library.alloc(num_bytes)
    memory = torch.as_tensor(_Address(address, num_bytes), device="cuda")
    if memory.data_ptr() != address:
        raise ContractError(
            f"Symmetric memory lies on another device than cuda:{torch.cuda.current_device()}; choose the device by "
            "torch.cuda.set_device before joining."
        )
    return memory


_CODES = {torch.bfloat16: abi.BF16, torch.float16: abi.FP16, torch.float32: abi.FP32}
NUM_CTAS = 16


class Verbs(Protocol):
    """What the exchange needs of a transport; ``Nvshmem`` has it. Each is a launch on the stream of its parameters."""

    def put(self, params: abi.CommPutParams) -> None: ...

    def wait(self, params: abi.CommWaitParams) -> None: ...

    def sum(self, params: abi.CommSumParams) -> None: ...

    def end(self, params: abi.CommEndParams) -> None: ...


class NodeExchange:
    """The cast and the reduce of ``plan`` for one rank. Calls of all ranks come in the same order.

    Args:
        verbs: launches transfers.
        plan: of all ranks. Blocks of about 128 rows keep all CTAs at work.
        rank: this one.
        rows, grads: how rows of the cast and of the reduce lie on the wire; ``grads`` of one dtype, bf16, fp16 or
            float32, with a multiple of 8 values in a row.
        allocate: as ``symmetric_memory``, of the library.
        stream: the current stream, as a number.
        timeout_ms: how long a wait lasts; results are void after one that lasted longer, and ``check`` raises.
    """

    def __init__(
        self,
        verbs: Verbs,
        plan: TransferPlan,
        rank: int,
        rows: RowPack,
        grads: RowPack,
        allocate: Callable[[int], torch.Tensor],
        stream: Callable[[], int],
        timeout_ms: int = 600_000,
    ) -> None:
        if grads.dtype not in _CODES or grads.width % 8:
            raise ContractError(
                f"Rows of {grads.width} values of {grads.dtype} cannot be added; they need a multiple of 8 values, all "
                "of bf16, fp16 or float32."
            )
        sizes = rows.width * rows.dtype.itemsize, grads.width * grads.dtype.itemsize
        self.rank, self._verbs, self._stream, self._packs = rank, verbs, stream, (rows, grads)
        arena = Arena.of(plan, *sizes)
        self.memory = allocate(arena.num_bytes)
        self._tables = tables = exchange_tables(plan, rank, arena, grads.dtype.itemsize)
        device = self.memory.device
        self._held: list[torch.Tensor] = []  # tables that launches point to
        self._failed_peer = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._sums = torch.empty(tables.input_rows, grads.width, dtype=torch.float32, device=device)
        self._timeout_ms = timeout_ms
        self._prepare(tables)

    def cast(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rows (input rows, ...) as the plan's specs have them, to (output rows, ...) in order of the output."""
        rows = self._packs[0]
        for column, x in zip(rows.columns(self._view("input", self._tables.input_rows, rows)), inputs, strict=True):
            column.copy_(x)
        self._launch(self._verbs.put, self._cast_put)
        self._launch(self._verbs.wait, self._cast_wait)
        arrived = rows.columns(self._view(Region.OUT.name, self._tables.output_rows, rows))
        outputs = [column.clone(memory_format=torch.contiguous_format) for column in arrived]
        self._launch(self._verbs.end, self._cast_end)
        return outputs

    def reduce(self, partials: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Adds to ``outputs`` (input rows, ...) what all ranks have for them in ``partials`` (output rows, ...)."""
        grads = self._packs[1]
        columns = grads.columns(self._view("partials", self._tables.output_rows, grads))
        for column, x in zip(columns, partials, strict=True):
            column.copy_(x)
        self._launch(self._verbs.put, self._reduce_put)
        self._launch(self._verbs.sum, self._node_sum)
        self._launch(self._verbs.wait, self._reduce_wait)
        self._launch(self._verbs.sum, self._owner_sum)
        for (begin, end), y in zip(grads.spans, outputs, strict=True):
            y.copy_(y.float() + self._sums[:, begin:end].view(y.shape))
        self._launch(self._verbs.end, self._reduce_end)

    def check(self) -> None:
        """Raises ``PeerFailureError`` if a wait was in vain; it does not wait for the stream."""
        if found := int(self._failed_peer[0]):
            raise PeerFailureError(
                f"Rank {found - 1} did not deliver within {self._timeout_ms / 1000:g} s to rank {self.rank}; results "
                "since then are void. Look at that rank's log, and whether it waits for another one itself."
            )

    # -- launches, prepared -----------------------------------------------------------------------------------
    def _prepare(self, tables: ExchangeTables) -> None:
        arena, code = tables.arena, _CODES[self._packs[1].dtype]
        cast, reduce = self._epoch(arena, "cast epoch"), self._epoch(arena, "reduce epoch")
        self._cast_put = self._put_params(cast, tables.cast_puts, tables.cast_credits)
        self._cast_wait = self._wait_params(cast, tables.cast_waits)
        self._cast_end = self._end_params(cast, tables.cast_end, arena.credit(False, self.rank))
        self._reduce_put = self._put_params(reduce, tables.reduce_puts, tables.reduce_credits)
        self._reduce_wait = self._wait_params(reduce, tables.reduce_waits)
        self._reduce_end = self._end_params(reduce, tables.reduce_end, arena.credit(True, self.rank))
        self._node_sum = self._sum_params(reduce, tables.node_sums, code, code, self.memory)
        self._owner_sum = self._sum_params(reduce, tables.owner_sums, code, abi.FP32, self._sums)

    def _epoch(self, arena: Arena, name: str) -> abi.CommEpoch:
        places = arena.places
        failed = self._failed_peer.data_ptr()
        return abi.CommEpoch(
            self.memory.data_ptr(), places[name], places["signals"], failed, self._timeout_ms, 0
        )

    def _put_params(self, epoch: abi.CommEpoch, puts: np.ndarray, credits: np.ndarray) -> abi.CommPutParams:
        counts = len(puts), len(credits), NUM_CTAS
        return abi.CommPutParams(abi.ABI_VERSION, *counts, epoch, self._upload(puts), self._upload(credits), None)

    def _wait_params(self, epoch: abi.CommEpoch, waits: np.ndarray) -> abi.CommWaitParams:
        return abi.CommWaitParams(abi.ABI_VERSION, len(waits), epoch, self._upload(waits), None)

    def _end_params(self, epoch: abi.CommEpoch, ranks: np.ndarray, signal: int) -> abi.CommEndParams:
        return abi.CommEndParams(abi.ABI_VERSION, len(ranks), epoch, self._upload(ranks), signal, None)

    def _sum_params(
        self, epoch: abi.CommEpoch, table: SumTable, wire: int, out: int, result: torch.Tensor
    ) -> abi.CommSumParams:
        counts = len(table.blocks), NUM_CTAS, self._packs[1].width, wire, out
        lists = [self._upload(rows) for rows in table]
        return abi.CommSumParams(abi.ABI_VERSION, *counts, epoch, *lists, result.data_ptr(), None)

    def _upload(self, table: np.ndarray) -> int:
        self._held.append(torch.from_numpy(np.ascontiguousarray(table)).to(self.memory.device))
        return self._held[-1].data_ptr()

    def _launch(self, verb: Callable[[Any], None], params: Any) -> None:
        params.stream = self._stream()
        verb(params)

    def _view(self, name: str, rows: int, pack: RowPack) -> torch.Tensor:
        """Rows of a region, (rows, width)."""
        at, size = self._tables.arena.places[name], rows * pack.width * pack.dtype.itemsize
        return self.memory[at : at + size].view(pack.dtype).view(rows, pack.width)
