# SPDX-License-Identifier: Apache-2.0
"""Head chunks beside whole heads and dense float64 attention, over gloo, with and without torch.compile."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
import torch.distributed as dist
from oracle import dense_attention

from magi_attention.api import AttnPolicy, DispatchConfig, DistAttnConfig, Mask, OverlapConfig, attend, make_plan
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.testing.spawn import run_processes

TOKENS, HEADS, D = 90, (8, 4, 4, 8), (8, 8, 6, 6)  # of q, k, v and out


def operands(seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(TOKENS, h, d, dtype=dtype, generator=generator) for h, d in zip(HEADS, D)]


def step(rank: int, world: int, seed: int, dtype: torch.dtype, chunks: int, degree: int) -> tuple:
    """out, lse, max_logits and gradients of all tokens, and of the sink; twice, for their bits."""
    rng = random.Random(seed)
    mask = Mask.from_lengths([40, 1, 49], causal=rng.random() < 0.7)
    plan = make_plan(mask, world, DistAttnConfig(DispatchConfig(8), OverlapConfig(degree=degree, min_chunk_size=4)))
    group, softcap = dist.group.WORLD, rng.choice((0.0, 3.0))
    q, k, v, dout = operands(seed, dtype)
    sink = torch.linspace(-1, 1, 16, dtype=torch.float64).view(2, 8)
    policy = AttnPolicy(head_chunks=chunks, deterministic=True, high_precision_reduce=True, hide_tail_reduce=True)

    is_token = plan.shard(torch.ones(TOKENS, 1), group)  # pad rows see the sinks, too

    def run():
        local = [plan.shard(x, group).requires_grad_() for x in (q, k, v)]
        own = sink.clone().requires_grad_()
        out, meta = attend(*local, plan, group, sink=own, softcap=softcap, return_max_logits=True, policy=policy)
        (out * plan.shard(dout, group)).sum().add((meta.lse.sin() * is_token).sum()).backward()
        dist.all_reduce(own.grad)
        rows = [plan.gather(x.detach(), group) for x in (out, meta.lse, *(x.grad for x in local))]
        return [*rows, meta.max_logits, own.grad]

    first, again = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(first, again)), "the same bits"
    wanted = [x.double().requires_grad_() for x in (q, k, v)]
    own = sink.clone().requires_grad_()
    out, lse, _ = dense_attention(*wanted, torch.from_numpy(mask.to_dense()), D[0] ** -0.5, softcap, own)
    (out * dout.double()).sum().add(lse.sin().sum()).backward()
    return first, [out.detach(), lse.detach(), *(x.grad for x in wanted), own.grad]


def steps(rank: int, world: int, seed: int, degree: int) -> list[tuple]:
    return [step(rank, world, seed, torch.float64, chunks, degree) for chunks in (1, 2, 4)]


@pytest.mark.parametrize(("world", "degree"), [(1, 1), (2, 0), (3, 2)])
def test_chunks_are_whole_heads_and_dense_attention(world, degree):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    for (of_whole, _), *in_chunks in run_processes(world, steps, seed, degree):
        for got, truth in in_chunks:
            for a, b in zip(got, of_whole):
                torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10)
            for a, b in zip([*got[:5], got[6]], truth):
                torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-8)


def compiled(rank: int, world: int) -> list[torch.Tensor]:
    plan = make_plan(Mask.causal(TOKENS), world)
    found = []
    for chunks in (1, 2):
        call = torch.compile(partial(attend, plan=plan, policy=AttnPolicy(head_chunks=chunks)), backend="aot_eager")
        q, k, v, dout = (plan.shard(x, dist.group.WORLD) for x in operands(1, torch.float64))
        local = [x.clone().requires_grad_() for x in (q, k, v)]
        call(*local)[0].backward(dout)
        found.append([x.grad for x in local])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10)
    return found[1]


def test_in_a_compiled_model():
    assert all(len(grads) == 3 for grads in run_processes(2, compiled))


@pytest.mark.parametrize(
    ("options", "chunks", "error", "sentence"),
    [
        ({}, 3, ContractError, "no divisor of the 4 kv heads"),
        ({"dropout_p": 0.1, "dropout_seed": 1}, 2, UnsupportedError, "set head_chunks to 1"),
    ],
)
def test_refused(options, chunks, error, sentence):
    q, k, v, _ = operands(1, torch.float32)
    with pytest.raises(error, match=sentence):
        attend(q, k, v, make_plan(Mask.causal(TOKENS), 1), policy=AttnPolicy(head_chunks=chunks), **options)


@pytest.mark.parametrize("chunks", [0, -1, 1.5, "two"])
def test_a_number_of_chunks(chunks):
    with pytest.raises(ContractError, match="head_chunks"):
        AttnPolicy(head_chunks=chunks)
