# SPDX-License-Identifier: Apache-2.0
"""What the backend of the CUDA kernels remembers, with a simulated library: plans, and calls that it knows."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
from ffa_simulator import CpuRuntime, Simulator, backend, close, inputs, planner_or_skip, tensors, truth

from magi_attention.common.mask import Mask
from magi_attention.common.slices import SliceTable
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.functional import flex_flash_attn as flex_module
from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.kernels import AttnOptions, Registry, SdpaBackend, torch_ops
from magi_attention.kernels.ffa import FfaBackend
from magi_attention.kernels.ffa_plans import RangeTensors
from magi_attention.kernels.tables import table_from_tensors
from magi_attention.kernels.torch_ops import options_of


@pytest.fixture(scope="module", autouse=True)
def planner():
    planner_or_skip()


def test_plan_of_a_table_is_made_once_and_lives_with_it():
    ffa, simulator = backend()
    q, k, v = inputs(32, 32)
    slices, options = SliceTable(Mask.causal(32).slices.array), AttnOptions(0.25)
    for _ in range(3):
        ffa.forward_final(q, k, v, slices, options)
    ffa.forward(q, k, v, slices, options)
    assert len({p.plan for p in simulator.calls}) == 1
    (kept,) = slices.__dict__["_ffa_plans"].values()
    assert kept[1] == simulator.calls[0].plan, "held, so that its address is nobody else's"
    died = weakref.ref(kept[0])
    other = SliceTable(Mask.full(32).slices.array)
    ffa.forward_final(q, k, v, other, options)
    assert simulator.calls[-1].plan != simulator.calls[0].plan
    del kept, slices
    gc.collect()
    assert died() is None


@pytest.mark.parametrize("host_planning", [False, True])
def test_plan_of_tensors_follows_every_edit(host_planning):
    ffa, simulator = backend(host_planning=host_planning)
    q, k, v = inputs(32, 32)
    options = AttnOptions(0.25)
    mask = tensors(Mask.varlen([0, 10, 32], causal=True).slices)

    def run_and_check(m):
        out, *_ = ffa.forward_final(q, k, v, m, options)
        close(out, truth(q, k, v, table_from_tensors(*m), options).out, 1e-2)

    run_and_check(mask)
    first = simulator.calls[-1].plan
    run_and_check(mask)
    assert simulator.calls[-1].plan == first
    mask.q_ranges[0, 1] = 9
    run_and_check(mask)
    mask.types.zero_()
    run_and_check(mask)
    mask.k_ranges.copy_(torch.tensor([[3, 8], [12, 20]]))
    run_and_check(mask)
    run_and_check(RangeTensors(mask.q_ranges, mask.k_ranges, None))
    swapped = RangeTensors(mask.q_ranges, mask.k_ranges.flip(0), mask.types)
    run_and_check(swapped)
    entries = ffa._range_plans._entries
    assert entries
    del mask, swapped
    gc.collect()
    assert not entries
    for seed in range(20):  # memory and ids are reused; no plan is
        cut = 1 + seed
        run_and_check(tensors(Mask.varlen([0, cut, 32]).slices))


def test_what_is_not_remembered():
    ffa, simulator = backend()
    q, k, v = inputs(32, 32)
    options = AttnOptions(0.25)
    mask = tensors(Mask.causal(32).slices)
    ffa.forward_final(q, k, v, mask, options)
    work = simulator.calls[-1].workspace
    ffa.runtime.capturing = True
    for made in (2, 3):
        ffa.forward_final(q, k, v, mask, options)
        assert simulator.plans_made == made and simulator.calls[-1].workspace != work
    assert ffa.forward_known(q, k, v, *mask, options, None) is None
    many = RangeTensors(*(torch.zeros(300_000, 2, dtype=torch.int32) for _ in range(2)), None)
    with pytest.raises(UnsupportedError, match="CUDA graph"):
        ffa.forward_final(q, k, v, many, options)
    ffa.runtime.capturing = False
    with torch.inference_mode():
        inference = tensors(Mask.full(32).slices)
        for _ in range(2):
            before = simulator.plans_made
            ffa.forward_final(q, k, v, inference, options)
            assert simulator.plans_made == before + 1
    assert len(ffa._range_plans._entries) == 1


def test_many_slices_are_planned_on_the_host():
    ffa, simulator = backend()
    q, k, v = inputs(4096, 64, heads=(1, 1), dims=(8, 8))
    starts = torch.arange(4096, dtype=torch.int64)
    mask = RangeTensors(torch.stack([starts, starts + 1], 1), torch.stack([starts % 64, starts % 64 + 1], 1), None)
    simulator.tile_rows = 1
    out, *_ = ffa.forward_final(q, k, v, mask, AttnOptions(1.0))
    assert simulator.plans_made == 0
    assert torch.equal(out[:, 0], v[starts % 64, 0])
    with pytest.raises(ContractError, match=r"Slice 0 has k range \[0, 65\)"):
        bad = RangeTensors(mask.q_ranges, mask.k_ranges.index_fill(0, torch.tensor([0]), 0).clone(), None)
        bad.k_ranges[0, 1] = 65
        ffa.forward_final(q, k, v, bad, AttnOptions(1.0))


def test_known_calls_skip_the_checks_and_nothing_else():
    ffa, simulator = backend()
    q, k, v = inputs(32, 32)
    options, mask = AttnOptions(0.25), tensors(Mask.causal(32).slices)
    assert ffa.forward_known(q, k, v, *mask, options, None) is None
    want, *_ = ffa.forward_final(q, k, v, mask, options)
    got, *_ = ffa.forward_known(q, k, v, *mask, options, None)
    assert torch.equal(got, want) and got.data_ptr() != want.data_ptr()
    sink = torch.zeros(1, 4)
    for change in (
        {"q": q[:31]}, {"k": k.half()}, {"v": v[:, :1]}, {"options": AttnOptions(0.25)}, {"sink": sink},
        {"mask": tensors(Mask.causal(32).slices)},
    ):  # fmt: skip
        call = {"q": q, "k": k, "v": v, "mask": mask, "options": options, "sink": None, **change}
        q_ranges, k_ranges, types = call.pop("mask")
        assert ffa.forward_known(q_ranges=q_ranges, k_ranges=k_ranges, types=types, **call) is None, change
    mask.types.fill_(0)
    assert ffa.forward_known(q, k, v, *mask, options, None) is None


class Anywhere(FfaBackend):
    """Runs on the CPU too, so that the registry picks it."""

    def why_not(self, problem):
        return None


@pytest.fixture
def public(monkeypatch):
    """``flex_flash_attn_func`` on the simulated kernels; gives the backend and the simulator."""
    for name in torch_ops._LANE:
        monkeypatch.delenv(name, raising=False)
    simulator = Simulator()
    ffa = Anywhere(simulator, CpuRuntime())
    registry = Registry((ffa, SdpaBackend()), (("sdpa_ol", "not here"), ("fa4", "not here")))
    monkeypatch.setattr(torch_ops, "default_registry", lambda: registry)
    torch_ops._lane_backend.cache_clear()
    yield ffa, simulator
    torch_ops._lane_backend.cache_clear()


def test_public_function_takes_the_short_way_the_second_time(public, monkeypatch):
    ffa, simulator = public
    q, k, v = inputs(32, 32)
    ranges = tensors(Mask.varlen([0, 9, 32], causal=True).slices)
    want = truth(q, k, v, table_from_tensors(*ranges), AttnOptions(0.25))
    monkeypatch.setattr(flex_module, "flex_fwd", counted := Counted(flex_module.flex_fwd))
    for _ in range(3):
        out, meta = flex_flash_attn_func(q, k, v, *ranges, return_max_logits=True)
        assert out.dtype == q.dtype and meta.max_logits.shape == (4,)
        close(out, want.out, 1e-2)
        close(meta.lse, want.lse, 1e-5)
    assert counted.calls == 1 and len(simulator.calls) == 3
    ranges.types.zero_()
    out, _ = flex_flash_attn_func(q, k, v, *ranges, return_max_logits=True)
    close(out, truth(q, k, v, table_from_tensors(*ranges), AttnOptions(0.25)).out, 1e-2)
    assert counted.calls == 2
    for name, value in (("MAGI_ATTENTION_SANITY_CHECK", "1"), ("MAGI_ATTENTION_KERNEL_BACKEND", "sdpa")):
        before, kernels = counted.calls, len(simulator.calls)
        monkeypatch.setenv(name, value)
        flex_flash_attn_func(q, k, v, *ranges, return_max_logits=True)
        assert counted.calls == before + 1 and len(simulator.calls) == kernels + (value == "1")
    with pytest.raises(ContractError):
        flex_flash_attn_func(q, k, v, *ranges, swap_bwd_qk_loop=True, deterministic=True)


class Counted:
    def __init__(self, fn) -> None:
        self.fn, self.calls = fn, 0

    def __call__(self, *args):
        self.calls += 1
        return self.fn(*args)


def test_compiled_and_index_calls(public):
    _, simulator = public
    q, k, v = inputs(32, 32)
    ranges = tensors(Mask.causal(32).slices)
    want = truth(q, k, v, Mask.causal(32).slices, AttnOptions(0.25))
    compiled = torch.compile(lambda *x: flex_flash_attn_func(*x)[0] * 2, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        close(compiled(q, k, v, *ranges), 2 * want.out, 2e-2)
    assert len(simulator.calls) == 2
    rows = torch.arange(32)[:, None]
    keys = torch.where(torch.arange(32)[None] <= rows, torch.arange(32)[None], -1).to(torch.int32)
    q1, k1, v1 = inputs(32, 32, heads=(4, 1))
    out, _ = flex_flash_attn_func(q1, k1, v1, index_attn_indices=keys[:, None])
    close(out, truth(q1, k1, v1, Mask.causal(32).slices, AttnOptions(0.25)).out, 1e-2)


def per_call_us(fn, calls: int = 400, rounds: int = 7) -> float:
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(calls):
            fn()
        best = min(best, time.perf_counter() - started)
    return best / calls * 1e6


def test_host_cost_of_a_known_call(monkeypatch):
    """What Python adds to the launch (4 us on a GPU machine) and to two allocations (3 us there)."""
    ffa, simulator = backend()
    q, k, v = inputs(64, 64)
    options, slices = AttnOptions(0.25), Mask.causal(64).slices
    mask = tensors(slices)
    ffa.forward_final(q, k, v, mask, options)
    ffa.forward_final(q, k, v, slices, options)
    simulator.forward_raw = lambda params: 0
    ours = options_of(0.25, 0.0, "sh", False, 0, False)
    ffa.forward_final(q, k, v, mask, ours)
    monkeypatch.setattr(torch_ops, "_lane_backend", lambda raw: ffa)
    assert ffa.forward_known(q, k, v, *mask, options, None) is not None
    whole = per_call_us(lambda: flex_flash_attn_func(q, k, v, *mask))
    known = per_call_us(lambda: ffa.forward_known(q, k, v, *mask, options, None))
    final = per_call_us(lambda: ffa.forward_final(q, k, v, slices, options))
    print(f"host cost: known tensors {known:.1f} us, slice table {final:.1f} us, whole call {whole:.1f} us")
    assert known < 40 and final < 40 and whole < 60  # generous: CI machines are shared
