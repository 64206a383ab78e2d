# SPDX-License-Identifier: Apache-2.0
"""The kernels that move and add rows over NVLink on the CPU, and ranks in threads that share buffers."""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from magi_attention.comm.symm.buffers import SymmBuffer, SymmGroup
from magi_attention.comm.transport.streams import OrderedStream
from magi_attention.testing.libraries import compiled_or_skip, csrc_or_skip

sys.path.append(str(Path(__file__).parents[1] / "kernels" / "harness"))
from hopper_library import FLAGS, STAND_INS  # noqa: E402

SOURCE = Path(__file__).with_name("symm_on_cpu.cpp")
KERNELS = ("put", "unpack", "recv_reduce", "reduce")
REPLACED = {  # PTX in a kernel, and shared memory, which is magi::raw on the CPU
    r'asm volatile\("cp\.async\.bulk\.wait_group %0;" ::"n"\((\w+)\).*?;': r"hopper::wait_for_stores<\1, false>();",
    r"extern __shared__ (?:__align__\(1024\) )?(\w+) (\w+)\[\];": r"\1* \2 = reinterpret_cast<\1*>(magi::raw);",
}


def compiled(folder: Path) -> ctypes.CDLL:
    csrc, folder = csrc_or_skip(), folder / "symm_rows"

    def write_sources() -> None:
        made = folder / "comm" / "symm"
        made.mkdir(parents=True, exist_ok=True)
        for name in KERNELS:
            text = (csrc / "comm" / "symm" / f"{name}.cu").read_text().split('extern "C"')[0]
            for pattern, on_cpu in REPLACED.items():
                text = re.sub(pattern, on_cpu, text)
            assert "asm" not in text
            (made / f"{name}.cu").write_text(text)

    found = compiled_or_skip(
        folder, [SOURCE], [folder, STAND_INS, csrc, csrc / "include"], *FLAGS, prepare=write_sources
    )
    found.control_bytes.restype = ctypes.c_int64
    for name in (*KERNELS, "release", "rank_barrier"):
        run = getattr(found, name)
        run.restype, run.errcheck = ctypes.c_char_p, raise_error
    return found


def raise_error(error: bytes | None, *_: object) -> None:
    assert error is None, error.decode()


class Launches:
    """In place of the library of launches. Kernels of one rank run at a time, as they share what stands for a device;
    so all ranks meet behind each launch, and no kernel has to wait for another one."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library, self._lock, self.rank = library, threading.Lock(), threading.local()
        for name in ("put", "unpack", "recv_reduce"):
            setattr(self, f"magi_symm_{name}", lambda params, name=name: self._launch(name, params))

    def _launch(self, name: str, params: bytes) -> int:
        with self._lock:
            getattr(self._library, name)(params)
        self.rank.transport.barrier()
        return 0

    def magi_symm_control_bytes(self, world: int) -> int:
        return self._library.control_bytes(world)


class CpuSymmGroup(SymmGroup):
    """The buffers of one rank; ``shared`` is a dict that all ranks are given."""

    is_capturing = False

    def __init__(self, transport, launches: Launches, shared: dict) -> None:
        self._transport, self._shared, launches.rank.transport = transport, shared, transport
        self.rank, self.world, self.device, self.timeout_ms = (
            transport.rank,
            transport.size,
            torch.device("cpu"),
            20_000,
        )
        self.control_bytes = launches.magi_symm_control_bytes(self.world)
        self._buffers, self._failed_peer, self.stages = {}, torch.zeros(1, dtype=torch.int32), []
        self.failed_peer_address = self._failed_peer.data_ptr()

    def check(self, stage: str) -> None:
        assert not self._failed_peer.any(), "a kernel waited in vain"
        self.stages.append(stage)

    def meet(self, stage: str) -> None:
        self._transport.barrier()

    @contextmanager
    def ordered(self, is_beside: bool) -> Iterator[OrderedStream]:
        yield OrderedStream(0)

    def _make(self, name: str, data_bytes: int) -> SymmBuffer:
        memory = torch.full((self.control_bytes + data_bytes,), 0xFF, dtype=torch.uint8)  # NaN in floats
        memory[: self.control_bytes] = 0
        self._shared[name, self.rank] = memory
        self._transport.barrier()
        addresses = torch.tensor([self._shared[name, rank].data_ptr() for rank in range(self.world)])
        self._transport.barrier()
        return SymmBuffer(memory, None, addresses, data_bytes)
