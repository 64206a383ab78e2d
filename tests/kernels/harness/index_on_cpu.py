# SPDX-License-Identifier: Apache-2.0
"""Index attention on the CPU: its entry points as the library that ``IndexFfa`` calls; problems with their truth."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ffa_simulator import CpuRuntime
from hopper_library import aligned, hopper_library, memory_like

from magi_attention.kernels.index_attn import ffa
from magi_attention.kernels.index_attn.reference import IndexReference
from magi_attention.kernels.index_attn.types import IndexProblem, PreparedIndices
from magi_attention.kernels.reference.operands import delta_with_dlse
from magi_attention.kernels.types import options_of
from magi_attention.native import abi
from magi_attention.native.index.abi import FUNCTIONS
from magi_attention.native.index.calls import IndexLibrary


class IndexLibraryOnCpu(IndexLibrary):
    """Each call runs its kernels and says what they did wrong. ``entries``: functions ``magi_ffa_index_*`` of
    ``source``; ``questions``: functions that give an error or None."""

    def __init__(self, folder: Path, source: Path, entries: tuple[str, ...], questions: tuple[str, ...] = ()) -> None:
        self._library = kernels = hopper_library(folder, source)
        for name in (f"magi_ffa_index_{entry}" for entry in entries):
            entry = getattr(kernels, name)
            entry.restype, entry.argtypes = FUNCTIONS[name]
        for name in ("synchronize", "last_error", *questions):
            getattr(kernels, name).restype = ctypes.c_char_p
        self._bind()

    def _entry(self, name: str) -> Callable[..., int]:
        def run(*arguments: object) -> int:
            status: int = getattr(self._library, name)(*arguments)
            self.check(status, name)
            return status

        return run

    def use(self, multiprocessors: int, seed: int) -> None:
        self._library.use_device(multiprocessors, ctypes.c_uint64(seed))

    def ask(self, name: str, *arguments: object) -> None:
        error = getattr(self._library, name)(*arguments)
        assert error is None, error.decode()

    def check(self, status: int, what: str) -> None:
        assert status == abi.OK, self._library.last_error().decode()
        self.ask("synchronize")


class _Runtime(CpuRuntime):
    def stream(self, index: int) -> int:
        return 0


def run_on_the_cpu(monkeypatch: pytest.MonkeyPatch, library: IndexLibraryOnCpu) -> ffa.IndexFfa:
    """The backend over the library, with memory of the CPU that is not clean, and no stream."""
    monkeypatch.setattr(ffa, "_empty_like", memory_like)
    monkeypatch.setattr(ffa, "_zeros_like", lambda like: memory_like(like).zero_())
    backend = ffa.IndexFfa(library, _Runtime())
    monkeypatch.setattr(IndexCall, "backend", backend, raising=False)
    return backend


class IndexCall:
    """Operands (T, H, D) in 16 bits, prepared lists, and what the reference makes of them in float64. ``v`` None: the
    values are the first columns of k. ``run_on_the_cpu`` says by which kernels calls run."""

    backend: ffa.IndexFfa

    def __init__(self, q, k, v, dout, lists: PreparedIndices, scale: float = 0.2) -> None:
        self.q, self.k, self.dout = map(aligned, (q, k, dout))
        self.v, self.lists, self.scale, self.dim_v = None if v is None else aligned(v), lists, scale, dout.shape[2]
        self.exact = self.q.double(), self.k.double(), None if v is None else self.v.double()
        self.out, self.lse = IndexReference().forward(self.problem(), *self.exact, lists)
        self.grads = self.gradients()

    def problem(self, deterministic: bool = False) -> IndexProblem:
        options, dim_v = options_of(self.scale, 0.0, "sh", deterministic, 0), None if self.v is not None else self.dim_v
        return IndexProblem.of_lists(
            self.q, self.k, self.v, options, self.lists, needs_backward=True, **({"head_dim_v": dim_v} if dim_v else {})
        )

    def gradients(self, delta: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """dq, dk and dv by the reference."""
        saved = self.dout.double(), *self.exact, self.out, self.lse
        return IndexReference().backward(self.problem(), *saved, self.lists, delta)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.backend.forward(self.problem(), self.q, self.k, self.v, self.lists)

    def backward(self, deterministic: bool = False, delta: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """By the kernels. With delta they do not read out, whatever is in it."""
        out = self.out.to(self.q.dtype) if delta is None else torch.full_like(self.dout, float("nan"))
        saved = self.dout, self.q, self.k, self.v, aligned(out), aligned(self.lse.float())
        return self.backend.backward(self.problem(deterministic), *saved, self.lists, delta)

    def check_forward(self, size: float = 1.0) -> tuple[torch.Tensor, ...]:
        got = self.forward()
        for name, x, want in zip(("out", "lse"), got, (self.out, self.lse)):
            assert_near(name, x, want, size)
        return got

    def check_backward(self, deterministic: bool = False, size: float = 3.0) -> tuple[torch.Tensor, ...]:
        got = self.backward(deterministic)
        assert_grads(got, self.grads, size)
        return tuple(x for x in got if x is not None)

    def check_gradients_of_lse(self, deterministic: bool = False, size: float = 3.0) -> None:
        delta = delta_with_dlse(self.out, self.dout.double(), self.lse, self.lse.sin())
        want = self.gradients(delta)
        assert (want[0] - self.grads[0]).abs().max() > 0.1
        assert_grads(self.backward(deterministic, aligned(delta.float())), want, size)


def assert_grads(grads: tuple, wanted: tuple, size: float) -> None:
    for name, got, want in zip(("dq", "dk", "dv"), grads, wanted):
        assert (got is None) == (want is None), name
        if got is not None:
            assert_near(name, got, want, size)


def assert_near(name: str, got: torch.Tensor, want: torch.Tensor, size: float = 1.0) -> None:
    """Within what 16-bit weights and results explain, ``size`` times as much where many are added; and infinite or NaN
    in the same places."""
    assert torch.equal(got.isneginf(), want.isneginf()) and torch.equal(got.isnan(), want.isnan()), name
    got, want = (torch.nan_to_num(x.double(), neginf=0.0) for x in (got, want))
    off, allowed = (got - want).abs().max(), 6e-3 * size * (1 + want.abs().max())
    assert off <= allowed, f"{name} is off by {off}, allowed {allowed}"
