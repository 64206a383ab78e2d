# SPDX-License-Identifier: Apache-2.0
"""A model around attend and the methods of a plan, compiled without graph breaks: as it is without, on one rank and on
two, and never with another plan than the one it is given."""

from __future__ import annotations

import copy
import gc
import os

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.debugging import aot_eager

from magi_attention import api
from magi_attention.comm.transport.base import SingleTransport
from magi_attention.common.mask import Mask
from magi_attention.errors import ContractError, UnknownKeyError
from magi_attention.testing.spawn import run_processes

TOTAL = 90


def make_plan(world: int, cut: int = 40, degree: int = 1, total: int = TOTAL):
    config = api.DistAttnConfig(api.DispatchConfig(chunk_size=8), api.OverlapConfig(degree=degree, min_chunk_size=8))
    return api.make_plan(Mask.varlen([0, cut, total], causal=True), world, config)


def model(x, w, sink, plan, group=None, policy=None):
    """Everything that a plan has; the weight makes gradients differ between ranks."""
    mine = plan.shard(x * w, group, pad_value=2.0) + plan.shard((x * w).t(), group, dim=1, is_partial_grad=True).t()
    q, k, v = mine.view(-1, 4, 8).split([2, 1, 1], 1)
    out, meta = api.attend(
        q, k, v, plan, group, sink=sink, softmax_scale=0.3, softcap=2, return_max_logits=True, policy=policy
    )
    turned = plan.roll(plan.roll(out.reshape(-1, 16), -1, group).t(), 3, group, dim=1).t()
    places = plan.positions(group) + 1000 * plan.positions(group, per_document=True)
    labels = plan.labels(places, 2, group=group) + 1000 * plan.labels(places, group=group, cu_seqlens=[0, 30, len(x)])
    whole = plan.gather(turned * places[:, None], group)
    partial = plan.gather(mine.exp().t(), group, is_partial_grad=True, dim=1).t()
    return whole, partial, meta.lse, meta.max_logits, places, labels, plan.positions(plan.cp_size - 1)


def differences(run, rank: int, *args, total: int = TOTAL) -> float:
    """Between ``run`` and the plain model, in results and gradients."""
    found = []
    for f in (model, run):
        torch.manual_seed(total)
        x, sink = torch.randn(total, 32, requires_grad=True), torch.randn(2, 2, requires_grad=True)
        w = torch.tensor(1.0 + rank, requires_grad=True)
        whole, partial, lse, *others = f(x, w, sink, *args)
        (whole.cos().sum() + (partial * (1 + rank)).sum() + lse.sin().sum()).backward()
        assert not any(y.requires_grad for y in others)
        found.append([whole.detach(), partial.detach(), lse.detach(), *others, x.grad, w.grad, sink.grad])
    for a, b in zip(*found):
        assert a.shape == b.shape and a.dtype == b.dtype
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(*found))


