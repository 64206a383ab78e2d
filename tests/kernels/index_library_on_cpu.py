# SPDX-License-Identifier: Apache-2.0
"""Entry points of index attention compiled for the CPU, as the library that ``IndexFfa`` calls."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext

import pytest
import torch
from hopper_library import aligned

from magi_attention.kernels.index_attn import ffa
from magi_attention.native import abi
from magi_attention.native.index import IndexLibrary
from magi_attention.native.index_abi import FUNCTIONS


class IndexLibraryOnCpu(IndexLibrary):
    """Each call runs its kernels and says what they did wrong. ``questions``: functions that give an error or None."""

    def __init__(self, kernels: ctypes.CDLL, entries: tuple[str, ...], questions: tuple[str, ...]) -> None:
        self._library = kernels
        for name in entries:
            entry = getattr(kernels, name)
            entry.restype, entry.argtypes = FUNCTIONS[name]
        for name in ("synchronize", "last_error", *questions):
            getattr(kernels, name).restype = ctypes.c_char_p

    def use(self, multiprocessors: int, seed: int) -> None:
        self._library.use_device(multiprocessors, ctypes.c_uint64(seed))

    def ask(self, name: str, *arguments: object) -> None:
        error = getattr(self._library, name)(*arguments)
        assert error is None, error.decode()

    def _check(self, status: int, what: str) -> None:
        assert status == abi.OK, self._library.last_error().decode()
        self.ask("synchronize")


def run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """``IndexFfa`` gets memory of the CPU, not clean, and no stream."""
    monkeypatch.setattr(ffa, "_stream", lambda x: 0)
    monkeypatch.setattr(ffa, "_empty", lambda shape, dtype, device: aligned(torch.full(shape, 127, dtype=dtype)))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
