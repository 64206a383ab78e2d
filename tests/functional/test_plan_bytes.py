# SPDX-License-Identifier: Apache-2.0
"""How many bytes a plan says that it and its tables take: those of what can be reached, on every way to run it."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
from bytes_oracle import reached_bytes

from magi_attention.comm.collectives.hierarchical import join_nodes
from magi_attention.comm.transport.base import SingleTransport
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.common.slices import SliceTable
from magi_attention.config import DispatchConfig, DistAttnConfig, OverlapConfig
from magi_attention.functional import AttnPolicy, AttnRuntime, TokenLayout, gather, shard
from magi_attention.functional.dist_attn import dist_attn
from magi_attention.functional.one_launch import nvlink
from magi_attention.functional.tokens.documents import labels
from magi_attention.functional.tokens.layout import place, roll, sum_shards
from magi_attention.kernels import AttnOptions, Operands, default_registry
from magi_attention.kernels.ffa.peer_kv import RemoteMask
from magi_attention.meta.one_launch.fused_layout import FusedLayout
from magi_attention.meta.plan import Plan
from magi_attention.meta.planner import PlanOptions, build_plan
from magi_attention.testing.masks import random_slices

TOTAL = 41


def make_plan(seed: int, cp: int, degree: int) -> Plan:
    slices = SliceTable(random_slices(np.random.default_rng(seed), TOTAL, TOTAL, max_slices=8))
    config = DistAttnConfig(DispatchConfig(4), OverlapConfig(degree=degree, min_chunk_size=2))
    return build_plan(slices, TOTAL, cp, PlanOptions(cu_seqlens=(0, 17, TOTAL)), config=config)


def use(transport, plan: Plan, backend: str, hierarchy=None) -> tuple[TokenLayout, AttnRuntime, torch.Tensor]:
    """Everything that makes a table."""
    layout = TokenLayout(plan, transport)
    policy = AttnPolicy(backend=backend, is_backend_explicit=True)
    runtime = AttnRuntime(plan, transport, default_registry(), policy, hierarchy)
    return layout, runtime, results(layout, runtime)


def results(layout: TokenLayout, runtime: AttnRuntime) -> torch.Tensor:
    x = shard(torch.arange(TOTAL * 8.0).sin().view(TOTAL, 1, 8), layout).detach().requires_grad_()
    out = dist_attn(x, x, x, runtime)[0]
    rolled = roll(out, layout, 3) + roll(out, layout, -1)
    gather(rolled, layout, is_partial_grad=True).sum().backward()
    moved = [place(x.detach(), layout), sum_shards(torch.ones(TOTAL, 1, 8), layout), labels(x[:, 0, 0].long(), layout)]
    return torch.cat([y.detach().double().reshape(-1) for y in (out, x.grad, *moved)])


@pytest.mark.parametrize("backend", ("sdpa", "sdpa_ol"))
@pytest.mark.parametrize("cp, degree, node", ((1, 1, 0), (2, 0, 0), (3, 1, 0), (4, 2, 0), (4, 0, 2), (4, 2, 2)))
def test_bytes_are_those_of_what_is_reached(cp, degree, node, backend):
    """Also of two levels, where ``node`` ranks share a node."""
    plan = make_plan(10 * cp + degree, cp, degree)
    own = plan.nbytes
    assert own == reached_bytes(plan) > 0

    def rank(transport):
        return use(transport, plan, backend, join_nodes(transport, (node,), None) if node else None)

    used = FakeWorld(cp).run(rank)
    assert plan.nbytes == reached_bytes(plan, used[0][:2], [u[:2] for u in used]) > own
    assert plan.cache.device_bytes == 0, "there is no GPU here"


def test_what_runs_a_plan_takes_its_tables_along():
    plan = make_plan(3, 2, 1)
    used = FakeWorld(2).run(use, plan, "sdpa")
    died = [weakref.ref(x.cache) for layout, runtime, _ in used for x in (layout, runtime, *runtime.comms)]
    everything = plan.nbytes
    gc.disable()
    try:
        del used
        assert not any(ref() for ref in died)
    finally:
        gc.enable()
    assert everything > plan.nbytes == reached_bytes(plan)
    died = [weakref.ref(x) for x in (plan.cache, plan.rank(0).host.cache)]
    del plan
    gc.collect()
    assert not any(ref() for ref in died)


@pytest.mark.parametrize("degree", (0, 1))
def test_clear_drops_tables_and_the_next_call_makes_them_anew(degree):
    plan = make_plan(4, 2, degree)

    def rank(transport) -> tuple[int, int]:
        layout, runtime, first = use(transport, plan, "sdpa_ol")
        transport.barrier()
        full = plan.nbytes
        transport.barrier()
        plan.cache.clear()
        transport.barrier()
        cleared = plan.nbytes
        assert cleared < full and not len(runtime.cache) + len(layout.cache) + len(plan.rank(transport.rank).cache)
        transport.barrier()
        assert torch.equal(results(layout, runtime), first)
        transport.barrier()
        assert plan.nbytes == full
        transport.barrier()
        return full, cleared

    first, second = FakeWorld(2, timeout_s=60).run(rank)
    assert first == second


def test_copies_of_a_plan_begin_without_tables():
    plan = make_plan(5, 1, 1)
    use(SingleTransport(), plan, "sdpa")
    plan.slices.tensors()
    for again in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert again == plan and again.cache is not plan.cache and not len(again.cache)
        assert again.nbytes == reached_bytes(again) < plan.nbytes
        assert again.rank(0).host.cache.nbytes == again.rank(0).host.array.nbytes
    assert not len(copy.copy(plan).cache)
    part = pickle.loads(pickle.dumps(plan.rank(0)))
    assert len(part.cache) == 0 and part.joined == plan.rank(0).joined


def test_bytes_of_one_launch(monkeypatch):
    """The tables of attention in one launch, which needs GPUs to run."""
    plan = make_plan(7, 2, 1)
    attention = nvlink.FusedAttention(plan, SingleTransport(), True)
    assert attention.part.rank == 0 and attention.cache.nbytes == reached_bytes(attention.part)
    assert isinstance(FusedLayout(plan).part(1).arrays, list)

    class Made:
        def __init__(self, part, *_) -> None:
            self.mask = RemoteMask(part.slices, part.local_rows, part.base, part.arrivals, None, 0)
            self.cache, self.is_now = self.mask.cache, True

        def is_current(self) -> bool:
            return self.is_now

    monkeypatch.setattr(nvlink, "Launches", Made)
    monkeypatch.setattr(nvlink, "symm_group", lambda *_: None)
    q = torch.zeros(TOTAL, 2, 8, dtype=torch.bfloat16)
    x = Operands(q, q, q, attention.part.slices, AttnOptions(1.0))
    made, *_ = attention._of(x)
    assert attention._of(x)[0] is made and len(attention.cache) == 1
    made.is_now, died = False, weakref.ref(made)
    made.group = None
    del made
    anew, *_ = attention._of(x)
    assert anew.is_current() and len(attention.cache) == 1 and died() is None
    attention.cache.clear()
    assert len(attention.cache) == 0 and attention._of(x)[0] is not anew
