# SPDX-License-Identifier: Apache-2.0
"""What known calls cost: steps, references, threads; and what is said where there is no native module."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import weakref
from pathlib import Path

import torch
from ffa_simulator import tensors
from known_case import KNOWN, Case, quick_case
from torch.utils._python_dispatch import TorchDispatchMode

import magi_attention
from magi_attention.common.forward_meta import AttnForwardMeta
from magi_attention.common.mask import Mask
from magi_attention.errors import UnsupportedError
from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.kernels.ffa import launch_cache
from magi_attention.native import abi
from magi_attention.testing.waiting import DEADLINE_S


def test_nothing_leaks(public, monkeypatch):
    case = quick_case(public, monkeypatch)
    q, k, v, mask = case.q, case.k, case.v, case.mask
    watched = [q, k, v, *mask, None, flex_flash_attn_func, AttnForwardMeta, torch.empty_like, Case]
    meta_of = lambda: flex_flash_attn_func(q, k, v, *mask)[1]  # noqa: E731
    failing = {"q": q[:31]}

    def counts() -> list[int]:
        gc.collect()
        return [sys.getrefcount(x) for x in watched]

    for _ in range(10):
        assert case.find() and case.find(**failing) is None
    before, objects = counts(), len(gc.get_objects())
    for _ in range(10_000):
        out, meta = KNOWN.find(q, k, v, *mask)
        assert KNOWN.find(**failing, k=k, v=v, q_ranges=mask.q_ranges, k_ranges=mask.k_ranges) is None
    owners = [sys.getrefcount(out), sys.getrefcount(meta), sys.getrefcount(meta.lse)]
    assert owners == [2, 2, 2], "one besides the argument itself"
    del out, meta
    after = counts()
    none = watched.index(None)
    assert abs(after[none] - before[none]) < 100
    assert after[:none] + after[none + 1 :] == before[:none] + before[none + 1 :]
    assert abs(len(gc.get_objects()) - objects) < 100
    lse = weakref.ref(meta_of().lse)
    assert lse() is None


def test_threads(public, monkeypatch):
    case = quick_case(public, monkeypatch)
    monkeypatch.setattr(sys, "setswitchinterval", sys.setswitchinterval)
    interval, faults = sys.getswitchinterval(), []
    sys.setswitchinterval(1e-5)

    def work(seed: int) -> None:
        try:
            for i in range(150):
                mask = tensors(Mask.causal(32).slices)
                for _ in range(3):
                    flex_flash_attn_func(case.q, case.k, case.v, *mask, sm_margin=i % 3)
                    flex_flash_attn_func(case.q, case.k, case.v, *case.mask)
                if i % 50 == 49:
                    KNOWN._memo.forget_all()
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
    finally:
        sys.setswitchinterval(interval)
    assert not faults
    gc.collect()
    assert len(KNOWN) <= 1


def test_a_known_call_costs_few_steps(public, monkeypatch):
    """Counts instead of microseconds: Python functions entered, and allocations, by one known call."""
    case = quick_case(public, monkeypatch)
    q, k, v, mask = case.q, case.k, case.v, case.mask
    steps: list[str] = []

    def note(frame, event, arg) -> None:
        if event in ("call", "c_call"):
            steps.append(frame.f_code.co_name if event == "call" else arg.__name__)

    def select_schedule(call) -> list[str]:
        steps.clear()
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
        return steps[1:-1]  # without the lambda and setprofile

    known = select_schedule(lambda: flex_flash_attn_func(q, k, v, *mask))
    assert "find" in known and len(known) < 10, known
    assert len(select_schedule(lambda: flex_flash_attn_func(q, k, v, *mask, softcap=1.0))) > 100

    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made.append(func)
            return func(*args, **(kwargs or {}))

    made: list = []
    hooks = launch_cache.TorchHooks.find()._replace(answers=())  # blind to modes, so that one can count
    monkeypatch.setattr(launch_cache.TorchHooks, "find", lambda: hooks)
    KNOWN.forget()
    flex_flash_attn_func(q, k, v, *mask)
    with Allocations():
        assert case.find() is not None
    assert [str(func) for func in made] == ["aten.empty_like.default"] * 2


def test_a_training_step_like_one_before_costs_few_steps(public, monkeypatch):
    """Counts Python functions of the package that a forward with gradient and its backward enter, without launches."""
    case = quick_case(public, monkeypatch)
    for launch in ("forward_raw", "backward_raw"):
        monkeypatch.setattr(case.simulator, launch, lambda params: abi.OK)
    q, dout = case.q.requires_grad_(), torch.ones_like(case.q)
    package, entered = Path(magi_attention.__file__).parent, []

    def note(frame, event, arg) -> None:
        if event == "call" and package in Path(frame.f_code.co_filename).parents:
            entered.append(frame.f_code.co_name)

    def steps() -> list[str]:
        entered.clear()
        sys.setprofile(note)
        try:
            torch.autograd.grad(flex_flash_attn_func(q, case.k, case.v, *case.mask)[0], q, dout)
        finally:
            sys.setprofile(None)
        return list(entered)

    first = steps()
    steps()  # the host knows the ranges from now on
    again = steps()
    prepared = {"check_call", "check_qkv", "select_backend", "select", "_prepare"}
    assert prepared <= set(first) and not prepared & set(again)
    assert "_backward" in again and len(again) < 70, again


def test_without_the_module_one_line_says_why(public, monkeypatch, caplog):
    def absent():
        raise UnsupportedError("_magi_host.so is not built; run this and that.")

    for patch in (lambda m: m.setattr(launch_cache, "load_host", absent), old_torch):
        KNOWN.forget()
        caplog.clear()
        with monkeypatch.context() as changed, caplog.at_level(logging.INFO, "magi_attention.kernels"):
            patch(changed)
            case = Case(public[1])
            for _ in range(2):
                again = flex_flash_attn_func(case.q, case.k, case.v, *case.mask)
                assert torch.equal(again[0], case.want[0])
        (line,) = [r for r in caplog.records if "Repeated attention calls" in r.getMessage()]
        assert line.levelno == logging.INFO and ("run this" in line.getMessage() or "2.10" in line.getMessage())
        assert len(KNOWN) == 0 and case.find() is None


def old_torch(patch) -> None:
    real = launch_cache.TorchHooks.find
    monkey = type("torch", (), {"Tensor": object, "__version__": "2.9.0"})

    def find():
        patch.setattr(launch_cache, "torch", monkey)
        return real()

    patch.setattr(launch_cache.TorchHooks, "find", find)
