# SPDX-License-Identifier: Apache-2.0
"""Kernels for Hopper compiled for the CPU, see emulator/README.md."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from ffa_simulator import CpuRuntime

from magi_attention.kernels.dropout import Dropout, DropoutMask
from magi_attention.kernels.ffa import backward as ffa_backward
from magi_attention.kernels.ffa import forward as ffa_forward
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.ffa.plans import Kept, KeptOrder
from magi_attention.native.ffa import FfaLibrary
from magi_attention.testing import masks
from magi_attention.testing.libraries import compiled_or_skip, csrc_or_skip

STAND_INS = Path(__file__).parents[1] / "emulator"
# Libraries that are loaded together share no variables. Some warnings are about what nvcc takes.
FLAGS = (
    *("-O1", "-ftree-vectorize", "-pthread", "-fno-strict-aliasing", "-fno-extern-tls-init", "-fno-gnu-unique"),
    *("-Wno-unknown-pragmas", "-Wno-psabi", "-Wno-parentheses", "-Wno-sign-compare"),
)


def hopper_library(folder: Path, source: Path) -> ctypes.CDLL:
    """``source`` with the kernels of ``csrc`` that it includes; skips the test where there is no g++ or no csrc."""
    csrc = csrc_or_skip()
    return compiled_or_skip(folder, [source], [STAND_INS, csrc, csrc / "include"], *FLAGS)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy at a multiple of 128 bytes."""
    return memory_like(x).copy_(x)


def at(x: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def memory_like(like: torch.Tensor, value: int = 0xFF) -> torch.Tensor:
    """Contiguous, at a multiple of 128 bytes as on a GPU, and NaN in every dtype."""
    size = like.numel() * like.element_size()
    raw = torch.full((size + 128,), value, dtype=torch.uint8)
    skip = -raw.data_ptr() % 128
    return raw[skip : skip + size].view(like.dtype).view(like.shape)


@contextlib.contextmanager
def hopper_on_cpu(library: ctypes.CDLL) -> Iterator[HopperOnCpu]:
    """A device. torch has one thread meanwhile: with a few hundred tokens, more would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield HopperOnCpu(library, monkeypatch)
    torch.set_num_threads(threads)


def random_dropout(seed: int, share: float, queries: int, keys: int) -> DropoutMask:
    """A mask of pairs at random positions."""
    positions = torch.randperm(queries + keys, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    return DropoutMask(Dropout(share, seed), *(x.clone() for x in positions.split((queries, keys))))


def random_problem(seed: int, most: int, kinds, heads, **options) -> tuple:
    """A generator, and inputs of up to ``most`` tokens, of the seed's one of ``kinds``, (dtype, head dims), and
    ``heads``."""
    from forward_oracle import make_inputs  # of tests/gpu

    rng = np.random.default_rng(seed)
    tq, tk = (int(n) for n in rng.integers(1, most, 2))
    slices = masks.random_slices(rng, tq, tk, max_slices=int(rng.integers(1, 10)))
    if seed % 3 == 2:  # no row that sees nothing, and none that is not seen, but for some of a causal mask
        slices = np.array([[0, tq, 0, tk, rng.integers(2)]])
    dtype, dims = kinds[seed % len(kinds)]
    return rng, make_inputs(seed, slices, tq, tk, heads[seed // len(kinds) % len(heads)], dims, dtype, "cpu", **options)


class HopperOnCpu:
    """The backend of the CUDA kernels over a library from ``hopper_library``; its memory begins as NaN."""

    def __init__(self, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
        self._library, self._runtime = library, _Runtime()
        self.backend = FfaBackend(_Library(library), self._runtime)
        for module in (ffa_forward, ffa_backward):
            monkeypatch.setattr(module, "_empty_like", memory_like)
        monkeypatch.setattr(Kept, "_new_order", _new_order)

    def use(self, multiprocessors: int, seed: int) -> None:
        """How many CTAs there are together, and what decides in the next launch which thread goes on."""
        self._runtime.multiprocessors = multiprocessors
        self._library.use_device(multiprocessors, ctypes.c_uint64(seed))


class _Library(FfaLibrary):
    """Each call waits until its kernels have ended, and says what they did wrong."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.magi_last_error.restype = library.synchronize.restype = ctypes.c_char_p
        super().__init__(library)
        for name in ("forward_raw", "backward_raw", "forward_remote_raw", "backward_remote_raw"):
            if getattr(self, name) is not None:
                setattr(self, name, self._waiting(getattr(self, name)))

    def _waiting(self, call: Callable[..., int]) -> Callable[..., int]:
        def run(*params: object) -> int:
            status, error = call(*params), self._library.synchronize()
            assert error is None, error.decode()
            return status

        return run


class _Runtime(CpuRuntime):
    multiprocessors = 1

    def num_sms(self, index: int) -> int:
        return self.multiprocessors


def _new_order(_: Kept, num_bytes: int) -> KeptOrder:
    words = memory_like(torch.empty(num_bytes, dtype=torch.uint8), 0)
    return KeptOrder(words, words.data_ptr())
