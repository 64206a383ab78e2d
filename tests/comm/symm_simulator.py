# SPDX-License-Identifier: Apache-2.0
"""The launches of buffers on host memory: the same parameters, read as the kernels read them, for ranks in threads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from magi_attention.comm.transport.streams import OrderedStream

CONTROL_BYTES = 1024


class SimulatedBox:
    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory


class SimulatedBoxes:
    """In place of ``SymmGroup`` on one rank; ``shared`` is a dict that all ranks are given."""

    control_bytes = CONTROL_BYTES
    is_capturing = False
    device = torch.device("cpu")

    def __init__(self, transport, shared: dict) -> None:
        self._transport, self._shared, self._buffers = transport, shared, {}

    def buffer(self, name: str, data_bytes: int) -> SimulatedBox:
        known = self._buffers.get(name)
        if known is None or known.memory.numel() < CONTROL_BYTES + data_bytes:
            known = SimulatedBox(torch.full((CONTROL_BYTES + data_bytes,), 0xFF, dtype=torch.uint8))  # NaN in floats
            self._buffers[name] = self._shared[name, self._transport.rank] = known
            known.name = name
            self._transport.barrier()
        return known

    def meet(self, stage: str) -> None:
        self._transport.barrier()

    def holds(self, buffer: SimulatedBox) -> bool:
        return any(buffer is known for known in self._buffers.values())

    @contextmanager
    def ordered(self, is_beside: bool) -> Iterator[OrderedStream]:
        yield OrderedStream(0)

    def put(
        self, buffer, *, num_tensors, num_transfers, num_ctas, transfers, signals, source_stride, data_at, row_bytes
    ):
        assert num_ctas >= 1 and all(n % 16 == 0 for n in (*source_stride, *data_at, *row_bytes))
        table = ints(transfers, num_transfers)

        def run(sources, stream) -> None:
            assert len(sources) == num_tensors and all(at % 16 == 0 for at in sources)
            src_rows = ints(signals, int(table[:, 0].max(initial=-1)) + 1)
            for own, here, there, count in table.tolist():
                target = self._shared[buffer.name, int(src_rows[own, 0])].memory
                for t, source in enumerate(sources):
                    for i in range(count):
                        begin = data_at[t] + (there + i) * row_bytes[t]
                        assert CONTROL_BYTES <= begin and begin + row_bytes[t] <= target.numel()
                        to = target.data_ptr() + begin
                        ctypes.memmove(to, source + (here + i) * source_stride[t], row_bytes[t])
            self._transport.barrier()

        return run

    def unpack(self, buffer, *, num_tensors, num_transfers, num_ctas, transfers, data_at, row_bytes, out_stride):
        table = ints(transfers, num_transfers)

        def run(out, stream) -> None:
            for _, here, there, count in table.tolist():
                for t in range(num_tensors):
                    for i in range(count):
                        source = buffer.memory.data_ptr() + data_at[t] + (here + i) * row_bytes[t]
                        ctypes.memmove(out[t] + (there + i) * out_stride[t], source, row_bytes[t])
            self._transport.barrier()

        return run

    def recv_reduce(self, buffer, wire, out_dtype, base_dtype, *, rows, num_tensors, num_ctas, row_values, **fields):
        src_rows, needed_signals, data_at, own_stride = (
            fields[n] for n in ("src_rows", "needed_signals", "data_at", "own_stride")
        )
        world, rank = self._transport.size, self._transport.rank
        assert num_ctas >= 1 and all(n % 16 == 0 for n in (*data_at, *own_stride))
        table = ints(src_rows, world, max(rows, 1))
        assert (
            not rows or ints(needed_signals, -(-rows // 16), world).shape[1] == ints(fields["signals"], 1, world).size
        )

        def run(own, base, out, stream) -> None:
            for t in range(num_tensors if rows else 0):
                values = row_values[t]
                total = torch.zeros(rows, values)
                if base[t]:
                    total = floats(base[t], rows * values, base_dtype).view(rows, values).float()
                for peer in range(world):
                    for row in np.flatnonzero(table[peer] >= 0):
                        place = int(table[peer, row])
                        at = buffer.memory.data_ptr() + data_at[t] + place * values * wire.itemsize
                        if peer == rank:
                            at = own[t] + place * own_stride[t]
                        total[row] += floats(at, values, wire).float()
                floats(out[t], rows * values, out_dtype).copy_(total.view(-1).to(out_dtype))
            self._transport.barrier()

        return run


def ints(address: int, rows: int, columns: int = 4) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_int32 * (rows * columns)).from_address(address)).reshape(rows, columns)


def floats(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.from_numpy(np.ctypeslib.as_array(memory)).view(dtype)
