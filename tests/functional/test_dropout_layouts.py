# SPDX-License-Identifier: Apache-2.0
"""Attention dropout is the same for every number of ranks, every layout and every way to run a plan."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, note, settings
from test_dist_attn import Case, cases, make_config, make_policy, make_problem, run_rank

from magi_attention.api import Mask, attend, make_plan
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.errors import ContractError, MagiError
from magi_attention.functional import AttnPolicy, AttnRuntime, TokenLayout, shard
from magi_attention.functional.dist_attn import dist_attn
from magi_attention.kernels import AttnOptions, SdpaBackend, default_registry
from magi_attention.kernels.dropout import Dropout, DropoutMask
from magi_attention.kernels.types import BackwardOperands, Operands
from magi_attention.meta.planner import PlanOptions, build_plan
from magi_attention.testing.libraries import planner_or_skip

SHARE = 0.4


@settings(max_examples=60, deadline=None, print_blob=True)
@given(case=cases)
def test_equals_one_call_over_the_whole_sequence(case: Case) -> None:
    note(f"seed {case.seed}")
    torch.set_num_threads(1)
    plan, slices, total, tensors, sink = make_problem(case)
    if case.seed % 3 == 0:  # queries may move
        planner_or_skip()
        heads = dict(num_heads_q=case.heads[0], num_heads_kv=case.heads[1])
        plan = build_plan(slices, total, case.cp, PlanOptions(**heads, query_moves="always"), config=make_config(case))
    dropout = Dropout(SHARE, case.seed)
    args = plan, make_policy(case), tensors, sink, case.softcap
    results = FakeWorld(case.cp).run(lambda transport: run_rank(transport, *args, dropout=dropout)[:6])

    q, k, v, dout = tensors
    whole = torch.arange(total, dtype=torch.int32)
    mask, backend = DropoutMask(dropout, whole, whole), SdpaBackend()
    options = AttnOptions(8**-0.5, case.softcap, dropout_p=SHARE)
    part = backend.forward(Operands(q, k, v, slices, options, sink, mask))
    grads = backend.backward(BackwardOperands(dout, q, k, v, part.out, part.lse, slices, options, sink, dropout=mask))
    want = [part.out, part.lse, grads.dq, grads.dk, grads.dv, grads.dsink]
    for result in results:
        for got, x in zip(result[: 5 + (sink is not None)], want):
            assert torch.equal(got.isfinite(), x.isfinite())
            assert (got.nan_to_num(neginf=0) - x.nan_to_num(neginf=0)).abs().max() <= 1e-8


def inputs(total: int, heads: int = 2):
    gen = torch.Generator().manual_seed(3)
    return [torch.randn(total, heads, 8, generator=gen, dtype=torch.float64) for _ in range(3)]


def test_attend_takes_a_share_and_a_seed():
    q, k, v = inputs(64)
    plan = make_plan(Mask.causal(64), 1)
    outs = [attend(q, k, v, plan, dropout_p=p, dropout_seed=s)[0] for p, s in ((0.5, 1), (0.5, 1), (0.5, 2), (0.0, 9))]
    assert torch.equal(outs[0], outs[1]) and not torch.allclose(outs[0], outs[2])
    assert torch.equal(outs[3], attend(q, k, v, plan)[0])
    lse = [attend(q, k, v, plan, dropout_p=p, dropout_seed=1)[1].lse for p in (0.5, 0.0)]
    assert torch.equal(*lse)


@pytest.mark.parametrize(("given_p", "seed"), [(1.5, 1), (0.1, None), (0.1, "x")])
def test_attend_refuses(given_p, seed):
    q, k, v = inputs(16)
    with pytest.raises(ContractError, match="dropout"):
        attend(q, k, v, make_plan(Mask.causal(16), 1), dropout_p=given_p, dropout_seed=seed)


@pytest.mark.parametrize("check", [False, True])
def test_ranks_that_drop_otherwise_hear_of_it(check):
    """Ranks of other shares always, and of other seeds where ranks are checked."""
    plan = make_plan(Mask.causal(32), 2)

    def rank(transport):
        runtime = AttnRuntime(plan, transport, default_registry(), AttnPolicy(backend="sdpa", check=check))
        q, k, v = (shard(x, TokenLayout(plan, transport)) for x in inputs(32))
        if check:
            dist_attn(q, k, v, runtime, dropout=Dropout(0.1, 5))
        other = Dropout(0.1, 6 + transport.rank) if check else Dropout(0.1 + 0.1 * transport.rank, 5)
        with pytest.raises(MagiError, match="dropout"):
            dist_attn(q, k, v, runtime, dropout=other)

    FakeWorld(2).run(rank)


def test_compiled_models_take_new_seeds():
    """As an argument of the model, after the second one without compiling it anew."""
    plan, compiled_for = make_plan(Mask.causal(48), 1), []

    def backend(graph, _):
        compiled_for.append(graph)
        return graph.forward

    def model(q, k, v, seed):
        return attend(q, k, v, plan, dropout_p=0.3, dropout_seed=seed)[0].square().sum()

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for seed in (3, 4, 5, 6):
        losses, grads = [], []
        for run in (model, compiled):
            leaves = [x.requires_grad_() for x in inputs(48)]
            losses.append(run(*leaves, seed))
            losses[-1].backward()
            grads.append([x.grad for x in leaves])
        assert torch.equal(*losses) and all(map(torch.equal, *grads)), seed
    assert len(compiled_for) <= 2
