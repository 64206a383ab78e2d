# SPDX-License-Identifier: Apache-2.0
"""Gradients of gradients: rows that only move have the right ones, attention refuses them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_layout import layouts, make

from magi_attention.comm.transport.base import SingleTransport
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.errors import UnsupportedError
from magi_attention.functional import AttnRuntime
from magi_attention.functional.dist_attn import dist_attn
from magi_attention.functional.fa4 import ffa_fa4_func
from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.functional.sparse.index_attn import index_attn_func
from magi_attention.functional.tokens.layout import TokenLayout, gather, roll, shard
from magi_attention.kernels import default_registry


def gradient(loss: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
    return grad


def of_penalty(loss: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """The gradient of a penalty on the gradient."""
    (grad,) = torch.autograd.grad(gradient(loss, leaf).pow(3).sum(), leaf)
    return grad


@settings(max_examples=30, deadline=None, print_blob=True)
@given(sizes=layouts, seed=st.integers(0, 1000))
def test_of_shard(sizes, seed):
    """The losses of all ranks are added, the penalty on the whole gradient is the same on all."""
    plan, generator = make(*sizes), torch.Generator().manual_seed(seed)
    x = torch.randn(plan.total_tokens, 2, dtype=torch.float64, generator=generator)

    def rank(transport):
        leaf = x.clone().requires_grad_()
        return of_penalty(shard(leaf, TokenLayout(plan, transport)).sin().sum(), leaf)

    leaf = x.clone().requires_grad_()
    want = of_penalty(leaf.sin().sum(), leaf)
    for got in FakeWorld(plan.cp_size).run(rank):
        torch.testing.assert_close(got, want)


@settings(max_examples=30, deadline=None, print_blob=True)
@given(sizes=layouts, seed=st.integers(0, 1000), is_partial=st.booleans())
def test_of_gather(sizes, seed, is_partial):
    """Every rank adds a penalty on the gradient of its rows; with partial gradients the loss is one of its own, too."""
    plan, generator = make(*sizes), torch.Generator().manual_seed(seed)
    x = torch.randn(plan.total_tokens, 2, dtype=torch.float64, generator=generator)
    weights = [1.0 + r if is_partial else 1.0 for r in range(plan.cp_size)]

    def rank(transport):
        layout = TokenLayout(plan, transport)
        leaf = shard(x, layout).requires_grad_()
        whole = gather(leaf, layout, is_partial_grad=is_partial)
        mine = of_penalty(weights[transport.rank] * whole.sin().sum(), leaf)
        return gather(mine, layout)

    leaf = x.clone().requires_grad_()
    want = of_penalty((sum(weights) if is_partial else 1.0) * leaf.sin().sum(), leaf)
    for got in FakeWorld(plan.cp_size).run(rank):
        torch.testing.assert_close(got, want)


@settings(max_examples=30, deadline=None, print_blob=True)
@given(sizes=layouts, seed=st.integers(0, 1000), shift=st.integers(-50, 50))
def test_of_roll(sizes, seed, shift):
    plan, generator = make(*sizes), torch.Generator().manual_seed(seed)
    x = torch.randn(plan.padded_tokens, 2, dtype=torch.float64, generator=generator)
    w = torch.randn(plan.padded_tokens, 2, dtype=torch.float64, generator=generator)

    def rank(transport):
        layout = TokenLayout(plan, transport)
        leaf = shard(x, layout, is_padded=True).requires_grad_()
        mine = shard(w, layout, is_padded=True)
        rolled = roll(leaf, layout, shift)
        return gather(of_penalty(rolled.sin().mul(mine).sum(), leaf), layout, keep_pad=True)

    leaf = x.clone().requires_grad_()
    want = of_penalty(leaf.roll(shift, 0).sin().mul(w).sum(), leaf)
    for got in FakeWorld(plan.cp_size).run(rank):
        torch.testing.assert_close(got, want)


LOSSES = {
    "linear": lambda out, lse: out.sum(), "square": lambda out, lse: out.square().sum(),
    "lse": lambda out, lse: lse.square().sum(),
}  # fmt: skip
RANGES = torch.tensor([[0, 16]], dtype=torch.int32)
LISTS = torch.arange(16, dtype=torch.int32).expand(16, 1, 16)


def distributed(q, k, v, sink):
    runtime = AttnRuntime(make(16, 1, 4, False), SingleTransport(), default_registry())
    return dist_attn(q, k, v, runtime, sink)


CALLS = {
    "dist_attn": distributed,
    "flex_flash_attn_func": lambda q, k, v, sink: flex_flash_attn_func(q, k, v, RANGES, RANGES, sink=sink),
    "ffa_fa4_func": lambda q, k, v, sink: ffa_fa4_func(q, k, v, RANGES, RANGES),
    "index_attn_func": lambda q, k, v, sink: index_attn_func(q, k, v, LISTS, sink=sink),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("which", range(4))
def test_attention_refuses(call, loss, which):
    """Whichever input alone requires a gradient, and where the loss is linear in out, too."""
    torch.manual_seed(0)
    tensors = [torch.randn(16, 2, 8), torch.randn(16, 1, 8), torch.randn(16, 1, 8), torch.randn(1, 2)]
    if call == "ffa_fa4_func" and which == 3:
        pytest.skip("takes no sink")
    leaf = tensors[which].requires_grad_()
    out, lse, *_ = CALLS[call](*tensors)
    grad = gradient(LOSSES[loss](out, getattr(lse, "lse", lse)), leaf)
    assert grad.requires_grad
    with pytest.raises(UnsupportedError, match="cannot be differentiated again"):
        grad.square().sum().backward()
