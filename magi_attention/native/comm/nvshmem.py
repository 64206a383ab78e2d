# SPDX-License-Identifier: Apache-2.0
"""One-sided transfers over NVSHMEM: joins the processes of a group, allocates symmetric memory, puts with a signal.

The library holds NVSHMEM's device half; the host half is ``libnvshmem_host.so.3`` of the installed package. That is
loaded by its full path, never by a search, and its version is compared: two halves that do not go together hang rather
than fail. Nothing here imports torch; addresses and streams are integers.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Protocol

from magi_attention.errors import UnsupportedError
from magi_attention.native import loader
from magi_attention.native.comm.calls import ExchangeCalls
from magi_attention.native.toolchain import COMM, find_nvshmem

_HOST = "libnvshmem_host.so.3"


class Store(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes: ...


def host_library() -> Path:
    """The host half out of its package.

    Raises:
        UnsupportedError: it is not installed.
    """
    folder = find_nvshmem()
    path = folder / "lib" / _HOST if folder else None
    if path is None or not path.is_file():
        raise UnsupportedError(
            f"NVSHMEM's {_HOST} is not installed; run `pip install nvidia-nvshmem-cu13`, or the package of your CUDA "
            "version."
        )
    return path


def why_unfit(built: tuple[int, int, int], loaded: tuple[int, int, int], where: Path, cuda: str = "13") -> str | None:
    """Why the two halves do not go together, as a sentence; None if they do.

    A host half serves device code of its own major version that is not newer.
    """
    if built[0] == loaded[0] and loaded >= built:
        return None
    have, need = ".".join(map(str, loaded)), ".".join(map(str, built))
    return (
        f"NVSHMEM's host half {where} is {have}, and libmagi_comm.so was compiled with {need}; run "
        f"`pip install 'nvidia-nvshmem-cu{cuda}>={need},<{built[0] + 1}'`."
    )


class Nvshmem(ExchangeCalls):
    """The loaded library. One group of processes at a time, which is NVSHMEM's own limit."""

    def __init__(self, folder: Path | None = None) -> None:
        """Loads both halves; ``folder`` holds ``libmagi_comm.so``, by default that of this installation.

        Raises:
            UnsupportedError: a half is missing or they do not go together; the text says what to do.
        """
        where = host_library()
        self.built, self.loaded = self._load(where, COMM, folder)
        cuda = loader.build_info(self._library).compiler.removeprefix("nvcc ").partition(".")[0]
        if reason := why_unfit(self.built, self.loaded, where, cuda):
            raise UnsupportedError(reason)

    def join(self, store: Store, rank: int, world: int, key: str = "magi_comm_id") -> None:
        """Joins ``world`` processes, each on its current device; rank 0 passes the id by the store. Collective."""
        size = self._library.magi_comm_unique_id_bytes()
        if rank == 0:
            made = ctypes.create_string_buffer(size)
            self._check(self._library.magi_comm_unique_id(made), "Making an id")
            store.set(key, made.raw)
        shared = ctypes.create_string_buffer(bytes(store.get(key)), size)
        self._check(self._library.magi_comm_join(shared, rank, world), "Joining")

    @property
    def has_joined(self) -> bool:
        """Is this process in a group of NVSHMEM, whoever made it?"""
        return bool(self._library.magi_comm_has_joined())

    def alloc(self, num_bytes: int) -> int:
        """Address of zeroed symmetric memory; collective, with equal ``num_bytes`` everywhere."""
        address = ctypes.c_void_p()
        self._check(self._library.magi_comm_alloc(num_bytes, ctypes.byref(address)), "Allocating")
        return address.value

    def free(self, address: int) -> None:
        """Gives memory of ``alloc`` back; collective."""
        self._check(self._library.magi_comm_free(address), "Giving memory back")

    def put_signal(
        self, target: int, source: int, num_bytes: int, signal: int, value: int, peer: int, stream: int
    ) -> None:
        """On the stream: copies to ``target`` at rank ``peer``, then sets ``signal`` there to ``value``."""
        status = self._library.magi_comm_put_signal(target, source, num_bytes, signal, value, peer, stream)
        self._check(status, "Putting")

    def wait_signal(self, signal: int, value: int, stream: int) -> None:
        """Holds the stream until this process's ``signal`` is at least ``value``."""
        self._check(self._library.magi_comm_wait_signal(signal, value, stream), "Waiting for a signal")

    def leave(self) -> None:
        """Leaves the group; collective, and after the last transfer of every process."""
        self._check(self._library.magi_comm_leave(), "Leaving")
