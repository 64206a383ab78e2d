# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that keep attention, beside plain ones: the same bits, and one forward of attention for each call."""

from __future__ import annotations

import gc
import random
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint, noop_context_fn

from magi_attention.api import (
    AttnPolicy,
    DispatchConfig,
    DistAttnConfig,
    Mask,
    OverlapConfig,
    attend,
    keep_attention,
    make_plan,
)
from magi_attention.errors import ContractError
from magi_attention.kernels.instruments import BACKWARD_RANGE, FORWARD_RANGE
from magi_attention.testing.spawn import run_processes

TOKENS, LAYERS = 90, 2


class Layer(torch.nn.Module):
    """Two calls of attention, with sinks and gradients of lse in the first."""

    def __init__(self, policy: AttnPolicy) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(24, 8 * 8), torch.nn.Linear(32, 24)
        self.sink = torch.nn.Parameter(torch.randn(1, 4))
        self.policy = policy

    def forward(self, x, plan, group=None):
        q, k, v = self.qkv(x).view(-1, 8, 8).split([4, 2, 2], dim=1)
        first, meta = attend(q, k, v, plan, group, sink=self.sink, softcap=2.0, policy=self.policy)
        second, _ = attend(first, v, k, plan, group, policy=self.policy)
        return x + self.out(second.flatten(1)) + meta.lse.exp().sum(1, keepdim=True)


def step(layers, x, plan, group, contexts) -> tuple[list[torch.Tensor], dict[str, int]]:
    """Loss and gradients, and how often attention ran."""
    layers.zero_grad()
    with profile() as seen:
        y = x
        for layer in layers:
            y = checkpoint(layer, y, plan, group, use_reentrant=False, context_fn=contexts)
        loss = y.square().sum()
        loss.backward()
    counts = {name: sum(e.name == name for e in seen.events()) for name in (FORWARD_RANGE, BACKWARD_RANGE)}
    return [loss.detach(), *(p.grad.clone() for p in layers.parameters())], counts


def compare(rank: int, world: int, seed: int, backend: str | None) -> None:
    rng = random.Random(seed)
    mask = Mask.from_lengths([40, 1, 49], causal=rng.random() < 0.7)
    config = DistAttnConfig(DispatchConfig(8), OverlapConfig(degree=rng.choice((0, 1, 2)), min_chunk_size=4))
    plan, group = make_plan(mask, world, config), dist.group.WORLD
    chunks = rng.choice((1, 2))
    policy = AttnPolicy(head_chunks=chunks, hide_tail_reduce=chunks == 1 and rng.random() < 0.5)
    torch.manual_seed(seed)
    layers = torch.nn.ModuleList(Layer(policy) for _ in range(LAYERS))
    if backend:
        for layer in layers:
            layer.compile(backend=backend, fullgraph=True)
    x = plan.shard(torch.randn(TOKENS, 24), group)
    copies = partial(keep_attention, torch.clone, torch.clone)
    (wanted, twice), *others = [
        step(layers, x, plan, group, contexts) for contexts in (noop_context_fn, keep_attention, copies)
    ]
    assert twice == {FORWARD_RANGE: 4 * LAYERS, BACKWARD_RANGE: 2 * LAYERS}
    for got, counts in others:
        assert counts == {FORWARD_RANGE: 2 * LAYERS, BACKWARD_RANGE: 2 * LAYERS}
        assert all(torch.equal(a, b) for a, b in zip(got, wanted))


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("world", [1, 2])
def test_the_same_bits_by_one_forward_of_each_call(world, backend):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    run_processes(world, compare, seed, backend)


def operands() -> tuple[list[torch.Tensor], object]:
    return [torch.randn(8, h, 4, requires_grad=True) for h in (2, 1, 1)], make_plan(Mask.causal(8), 1)


def test_what_is_kept_goes_with_the_graph_and_serves_each_backward():
    (q, k, v), plan = operands()
    kept = []

    def pack(x):
        x = x.clone()
        kept.append(weakref.ref(x))
        return x

    contexts = partial(keep_attention, pack, lambda x: x)
    out = checkpoint(lambda *x: attend(*x, plan)[0], q, k, v, use_reentrant=False, context_fn=contexts)
    loss = out.square().sum()
    first = torch.autograd.grad(loss, (q, k, v), retain_graph=True)
    assert len(kept) == 2 and all(x() is not None for x in kept)
    again = torch.autograd.grad(loss, (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    gc.disable()  # the memory of a layer must be free when its backward has run
    try:
        assert [x() for x in kept] == [None, None]
    finally:
        gc.enable()


def test_blocks_that_change_are_refused():
    (q, k, v), plan = operands()
    calls = []

    def more(q, k, v):
        calls.append(1)
        for _ in calls:
            q = attend(q, k, v, plan)[0] * 1.5
        return q.sin()

    def other_shape(q, k, v):
        calls.append(1)
        heads = 1 if len(calls) > 1 else 2
        return attend(q[:, :heads], k, v, plan)[0].square()

    def in_place(q, k, v):
        return attend(q, k, v, plan)[0].detach().mul_(2) * attend(q, k, v, plan)[0]

    for block, sentence in (
        (more, "called attention 1 times in the forward and once more"),
        (other_shape, r"gave \(8, 2, 4\) in the forward, and q is \(8, 1, 4\)"),
        (in_place, r"write out \* x in place of out.mul_\(x\)"),
    ):
        calls.clear()
        out = checkpoint(block, q, k, v, use_reentrant=False, context_fn=keep_attention)
        with pytest.raises(ContractError, match=sentence):
            out.sum().backward()
    with pytest.raises(ContractError, match="give both, or neither"):
        keep_attention(torch.clone)
