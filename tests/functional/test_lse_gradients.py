# SPDX-License-Identifier: Apache-2.0
"""Losses of lse, such as a z-loss, on one device; over ranks test_dist_attn and test_index_rows draw such losses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dist_attn import Case, make_policy, make_problem

from magi_attention.api import block_sparse_attn_func, flex_flash_attn_func
from magi_attention.comm.transport.base import SingleTransport
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.common.slices import SliceTable
from magi_attention.functional import AttnPolicy, AttnRuntime, TokenLayout, shard
from magi_attention.functional.dist_attn import dist_attn
from magi_attention.functional.fa4 import ffa_fa4_func
from magi_attention.functional.flex_flash_attn import flex_flash_attn_func as one_device
from magi_attention.kernels import default_registry
from magi_attention.kernels.dropout import Dropout
from magi_attention.meta.planner import build_plan
from magi_attention.testing.masks import random_slices

F64, NEG_INF = torch.float64, float("-inf")


@settings(max_examples=60, deadline=None, print_blob=True)
@given(
    seed=st.integers(0, 10**6),
    softcap=st.sampled_from([0.0, 3.0]),
    layout=st.sampled_from(["", "sh", "ssh"]),
    function=st.sampled_from(["flex", "fa4"]),
)
def test_on_one_device(seed: int, softcap: float, layout: str, function: str) -> None:
    """Beside numerical derivatives, which know of no formula for any gradient."""
    rng, gen = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    tq, tk = (int(n) for n in rng.integers(1, 12, 2))
    q_ranges, k_ranges, types = SliceTable(random_slices(rng, tq, tk, max_slices=4)).tensors()
    shapes = [(tq, 4, 8), (tk, 2, 8), (tk, 2, 4)]
    sink_shape = {"": None, "sh": (2, 4), "ssh": (tq, 2, 4)}[layout if function == "flex" else ""]
    inputs = [torch.randn(s, generator=gen, dtype=F64).requires_grad_() for s in [*shapes, sink_shape] if s]

    def loss(q, k, v, sink=None):
        if function == "fa4":
            out, lse = ffa_fa4_func(q, k, v, q_ranges, k_ranges, types, softcap=softcap)
        else:
            options = dict(softcap=softcap, sink=sink, sink_layout=layout or "sh")
            out, meta = flex_flash_attn_func(q, k, v, q_ranges, k_ranges, types, **options)
            lse = meta.lse
        return out.sin().sum(), lse.masked_fill(lse == NEG_INF, 0.0).square().sum()

    assert torch.autograd.gradcheck(loss, inputs, atol=1e-5, rtol=1e-3, fast_mode=True)


@pytest.mark.parametrize("is_blocks", [False, True])
def test_rows_that_see_nothing(is_blocks: bool) -> None:
    """The slope of their loss is infinite or NaN, and their dout may be NaN; nothing of it shows."""
    q, k, v = (torch.randn(12, 2, 8, dtype=F64, requires_grad=True) for _ in range(3))
    if is_blocks:
        blocks = torch.tensor([[True, False, False], [False, False, False], [True, True, False]])
        out, meta = block_sparse_attn_func(q, k, v, blocks, 4)
    else:
        ranges = torch.tensor([[0, 4], [8, 12]])
        out, meta = one_device(q, k, v, ranges, ranges, torch.tensor([1, 0]))
    assert (meta.lse[4:8] == NEG_INF).all() and meta.lse[:4].isfinite().all()
    dout = torch.randn_like(out)
    dout[4:8] = float("nan")
    dlse = torch.ones_like(meta.lse)
    dlse[4:6], dlse[6:8] = float("inf"), float("nan")
    grads = torch.autograd.grad((out, meta.lse), (q, k, v), (dout, dlse))
    assert all(x.isfinite().all() for x in grads) and not grads[0][4:8].any() and grads[0][:4].any()


def test_a_row_that_sees_its_sink_alone() -> None:
    """Its lse is that of the sink, and so is the slope."""
    q, k, v = (torch.randn(4, 2, 8, dtype=F64, requires_grad=True) for _ in range(3))
    sink = torch.randn(3, 2, dtype=F64, requires_grad=True)
    nothing = torch.zeros((0, 2), dtype=torch.int32)
    _, meta = flex_flash_attn_func(q, k, v, nothing, nothing, sink=sink)
    (dsink,) = torch.autograd.grad(meta.lse.sum(), sink)
    torch.testing.assert_close(dsink, 4 * sink.softmax(0))


@pytest.mark.parametrize("cp", [1, 3])
def test_dropout_leaves_lse_alone(cp: int) -> None:
    """lse is that of all weights, so the gradient of a loss of lse alone is the one without dropout."""
    case = Case(31, cp, 2, False, 0, (4, 2), "sdpa_ol", True, 0.0, False, False, True)
    plan, _, _, tensors, sink = make_problem(case)

    def rank(transport, dropout, uses_out):
        layout = TokenLayout(plan, transport)
        runtime = AttnRuntime(plan, transport, default_registry(), make_policy(case))
        leaves = [shard(x, layout).detach().requires_grad_() for x in tensors[:3]]
        leaves.append(sink.clone().requires_grad_())
        out, lse, _ = dist_attn(*leaves[:3], runtime, leaves[3], dropout=dropout)
        dlse = torch.cos(lse.detach()).nan_to_num()
        losses = [(out * shard(tensors[3], layout)).sum()] * (uses_out is not False)
        losses += [(lse * dlse)[lse.isfinite()].sum()] * (uses_out is not True)
        return torch.autograd.grad(sum(losses), leaves)

    world, dropped = FakeWorld(cp), Dropout(0.4, 5)
    of_lse, plain = world.run(rank, dropped, False), world.run(rank, None, False)
    of_out, of_both = world.run(rank, dropped, True), world.run(rank, dropped, None)
    for a, b, c, d in zip(of_lse, plain, of_out, of_both):
        for x, y, z, w in zip(a, b, c, d):
            torch.testing.assert_close(x, y, atol=1e-11, rtol=1e-11)
            torch.testing.assert_close(x + z, w, atol=1e-11, rtol=1e-11)
        assert of_lse[0][0].any() and not a[2].any()


def test_nothing_changes_where_nobody_uses_lse() -> None:
    """The backend is then asked for delta as before, and gets none."""
    seen = []

    class Watched(type(default_registry().backends[-1])):
        def backward(self, x, init=None):
            seen.append(x.delta)
            return super().backward(x, init)

    registry = default_registry().with_backend(Watched())
    plan = build_plan(SliceTable(np.array([[0, 16, 0, 16, 1]])), 16, 1)
    runtime = AttnRuntime(plan, SingleTransport(0), registry, AttnPolicy(backend="sdpa", is_backend_explicit=True))
    q = torch.randn(16, 2, 8, dtype=F64, requires_grad=True)
    for uses_lse in (False, True):
        out, lse, top = dist_attn(q, q, q, runtime, return_max_logits=True)
        assert lse.requires_grad and not top.requires_grad
        (out.sum() + (lse.sum() if uses_lse else 0)).backward()
        assert (seen.pop() is not None) is uses_lse
