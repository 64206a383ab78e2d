# SPDX-License-Identifier: Apache-2.0
"""Autocast on a GPU: float32 operands run on our kernels, in its dtype."""

from __future__ import annotations

import pytest
import torch

from magi_attention.api import Mask, attend, flex_flash_attn_func, make_plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("function", ("attend", "flex_flash_attn_func"))
def test_same_bits_as_of_cast_operands(dtype, function):
    tokens = 640
    plan = make_plan(Mask.causal(tokens), 1)
    ranges = torch.tensor([[0, tokens]], dtype=torch.int32, device="cuda")
    kinds = torch.ones(1, dtype=torch.int32, device="cuda")

    def call(q, k, v):
        if function == "attend":
            return attend(q, k, v, plan)[0]
        return flex_flash_attn_func(q, k, v, ranges, ranges, kinds)[0]

    draw = torch.Generator("cuda").manual_seed(0)
    x = [torch.randn(tokens, h, 64, device="cuda", generator=draw).requires_grad_() for h in (8, 2, 2)]
    cast = [y.detach().to(dtype).requires_grad_() for y in x]
    want = call(*cast)
    for _ in range(3):  # the third call of flex_flash_attn_func is a replay
        for y in x:
            y.grad = None
        with torch.autocast("cuda", dtype=dtype):
            out = call(*x)
        assert out.dtype == dtype and torch.equal(out, want)
        out.sum().backward()
        assert all(y.grad.dtype == torch.float32 and y.grad.isfinite().all() for y in x)
