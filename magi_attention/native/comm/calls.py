# SPDX-License-Identifier: Apache-2.0
"""The calls of an exchange over nodes: one launch each, on the stream of its parameters. See ``comm.h``."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from magi_attention.native import loader
from magi_attention.native.comm import abi as comm_abi


class ExchangeCalls:
    """Calls of a loaded library that has the kernels of ``csrc/comm/exchange``, whatever network they use."""

    _library: ctypes.CDLL

    def _load(self, where: Path, component: str, folder: Path | None) -> list[tuple[int, ...]]:
        """Loads the library of ``component`` beside its other half at ``where``.

        Returns the version of the other half that our code was compiled with, and the version that runs.
        """
        # Global, because our half looks functions of the other up.
        ctypes.CDLL(str(where), mode=os.RTLD_GLOBAL | os.RTLD_NOW)
        self._library = loader.load(component, folder)
        halves = [(ctypes.c_int32 * 3)() for _ in range(2)]
        getattr(self._library, f"magi_{component}_versions")(*halves)
        return [tuple(half) for half in halves]

    def put(self, params: comm_abi.CommPutParams) -> None:
        """Puts rows of the arena to other ranks, each after its wait."""
        self._check(self._library.magi_comm_put(params), "Putting rows")

    def relay(self, params: comm_abi.CommRelayParams) -> None:
        """The same while the next kernel of the stream runs, which gets a signal of what has arrived."""
        self._check(self._library.magi_comm_relay(params), "Putting rows beside attention")

    def wait(self, params: comm_abi.CommWaitParams) -> None:
        """Holds the stream until signals have counted this epoch."""
        self._check(self._library.magi_comm_wait(params), "Waiting for rows")

    def sum(self, params: comm_abi.CommSumParams) -> None:
        """Adds rows in a fixed order, and puts blocks that are for other ranks."""
        self._check(self._library.magi_comm_sum(params), "Adding rows")

    def end(self, params: comm_abi.CommEndParams) -> None:
        """Ends an epoch of the arena."""
        self._check(self._library.magi_comm_end(params), "Ending an epoch")

    def _check(self, status: int, what: str) -> None:
        loader.check(self._library, status, what)
