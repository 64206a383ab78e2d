# SPDX-License-Identifier: Apache-2.0
"""Attention between torch's functional collectives, whose results have no address before an op waits for them: heads
are exchanged for tokens before attention, and back after it."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

from magi_attention.api import Mask, attend, make_plan
from magi_attention.functional import dist_attn as module
from magi_attention.testing.ref_attn import ref_attn_func
from magi_attention.testing.spawn import run_processes

DOCUMENTS, HEADS = [0, 5, 24, 40], (4, 2, 2)
TOTAL = DOCUMENTS[-1]


def half_of_each(x: torch.Tensor) -> torch.Tensor:
    """(2 n, ...) of which each of two ranks gets half; without a wait."""
    got = collectives.all_to_all_single(x.contiguous(), None, None, dist.group.WORLD)
    assert isinstance(got, collectives.AsyncCollectiveTensor)
    return got


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return half_of_each(x)

    @staticmethod
    def backward(ctx, grad):
        return half_of_each(grad)


exchange = Exchange.apply


def to_heads(x: torch.Tensor) -> torch.Tensor:
    """This rank's half of the tokens, with all heads, to all tokens with half of the heads."""
    return exchange(x.unflatten(1, (2, -1)).movedim(1, 0).flatten(0, 1))


def to_tokens(x: torch.Tensor) -> torch.Tensor:
    return exchange(x).unflatten(0, (2, -1)).movedim(0, 1).flatten(1, 2)


def addresses(run, seen: list[int]):
    def spy(*args, **kwargs):
        seen.extend(x.data_ptr() for x in args if isinstance(x, torch.Tensor))
        return run(*args, **kwargs)

    return spy


def exchanged(rank: int, world: int, wants_gradient: bool) -> None:
    torch.manual_seed(0)
    whole = [torch.randn(TOTAL, h, 8, dtype=torch.float64, requires_grad=True) for h in HEADS]
    weight = torch.randn(TOTAL, HEADS[0], 8, dtype=torch.float64)
    mask = Mask.varlen(DOCUMENTS, causal=True)
    want = ref_attn_func(*whole, torch.from_numpy(mask.to_dense()))[0]
    (want * weight).sum().backward()

    local = [x.detach().chunk(2)[rank].clone().requires_grad_(wants_gradient) for x in whole]
    seen: list[int] = []
    spies = {name: addresses(getattr(module, name), seen) for name in ("run_forward", "run_backward")}
    with mock.patch.multiple(module, **spies):
        out = to_tokens(attend(*map(to_heads, local), make_plan(mask, 1))[0])
        torch.testing.assert_close(out, want.detach().chunk(2)[rank])
        if wants_gradient:
            (out * weight.chunk(2)[rank]).sum().backward()
            for x, y in zip(local, whole):
                torch.testing.assert_close(x.grad, y.grad.chunk(2)[rank])
    assert len(seen) == (9 if wants_gradient else 3) and all(seen), seen


def with_a_plan_of_ranks(rank: int, world: int) -> None:
    plan = make_plan(Mask.varlen(DOCUMENTS, causal=True), world)
    torch.manual_seed(rank)
    x = [torch.randn(plan.shard_sizes[rank], h, 8) for h in HEADS]
    later, waited = ([collectives.all_reduce(t, "sum", dist.group.WORLD) for t in x] for _ in range(2))
    assert torch.equal(attend(*later, plan)[0], attend(*(t.trigger_wait() for t in waited), plan)[0])


def on_two_ranks(rank: int, world: int) -> None:
    exchanged(rank, world, True)
    exchanged(rank, world, False)
    with_a_plan_of_ranks(rank, world)


def test_heads_for_tokens_and_back() -> None:
    run_processes(2, on_two_ranks)