def counting():
    """The model compiled in one piece, and the graphs made of it."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, examples):
        graphs.append(graph)
        return aot_eager(graph, examples)

    return torch.compile(model, fullgraph=True, backend=backend), graphs


def many_plans(rank: int, world: int, degree: int, lengths: tuple[int, ...] = (64, 120, 128)) -> tuple[float, int]:
    """The largest difference, and how often the model is compiled for plans of many masks; then of other lengths."""
    run, graphs = counting()
    worst = max(differences(run, rank, make_plan(world, cut, degree)) for cut in range(10, 80, 15))
    first, dense = make_plan(world, 33, degree), Mask.full(TOTAL)
    worst = max(worst, differences(run, rank, first.with_mask(dense)), differences(run, rank, first))
    worst = max(worst, differences(run, rank, copy.deepcopy(first)))
    masks = len(graphs)
    worst = max([worst, *(differences(run, rank, make_plan(world, 50, degree, n), total=n) for n in lengths)])
    assert len(graphs) <= masks + len(lengths)
    return worst, masks


def test_on_one_rank():
    worst, graphs = many_plans(0, 1, 1)
    assert worst < 1e-4 and graphs == 2  # for one mask, and then for any


def on_two_ranks(rank: int, world: int) -> list[tuple[float, int]]:
    found = []
    os.environ["MAGI_ATTENTION_BWD_HIDE_TAIL_REDUCE"] = "1"
    for degree, lengths in ((0, ()), (2, (128,))):
        found.append(many_plans(rank, world, degree, lengths))
    return found


def groups_and_policies(rank: int, world: int) -> list[float]:
    run, _ = counting()
    plan, alone = make_plan(world), make_plan(1)
    subgroup = [dist.new_group([0]), dist.new_group([1])][rank]
    worst = []
    for group, policy in (
        (dist.group.WORLD, api.AttnPolicy(deterministic=True, hide_tail_reduce=True)),
        (dist.new_group(), api.AttnPolicy(precision=torch.bfloat16, backend="sdpa")),
    ):
        torch._dynamo.reset()
        worst.append(differences(run, rank, plan, group, policy))
    torch._dynamo.reset()
    for group in (None, subgroup, SingleTransport(), SingleTransport()):
        worst.append(differences(run, rank, alone, group))
    return worst


def two_ranks(rank: int, world: int) -> tuple[list[tuple[float, int]], list[float]]:
    return on_two_ranks(rank, world), groups_and_policies(rank, world)


def test_on_two_ranks():
    for found, of_groups in run_processes(2, two_ranks):
        assert all(worst < 1e-4 for worst, _ in found), found
        assert found[0][1] == 2 and found[1][1] <= 5, found
        assert max(of_groups) < 1e-4, of_groups


def test_policies_whose_numbers_differ():
    run, _ = counting()
    plan = make_plan(1)
    for margin in (0, 2, 5, 7):
        assert differences(run, 0, plan, None, api.AttnPolicy(fwd_sm_margin=margin)) < 1e-4


class Layer(torch.nn.Module):
    def __init__(self, plan) -> None:
        super().__init__()
        self.plan, self.qkv = plan, torch.nn.Linear(16, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).view(-1, 4, 8).split([2, 1, 1], 1)
        return api.attend(q, k, v, self.plan)[0]


def test_a_module_may_hold_the_plan_and_get_another():
    torch.manual_seed(0)
    layer = Layer(make_plan(1, 20))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(TOTAL, 16)
    for cut in (20, 60, 20):
        layer.plan = make_plan(1, cut)
        assert torch.equal(layer(x), compiled(x))


def step(x, plan):
    q = plan.shard(x).view(-1, 2, 8)
    return plan.gather(api.attend(q, q, q, plan)[0])


def test_a_backward_may_come_when_the_plan_is_dropped():
    """A step that makes its own plan drops it before the backward; plans of as many steps are kept as keys are."""
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    losses, wants = [], []
    for cut in (10, 20, 30, 40):
        x = torch.randn(TOTAL, 16, requires_grad=True)
        step(x, make_plan(1, cut)).sin().sum().backward()
        wants.append(x.grad)
        y = x.detach().requires_grad_()
        losses.append((y, compiled(y, make_plan(1, cut)).sin().sum()))
        gc.collect()
    for want, (y, loss) in zip(wants, losses):
        loss.backward()
        torch.testing.assert_close(y.grad, want)


def test_a_plan_that_is_gone_is_missed():
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    x = torch.randn(TOTAL, 16, requires_grad=True)
    loss = compiled(x, make_plan(1)).sum()
    api.clear_cache()
    gc.collect()
    with pytest.raises(UnknownKeyError, match="plan of a compiled model does not exist"):
        loss.backward()


def test_wrong_calls_are_sentences():
    plan, x = make_plan(1), torch.randn(TOTAL, 16)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with pytest.raises(ContractError, match="shard .dispatch. takes 90 rows"):
        compiled(torch.randn(TOTAL + 1, 16), plan)
    with pytest.raises(ContractError, match="plan is for 2 ranks and the group has 1"):
        compiled(x, make_plan(2))

    def traced(x, plan):
        return api.attend(x, x, x, plan, trace=[])[0]

    def scaled(x, plan, scale):
        return api.attend(x, x, x, plan, softmax_scale=scale)[0]

    q = x.view(-1, 2, 8)
    with pytest.raises(Exception, match="trace= collects nothing in a compiled model"):
        torch.compile(traced, fullgraph=True, backend="aot_eager")(q, plan)
    with pytest.raises(Exception, match="multiply q by it"):
        torch.compile(scaled, fullgraph=True, backend="aot_eager")(q, plan, torch.nn.Parameter(torch.ones(())))
    with pytest.raises(Exception, match="no process group of this process"):
        torch.compile(lambda x, g: plan.shard(x, g), fullgraph=True, backend="aot_eager")(x, "world")


@pytest.mark.parametrize("loss", ["linear", "square"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@torch._functorch.config.patch(donated_buffer=False)  # which is an error of its own
def test_a_gradient_of_a_gradient_is_refused(loss, backend):
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    plan, x = make_plan(1), torch.randn(TOTAL, 16, requires_grad=True)
    out = compiled(x, plan)
    (grad,) = torch.autograd.grad(out.sum() if loss == "linear" else out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward|cannot be differentiated again"):
        grad.square().sum().backward()
