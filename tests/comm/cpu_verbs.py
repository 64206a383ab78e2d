# SPDX-License-Identifier: Apache-2.0
"""The verbs of an exchange over nodes on a CPU: the kernels of ``csrc/comm``, compiled for it, over threads that
reorder puts. Memory is in files that all ranks map, so ranks may be threads or processes."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import random
import re
import time
from collections import Counter
from pathlib import Path

import torch

from magi_attention.comm.collectives.reduce import reduce_arrived
from magi_attention.comm.exchange.verbs import FACTORY
from magi_attention.testing.libraries import compiled_or_skip, csrc_or_skip

SOURCE = Path(__file__).with_name("nvshmem_on_cpu.cpp")
HEADERS = (
    *("comm/exchange/verbs.cuh", "comm/networks/nvshmem/verbs.cuh"),
    *("comm/symm/accumulate.cuh", "comm/symm/signal.cuh"),
)
KERNELS = tuple(f"comm/exchange/{name}.cu" for name in ("put", "relay", "wait", "sum", "end"))
NETWORKS = itertools.count()  # the library knows them by number


def for_the_cpu(text: str) -> str:
    """Without launchers and headers of CUDA and NVSHMEM: what those do is in ``nvshmem_on_cpu.cpp``."""
    text = re.split(r'extern "C"', text)[0]
    return re.sub(
        r'#include [<"]([^>"]+)[>"]\n', lambda m: m[0] if m[1] in HEADERS or m[1].startswith("magi/") else "", text
    )


def compiled(folder: Path) -> str:
    """Path of the library; the first process that asks for it compiles."""
    csrc, folder = csrc_or_skip(), folder / "exchange"

    def write_sources() -> None:
        for name in (*KERNELS, *HEADERS):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(for_the_cpu((csrc / name).read_text()))

    flags = ("-O1", "-std=c++20", "-pthread", "-Wno-unknown-pragmas", "-Wno-unused-function")
    return compiled_or_skip(folder, [SOURCE], [folder, csrc / "include"], *flags, prepare=write_sources)._name


def cast(exchange, inputs) -> list[torch.Tensor]:
    """A cast, waited for."""
    work, finish = exchange.start_cast(inputs)
    work.wait()
    return finish()


def reduce(exchange, partials, outputs, wire: torch.dtype) -> None:
    """A reduce by "sum", added to ``outputs``."""
    work, arrived = exchange.start_reduce(partials, [wire] * len(partials))
    work.wait()
    reduce_arrived(arrived(), outputs, None, "sum", acc_reduce=True)


class CpuVerbs:
    """Launches that are over when they return. ``late`` of them begin late; ``before`` is told of each, and may end the
    rank. The puts of a relay begin ``puts_late_ms`` later than its waits. ``held`` counts bytes of the memory that is
    out, ``calls`` launches by their names."""

    name = "a network of threads"
    network: int | None = None

    def __init__(self, library, folder: Path, transport, seed: int) -> None:
        self._library, self._folder, self._transport = library, folder, transport.reference()
        self.rank, self.world = transport.rank, transport.size
        self._seed, self._random = seed, random.Random(64 * seed + self.rank)
        self._network, self._generation, self._maps = -1, 0, []
        self.late, self.slow_us, self.held, self.has_left, self.calls = 0.02, 500, 0, False, Counter()
        self.puts_late_ms = 0
        self.before = lambda name: None

    def alloc(self, num_bytes: int) -> torch.Tensor:
        assert self.held == 0, "what was there before goes first"
        self._generation += 1
        files = [self._folder / f"arena-{self._generation}-{rank}" for rank in range(self.world)]
        with open(files[self.rank], "wb") as file:
            file.truncate(num_bytes)
        self._transport().barrier()
        self._maps = []
        for path in files:
            with open(path, "r+b") as file:
                self._maps.append(mmap.mmap(file.fileno(), num_bytes))
        parts = [torch.frombuffer(part, dtype=torch.uint8) for part in self._maps]
        arenas = (ctypes.c_void_p * self.world)(*(part.data_ptr() for part in parts))
        self._network, self.held = next(NETWORKS), num_bytes
        self._library.network(self._network, self.world, arenas, self._seed, self.slow_us)
        return parts[self.rank]

    def free(self, memory: torch.Tensor) -> None:
        assert memory.numel() == self.held
        self._library.network_ends(self._network)
        self.held = 0

    def leave(self) -> None:
        self.has_left = True

    def _launch(self, name: str, params, *more: int) -> None:
        self.calls[name] += 1
        self.before(name)
        if self._random.random() < self.late:
            time.sleep(0.02 * self._random.random())
        getattr(self._library, name)(ctypes.byref(params), self._network, self.rank, *more)

    def put(self, params) -> None:
        self._launch("put", params)

    def relay(self, params) -> None:
        self._launch("relay", params, self.puts_late_ms)

    def wait(self, params) -> None:
        self._launch("wait", params)

    def sum(self, params) -> None:
        self._launch("sum", params)

    def end(self, params) -> None:
        self._launch("end", params)


class CpuFactory:
    """Verbs of one group, whose files lie in ``folder``. ``lack`` is what this rank says that it lacks."""

    name = CpuVerbs.name

    def __init__(self, path: str, folder: Path, seed: int = 0, lack: str | None = None) -> None:
        self._library, self._folder, self._seed, self.lack = ctypes.CDLL(path), folder, seed, lack
        self._joins = itertools.count()
        self.verbs: CpuVerbs | None = None
        self.error: Exception | None = None
        self.version = "1.0"

    def why_not(self, transport, device: torch.device) -> str | None:
        return self.lack

    def join(self, transport, device: torch.device) -> CpuVerbs:
        if self.error is not None:
            raise self.error
        folder = self._folder / f"joined-{next(self._joins)}"
        folder.mkdir(exist_ok=True)  # the first rank that is here
        self.verbs = CpuVerbs(self._library, folder, transport, self._seed)
        return self.verbs

    def attach(self, transport) -> CpuFactory:
        """Has the group of the transport use these verbs."""
        transport.kept[FACTORY] = self
        return self
