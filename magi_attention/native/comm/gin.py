# SPDX-License-Identifier: Apache-2.0
"""One-sided transfers over NCCL's device API: a communicator of torch's with GPU-initiated networking (GIN).

The library's device code must be of the minor version of the NCCL that runs, which is the one that torch has loaded.
That one is found among the files that the process has mapped, never by a search. No GPU has run this. Nothing here
imports torch.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

from magi_attention.errors import UnsupportedError
from magi_attention.native.comm.calls import ExchangeCalls
from magi_attention.native.toolchain import GIN

_NCCL = re.compile(r"\s(/\S*/libnccl\.so\.\d[^\s/]*)$", re.MULTILINE)


def loaded_nccl(maps: str | None = None) -> Path:
    """The NCCL of this process, out of ``/proc/self/maps`` or the text given.

    Raises:
        UnsupportedError: there is none, or there are two.
    """
    if maps is None:
        file = Path("/proc/self/maps")
        maps = file.read_text() if file.exists() else ""
    found = sorted(set(_NCCL.findall(maps)))
    if len(found) == 1:
        return Path(found[0])
    if found:
        raise UnsupportedError(f"Two NCCLs are loaded, {' and '.join(found)}; unset LD_LIBRARY_PATH or LD_PRELOAD.")
    raise UnsupportedError("No libnccl.so.2 is loaded; install a torch with CUDA, which brings NCCL.")


def why_unfit(built: tuple[int, ...], loaded: tuple[int, ...], where: Path) -> str | None:
    """Why device code compiled with one NCCL does not go with another, as a sentence; None if it does."""
    if built[:2] == loaded[:2] and built[2] <= loaded[2]:
        return None
    have, need = ".".join(map(str, loaded)), ".".join(map(str, built))
    return (
        f"The NCCL that runs, {where}, is {have}, and libmagi_gin.so was compiled with {need}; run `python -m "
        "magi_attention.native.build --only gin` beside that NCCL."
    )


class Gin(ExchangeCalls):
    """The loaded library, and one group of ranks in it after ``join``."""

    def __init__(self, folder: Path | None = None) -> None:
        """``folder`` holds ``libmagi_gin.so``, by default that of this installation.

        Raises:
            UnsupportedError: a half is missing or they do not go together; the text says what to do.
        """
        where = loaded_nccl()
        self.built, self.loaded = self._load(where, GIN, folder)
        if reason := why_unfit(self.built, self.loaded, where):
            raise UnsupportedError(reason)
        self._group = ctypes.c_void_p()
        self.network: int | None = None

    def join(self, nccl_comm: int) -> None:
        """Joins the ranks of an ``ncclComm_t``; collective."""
        self._check(self._library.magi_gin_join(nccl_comm, ctypes.byref(self._group)), "Joining")

    def alloc(self, num_bytes: int) -> int:
        """Address of zeroed memory that all ranks may write, one at a time; collective, with equal ``num_bytes``."""
        address, network = ctypes.c_void_p(), ctypes.c_void_p()
        status = self._library.magi_gin_alloc(self._group, num_bytes, ctypes.byref(address), ctypes.byref(network))
        self._check(status, "Allocating")
        self.network = network.value
        assert address.value is not None
        return address.value

    def free(self) -> None:
        """Gives the memory back; collective."""
        self._check(self._library.magi_gin_free(self._group), "Giving memory back")
        self.network = None

    def leave(self) -> None:
        """Collective, and after the last transfer of every rank."""
        self._check(self._library.magi_gin_leave(self._group), "Leaving")
