# SPDX-License-Identifier: Apache-2.0
"""Under autocast the public functions take q, k and v in its dtype, as torch's own attention does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from magi_attention.api import Mask, attend, block_sparse_attn_func, flex_flash_attn_func, index_attn_func, make_plan
from magi_attention.testing.spawn import run_processes

TOKENS = 48
RANGE = torch.tensor([[0, TOKENS]], dtype=torch.int32)
CAUSAL = torch.ones(1, dtype=torch.int32)
PLAN = make_plan(Mask.causal(TOKENS), 1)


def by_index(q, k, v):
    keys = torch.ones(TOKENS, TOKENS).tril().bool()
    lists = torch.where(keys, torch.arange(TOKENS), -1)[:, None].expand(TOKENS, k.shape[1], TOKENS)
    return index_attn_func(q, k, v, lists.int())[0]


CALLS = {
    "attend": lambda q, k, v: attend(q, k, v, PLAN)[0],
    "flex_flash_attn_func": lambda q, k, v: flex_flash_attn_func(q, k, v, RANGE, RANGE, CAUSAL)[0],
    "flex_flash_attn_func, names": lambda q, k, v: flex_flash_attn_func(
        v=v, k=k, q=q, q_ranges=RANGE, k_ranges=RANGE, attn_type_map=CAUSAL
    )[0],
    "index_attn_func": by_index,
    "block_sparse_attn_func": lambda q, k, v: block_sparse_attn_func(q, k, v, torch.ones(3, 3).tril().bool(), 16)[0],
}


def operands(*dtypes: torch.dtype, rows: int = TOKENS) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(rows, heads, 8, dtype=dtype, requires_grad=True) for heads, dtype in zip((4, 2, 2), dtypes)]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_operands_take_the_dtype_of_autocast(name, dtype):
    """The same bits as of operands that the caller has cast, so nothing inside computes in other dtypes either."""
    call = CALLS[name]
    q, k, v = operands(torch.float32, torch.float32, dtype)
    with torch.autocast("cpu", dtype=dtype):
        out = call(q, k, v)
        theirs = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), enable_gqa=True)
    assert out.dtype == theirs.dtype == dtype
    out.sum().backward()
    given = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    want = call(*given)
    want.sum().backward()
    assert torch.equal(out, want)
    for x, y in zip((q, k, v), given):
        assert x.grad.dtype == x.dtype and torch.equal(x.grad, y.grad.to(x.dtype))


@pytest.mark.parametrize("name", CALLS)
def test_a_backward_inside_autocast_is_the_same(name):
    q, k, v = operands(torch.float32, torch.float32, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.autograd.grad(CALLS[name](q, k, v).sum(), (q, k, v))
        out = CALLS[name](q, k, v).sum()
    outside = torch.autograd.grad(out, (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(inside, outside))


@pytest.mark.parametrize("name", CALLS)
def test_float64_stays_and_disabled_autocast_casts_nothing(name):
    double = operands(*[torch.float64] * 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert CALLS[name](*double).dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert CALLS[name](*operands(*[torch.float32] * 3)).dtype == torch.float32


@pytest.mark.parametrize("name", ("attend", "flex_flash_attn_func", "index_attn_func"))
def test_compiled(name):
    q, k, v = operands(torch.float32, torch.float32, torch.bfloat16)
    compiled = torch.compile(CALLS[name], fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(compiled(q, k, v), CALLS[name](q, k, v))


def over_ranks(rank: int, world: int) -> bool:
    plan = make_plan(Mask.varlen([0, 13, TOKENS], causal=True), world)
    q, k, v = (plan.shard(x.detach()) for x in operands(torch.float32, torch.float32, torch.bfloat16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(q, k, v, plan)[0]
    return torch.equal(out, attend(q.bfloat16(), k.bfloat16(), v, plan)[0])


def test_over_ranks():
    assert run_processes(2, over_ranks) == [True, True]
