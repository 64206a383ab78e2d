# SPDX-License-Identifier: Apache-2.0
"""Distributed attention against dense float64 attention, over random masks, groups and schedules."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from oracle import Truth, truth

from magi_attention.comm.transport.base import SingleTransport
from magi_attention.comm.transport.fake import FakeTransport, FakeWorld
from magi_attention.common.enum import AttnOverlapMode
from magi_attention.common.slices import SliceTable, to_dense
from magi_attention.config import (
    DispatchConfig,
    DistAttnConfig,
    OverlapConfig,
    SequentialDispatchAlg,
    UniformOverlapAlg,
)
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.functional import AttnPolicy, AttnRuntime, TokenLayout, gather, shard
from magi_attention.functional.dist_attn import dist_attn
from magi_attention.functional.runtime import _warn_once
from magi_attention.kernels import default_registry
from magi_attention.meta.plan import Plan
from magi_attention.meta.planner import PlanOptions, build_plan
from magi_attention.testing.libraries import planner_or_skip
from magi_attention.testing.masks import random_slices

sys.path.append(str(Path(__file__).parents[1] / "meta"))
from plan_oracle import EVEN_ALGS, UNEVEN_ALGS  # noqa: E402

TOLERANCE = 1e-8


@dataclass(frozen=True)
class Case:
    seed: int
    cp: int
    degree: int | None  # None is dynamic
    uneven: bool
    alg: int
    heads: tuple[int, int]
    backend: str
    sink: bool
    softcap: float
    hide_tail: bool
    high_precision: bool
    prefetch_all: bool


cases = st.builds(
    Case,
    seed=st.integers(0, 10**6),
    cp=st.sampled_from([1, 2, 3, 4, 8]),
    degree=st.sampled_from([None, 0, 1, 2, 3, 4]),
    uneven=st.booleans(),
    alg=st.integers(0, len(EVEN_ALGS) - 1),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1), (3, 3), (5, 1)]),
    backend=st.sampled_from(["sdpa", "sdpa_ol"]),
    sink=st.booleans(),
    softcap=st.sampled_from([0.0, 0.0, 5.0]),
    hide_tail=st.booleans(),
    high_precision=st.booleans(),
    prefetch_all=st.booleans(),
)


LOSSES = st.sampled_from(["out", "both", "either"])


def make_config(case: Case) -> DistAttnConfig:
    algs = UNEVEN_ALGS if case.uneven else EVEN_ALGS
    dispatch = DispatchConfig(1 + case.seed % 7, case.uneven, algs[case.alg % len(algs)])
    size = 1 + case.seed % 5
    if case.degree is None:
        return DistAttnConfig(dispatch, OverlapConfig(mode=AttnOverlapMode.DYNAMIC, min_chunk_size=size))
    alg = UniformOverlapAlg(random_costs=case.seed % 2 == 0, random_seed=1)
    return DistAttnConfig(dispatch, OverlapConfig(degree=case.degree, min_chunk_size=size, alg=alg))


def run_rank(
    transport, plan, policy, tensors, sink=None, softcap=0.0, dtype=torch.float64, by_groups=None, losses="out",
    **options,
):  # fmt: skip
    """One rank: shard the global tensors, attend, gather everything back. ``by_groups``: the plan of head groups.
    ``losses``: of out, of "both" out and ``sum(lse ** 2)``, or "either": every second rank of lse alone."""
    layout = TokenLayout(plan, transport)
    groups = {} if by_groups is None else {"head_groups": plan.num_heads_kv}
    runtime = AttnRuntime(by_groups or plan, transport, default_registry(), policy, **groups)
    q, k, v, dout = (shard(x.to(dtype), layout).detach().requires_grad_() for x in tensors)
    sink = None if sink is None else sink.detach().clone().requires_grad_()
    options = {"return_max_logits": by_groups is None, **options}
    out, lse, max_logits = dist_attn(q, k, v, runtime, sink, None, softcap, **options)
    is_pad = torch.from_numpy(plan.position_array(transport.rank)) >= plan.total_tokens  # and may see a sink
    slope = (2 * lse.detach()).masked_fill(is_pad[:, None], 0.0)  # infinite for a row that sees nothing
    rank = transport.rank % 2 if losses == "either" else 2
    pairs = [(out, dout.detach())] * (rank != 0) + [(lse, slope)] * (losses != "out" and rank != 1)
    torch.autograd.backward(*zip(*pairs))
    full = [gather(x.detach(), layout) for x in (out, lse, q.grad, k.grad, v.grad)]
    return *full, None if sink is None else sink.grad, max_logits


def make_problem(case: Case):
    rng = np.random.default_rng(case.seed)
    total = int(rng.integers(max(case.cp, 2), 49))
    slices = SliceTable(random_slices(rng, total, total, max_slices=8))
    plan = build_plan(slices, total, case.cp, config=make_config(case))
    gen = torch.Generator().manual_seed(case.seed)
    hq, hk = case.heads
    shapes = [(total, hq, 8), (total, hk, 8), (total, hk, 6), (total, hq, 6)]
    tensors = [torch.randn(*s, generator=gen, dtype=torch.float64) for s in shapes]
    sink = torch.randn(3, hq, generator=gen, dtype=torch.float64) if case.sink else None
    return plan, slices, total, tensors, sink


def make_policy(case: Case, **changes) -> AttnPolicy:
    values = dict(
        backend=case.backend,
        is_backend_explicit=True,
        hide_tail_reduce=case.hide_tail,
        high_precision_reduce=case.high_precision,
        prefetch_all=case.prefetch_all,
        dsink_reduce="sum",
        check=case.seed % 4 == 0,
    )
    return AttnPolicy(**{**values, **changes})


def wanted(case: Case, plan, slices, total: int, tensors, sink, losses: str) -> Truth:
    mask = torch.from_numpy(to_dense(slices.array, total, total))
    options = mask, tensors[3], 8**-0.5, case.softcap, sink
    if losses == "out":
        return truth(*tensors[:3], *options)
    lse = truth(*tensors[:3], *options).lse
    owner = torch.empty(plan.padded_tokens, dtype=torch.int64)
    for rank in range(case.cp):
        owner[plan.position_array(rank)] = rank
    of_out, of_lse = ((owner[:total] % 2 == i) | (losses == "both") for i in (1, 0))
    dout, dlse = tensors[3] * of_out[:, None, None], torch.where(of_lse[:, None], 2 * lse, 0.0)
    return truth(*tensors[:3], mask, dout, *options[2:], dlse)


def check_beside_dense(case: Case, plan, slices, total: int, tensors, sink, losses="out", by_groups=None) -> None:
    """Outputs, gradients and maxima of every rank of ``plan`` against dense attention in float64."""
    expected = wanted(case, plan, slices, total, tensors, sink, losses)
    run = partial(run_rank, losses=losses, by_groups=by_groups)
    most = TOLERANCE if losses == "out" else 10 * TOLERANCE
    for result in FakeWorld(case.cp).run(run, plan, make_policy(case), tensors, sink, case.softcap):
        for name, got in zip(("out", "lse", "dq", "dk", "dv"), result):
            want = getattr(expected, name)
            assert torch.equal(got.isfinite(), want.isfinite()), name
            error = (got.nan_to_num(neginf=0) - want.nan_to_num(neginf=0)).abs().max()
            assert error <= most, f"{name}: {error}"
        if sink is not None:
            assert (result[5] - expected.dsink).abs().max() <= most
        assert by_groups is not None or torch.allclose(result[6], expected.max_logits, rtol=0, atol=TOLERANCE)


@settings(max_examples=150, deadline=None, print_blob=True)
@given(case=cases, losses=LOSSES)
def test_equals_dense_attention(case: Case, losses: str) -> None:
    note(f"seed {case.seed}")
    torch.set_num_threads(1)
    check_beside_dense(case, *make_problem(case), losses)


@pytest.mark.parametrize("seed", range(6))
def test_deterministic_twice(seed: int) -> None:
    cp, degree, hides = (2, 3, 4)[seed % 3], (2, 0, None)[seed % 3], seed % 2 == 0
    case = Case(seed, cp, degree, False, 0, (4, 2), "sdpa_ol", True, 0.0, hides, False, True)
    plan, _, _, tensors, sink = make_problem(case)
    run = partial(run_rank, dtype=torch.float32, losses="both" if seed > 2 else "out")
    runs = [
        FakeWorld(case.cp).run(run, plan, make_policy(case, deterministic=True), tensors, sink.float())
        for _ in range(2)
    ]
    for first, second in zip(*runs):
        for a, b in zip(first[:7], second[:7]):
            assert torch.equal(a, b)


def test_low_precision_error_is_near_the_reference() -> None:
    case = Case(5, 4, 2, False, 0, (4, 2), "sdpa_ol", False, 0.0, False, True, True)
    plan, slices, total, tensors, _ = make_problem(case)
    mask = torch.from_numpy(to_dense(slices.array, total, total))
    expected = truth(*tensors[:3], mask, tensors[3], 8**-0.5)
    tensors16 = [x.to(torch.bfloat16) for x in tensors]
    plain = truth(*tensors16[:3], mask, tensors16[3], 8**-0.5)
    results = FakeWorld(4).run(run_rank, plan, make_policy(case), tensors, None, 0.0, torch.bfloat16)
    for name, got in zip(("out", "lse", "dq", "dk", "dv"), results[0]):
        want = getattr(expected, name)
        finite = want.isfinite()
        ours = (got.double() - want)[finite].abs().max()
        theirs = (getattr(plain, name).double() - want)[finite].abs().max()
        assert ours <= 2 * theirs + 1e-6, f"{name}: {ours} against {theirs}"


def test_what_is_no_tensor_gets_a_sentence() -> None:
    """After a call with tensors, too, whose shapes are known then."""
    plan = build_plan(SliceTable(np.array([[0, 64, 0, 64, 1]])), 64, 1)
    runtime = AttnRuntime(plan, SingleTransport(0), default_registry(), AttnPolicy())
    q, sink = torch.randn(64, 2, 8, dtype=torch.float64), torch.zeros(1, 2)
    dist_attn(q, q, q, runtime), dist_attn(q, q, q, runtime, sink)
    for odd in (None, q.tolist(), q.numpy(), "q"):
        for name, at in (("q", 0), ("k", 1), ("v", 2)):
            with pytest.raises(ContractError, match=f"{name} is"):
                dist_attn(*[odd if i == at else q for i in range(3)], runtime)
        if odd is not None:
            with pytest.raises(ContractError, match="sink is a"):
                dist_attn(q, q, q, runtime, odd)
    with pytest.raises(ContractError, match="sink has shape"):
        dist_attn(q, q, q, runtime, torch.zeros(2))


def decision(rank: FakeTransport, plan: Plan, stage_mode: str, device: str = "cuda") -> bool:
    """Does the runtime go stage by stage without an error, with a backend and tensors that could do otherwise?"""
    runtime = AttnRuntime(plan, rank, default_registry(), AttnPolicy(stage_mode=stage_mode))
    q = SimpleNamespace(device=torch.device(device))
    return runtime._fused_attention(SimpleNamespace(name="ffa", backward_fused=None), q) is None


def test_a_batch_without_remote_keys_is_no_error() -> None:
    """Though one launch was asked for: there is nothing to send, and the next batch may differ."""
    slices = SliceTable(np.array([[a, a + 16, a, a + 16, 0] for a in range(0, 64, 16)]))
    plan = build_plan(slices, 64, 4, config=DistAttnConfig(DispatchConfig(alg=SequentialDispatchAlg())))
    assert FakeWorld(4).run(decision, plan, "fused") == [True] * 4


def test_what_the_machine_cannot_do_is_an_error_where_it_was_asked_for() -> None:
    plan = build_plan(
        SliceTable(np.array([[0, 64, 0, 64, 1]])), 64, 4, config=DistAttnConfig(DispatchConfig(chunk_size=8))
    )
    with pytest.raises(UnsupportedError, match="torch.distributed"):
        FakeWorld(4).run(decision, plan, "fused")
    assert FakeWorld(4).run(decision, plan, "auto") == [True] * 4


@pytest.mark.parametrize("query_moves", ["never", "always"])
def test_a_wish_that_is_not_met_is_told_once_for_all_masks(caplog, query_moves) -> None:
    if query_moves == "always":
        planner_or_skip()
    _warn_once.cache_clear()
    options, totals = PlanOptions(query_moves=query_moves), range(64, 128, 8)
    with caplog.at_level(logging.WARNING, logger="magi_attention.functional"):
        for total in totals:
            plan = build_plan(SliceTable(np.array([[0, total, 0, total, 1]])), total, 2, options)
            assert FakeWorld(2).run(decision, plan, "fused", "cpu") == [True] * 2
    told = [record.message for record in caplog.records if "stage by stage" in record.message]
    assert 1 <= len(told) <= 2, told  # the threads of the two ranks may say it at one time


def test_transforms_of_functions_get_a_sentence() -> None:
    plan = build_plan(SliceTable(np.array([[0, 8, 0, 8, 1]])), 8, 1)
    runtime = AttnRuntime(plan, SingleTransport(), default_registry(), AttnPolicy())
    q = torch.randn(8, 2, 8)

    def loss(q: torch.Tensor) -> torch.Tensor:
        return dist_attn(q, q, q, runtime)[0].sum()

    for transform in (torch.func.grad(loss), torch.func.jacrev(loss), lambda q: torch.vmap(loss)(q[None])):
        with pytest.raises(UnsupportedError, match="no transform of torch.func"):
            transform(q)
