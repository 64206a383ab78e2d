# SPDX-License-Identifier: Apache-2.0
"""Kernels that the library built ahead lacks: compiled at first use, used ever after, or refused in a sentence."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from ffa_simulator import Anywhere, CpuRuntime, Simulator, backend, close, inputs, public_backend, tensors, truth
from known_case import KNOWN, Case

from magi_attention.common.mask import Mask
from magi_attention.errors import BuildError, NoBackendError, UnsupportedError
from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.kernels import AttnOptions, Problem, Registry, SdpaBackend
from magi_attention.kernels.ffa import custom_ops
from magi_attention.kernels.ffa import libraries as ffa_libraries
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.types import BackwardOperands, Operands
from magi_attention.native import jit
from magi_attention.native.ffa import FfaLibrary

pytestmark = pytest.mark.usefixtures("planner")

ROOT = Path(__file__).resolve().parents[3]
SLICES, OPTIONS = Mask.causal(32).slices, AttnOptions(0.25)
HOPPER = Problem("cuda", torch.bfloat16, 4, 2, 128, 128, OPTIONS, capability=(9, 0))


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("NO_BUILD_CACHE", "FORCE_JIT_BUILD", "BUILD_DEBUG", "BUILD_VERBOSE", "KERNEL_BACKEND"):
        monkeypatch.delenv(f"MAGI_ATTENTION_{name}", raising=False)


@pytest.fixture
def compiled(monkeypatch):
    """In place of the compiler: (what was asked for, the simulator that stands for all that is compiled)."""
    asked, simulator = [], Simulator()

    def load_variant(*shape_and_family, kind):
        *shape, family = shape_and_family
        assert family == "sm90"
        asked.append((kind, *shape))
        return simulator

    monkeypatch.setattr(jit, "load_variant", load_variant)
    monkeypatch.setattr(ffa_libraries, "FfaLibrary", Stub)
    return asked, simulator


class Stub(FfaLibrary):
    """An installation without a library built ahead, whose compiled ones are simulators."""

    def __new__(cls, library):
        return library

    @classmethod
    def ahead(cls, family):
        raise UnsupportedError("Nothing is built ahead here.")

    @staticmethod
    def is_ahead(family):
        return False


def test_what_the_library_lacks_is_compiled_once_and_used(compiled):
    asked, second = compiled
    ffa, first = backend()
    first.lacking = {("fwd", 24, 16), ("bwd", 24, 16), ("bwd", 16, 16)}
    q, k, v = inputs(32, 32, dims=(24, 16), dtype=torch.float16)
    want = truth(q, k, v, SLICES, OPTIONS)
    for _ in range(3):
        out, lse, _ = ffa.forward_final(Operands(q, k, v, SLICES, OPTIONS))
        close(out, want.out, 1e-2)
        ffa.backward(BackwardOperands(torch.ones_like(out), q, k, v, out, lse, SLICES, OPTIONS))
    assert asked == [("fwd", "fp16", 24, 16), ("bwd", "fp16", 24, 16)]
    assert (len(first.calls), len(second.calls)) == (0, 3) and len(second.backward_calls) == 3
    x = inputs(32, 32)
    out, lse, _ = ffa.forward_final(Operands(*x, SLICES, OPTIONS))
    assert len(first.calls) == 1 and len(asked) == 2, "held by the library built ahead"
    ffa.backward(BackwardOperands(torch.ones_like(out), *x, out, lse, SLICES, OPTIONS))
    assert asked[2:] == [("bwd", "bf16", 16, 16)] and not first.backward_calls


def test_a_known_call_goes_to_the_compiled_kernel(host_libraries, compiled, monkeypatch):
    asked, second = compiled
    _, first = public_backend(monkeypatch)
    first.lacking = {("fwd", 16, 16)}
    case = Case(first)
    for _ in range(3):
        out, _ = case.find()
        assert torch.equal(out, case.want[0])
    assert len(asked) == 1 and not first.calls and len(second.calls) == 4
    ffa = custom_ops._kernels()
    options = custom_ops.options_of(0.25, 0.0, "sh", False, 0, False)
    call = ffa.prepared(Operands(case.q, case.k, case.v, case.mask, options))
    assert call.launch_address == second.forward_address != first.forward_address
    KNOWN.forget()


def test_nothing_is_built_ahead(host_libraries, compiled, monkeypatch):
    asked, simulator = compiled
    ffa = Anywhere(runtime=CpuRuntime())
    with pytest.raises(UnsupportedError, match="Nothing is built ahead here"):
        _ = ffa.library
    monkeypatch.setattr(custom_ops, "default_registry", lambda: Registry((ffa, SdpaBackend())))
    KNOWN.forget()
    q, k, v = inputs(32, 32)
    ffa.runtime.has_caught_up = False  # so that the device plans the backward, too
    ranges = tensors(SLICES)  # planned by the compiled library, since there is no other
    for _ in range(3):
        out, _ = flex_flash_attn_func(q, k, v, *ranges)
        close(out, truth(q, k, v, SLICES, OPTIONS).out, 1e-2)
    leaf = q.requires_grad_()
    flex_flash_attn_func(leaf, k, v, *ranges)[0].backward(torch.ones_like(q))
    assert asked == [("fwd", "bf16", 16, 16), ("bwd", "bf16", 16, 16)]
    assert len(simulator.calls) == 4 and (simulator.plans_made, simulator.transposed) == (2, 1)
    assert ffa.library is simulator
    KNOWN.forget()


def test_without_a_build_cache_every_call_looks_its_kernel_up(host_libraries, compiled, monkeypatch):
    asked, second = compiled
    _, first = public_backend(monkeypatch)
    first.lacking = {("fwd", 16, 16), ("bwd", 16, 16)}
    monkeypatch.setenv("MAGI_ATTENTION_NO_BUILD_CACHE", "1")
    case = Case(first)
    for _ in range(2):
        assert case.find() is None
        flex_flash_attn_func(case.q, case.k, case.v, *case.mask)
    assert [kind for kind, *_ in asked] == ["fwd"] * 3 and len(second.calls) == 3 and len(KNOWN) == 0
    leaf = case.q.requires_grad_()
    for _ in range(2):
        flex_flash_attn_func(leaf, case.k, case.v, *case.mask)[0].backward(torch.ones_like(leaf))
    assert [kind for kind, *_ in asked] == ["fwd"] * 3 + ["fwd", "bwd"] * 2
    KNOWN.forget()


def test_the_registry_takes_what_can_be_compiled_and_says_what_is_missing(monkeypatch, caplog):
    reasons = {"fwd": None, "bwd": "There is no compiler here."}
    asked = []
    monkeypatch.setattr(jit, "why_not", lambda *shape, kind: asked.append((kind, *shape)) or reasons[kind])
    monkeypatch.setattr(ffa_libraries, "FfaLibrary", Stub)
    choice = Registry((FfaBackend(), SdpaBackend()))
    for _ in range(3):
        assert choice.select(HOPPER, "ffa", explicit=True)[0].name == "ffa"
    assert asked == [("fwd", "bf16", 128, 128, "sm90")], "asked once for each shape"
    training = Problem(**{**vars(HOPPER), "needs_backward": True})
    with caplog.at_level(logging.WARNING, logger="magi_attention.kernels"):
        for _ in range(3):
            assert choice.select(training, "ffa")[0].name == "sdpa"
    (record,) = caplog.records
    text = record.getMessage()
    for part in ("in place of 'ffa'", "no backward kernel for bf16 and head dims 128 and 128", "Nothing is built ahead",
                 "cannot be compiled at first use either. There is no compiler here."):  # fmt: skip
        assert part in text
    with pytest.raises(NoBackendError, match="(?s)'ffa' cannot run.*ffa: There is no backward kernel.*no compiler"):
        choice.select(training, "ffa", explicit=True)
    # Elsewhere nothing is asked, because nothing is to be compiled.
    del asked[:]
    for change in ({"capability": (7, 5)}, {"capability": (13, 0)}, {"device_type": "cpu", "capability": None}):
        assert choice.select(Problem(**{**vars(HOPPER), **change}))[0].name == "sdpa"
    assert not asked


def test_a_library_that_cannot_be_used_is_not_replaced_in_silence(monkeypatch):
    class Old(Stub):
        @staticmethod
        def is_ahead(family):
            return True

    monkeypatch.setattr(ffa_libraries, "FfaLibrary", Old)
    ffa = FfaBackend()
    assert ffa.why_not(HOPPER) == "Nothing is built ahead here."
    with pytest.raises(NoBackendError, match="ffa: Nothing is built ahead here."):
        Registry((ffa, SdpaBackend())).select(HOPPER, "ffa", explicit=True)


def test_a_compilation_that_fails_names_backend_kernel_and_remedy(monkeypatch):
    def refuse(*_, **__):
        raise BuildError("The compiler said no.")

    monkeypatch.setattr(jit, "load_variant", refuse)
    ffa, simulator = backend()
    simulator.lacking = {("fwd", 16, 16)}
    for _ in range(2):
        with pytest.raises(BuildError) as error:
            ffa.forward_final(Operands(*inputs(32, 32), SLICES, OPTIONS))
        for part in ("no forward kernel for bf16 and head dims 16 and 16", "native.build", "Backend 'ffa'",
                     "MAGI_ATTENTION_KERNEL_BACKEND=sdpa_ol", "The compiler said no."):  # fmt: skip
            assert part in str(error.value)
    monkeypatch.setenv("MAGI_ATTENTION_FORCE_JIT_BUILD", "1")
    with pytest.raises(BuildError, match="MAGI_ATTENTION_FORCE_JIT_BUILD=1 passes over"):
        ffa.forward_final(Operands(*inputs(32, 32, dims=(24, 24)), SLICES, OPTIONS))
