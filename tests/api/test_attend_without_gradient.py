# SPDX-License-Identifier: Apache-2.0
"""``attend`` where no gradient is wanted: the bits of a call with one, without a node of autograd."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from magi_attention.api import Mask, attend, make_plan
from magi_attention.errors import UnsupportedError
from magi_attention.functional import dist_attn


@pytest.fixture
def tensors() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(48, heads, 16, generator=generator) for heads in (4, 2, 2))


PLAN = make_plan(Mask.varlen([0, 17, 48], causal=True), 1)


@pytest.mark.parametrize("way", ["detached", "no_grad", "inference_mode"])
def test_the_same_bits_without_autograd(tensors, way, monkeypatch):
    wanted, of_lse = attend(*(x.clone().requires_grad_() for x in tensors), PLAN)
    assert wanted.requires_grad

    def refuse(*_):
        raise AssertionError("a call without a gradient went through autograd")

    monkeypatch.setattr(dist_attn, "_apply", refuse)
    mode = {"detached": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[way]
    given = tensors if way == "detached" else tuple(x.clone().requires_grad_() for x in tensors)
    with mode():
        out, meta = attend(*given, PLAN)
    assert torch.equal(out, wanted) and torch.equal(meta.lse, of_lse.lse) and not out.requires_grad


@pytest.mark.parametrize("wants", range(4))
def test_any_of_the_inputs_may_want_a_gradient(tensors, wants):
    given = [*(x.clone() for x in tensors), torch.zeros(1, 4)]
    given[wants].requires_grad_()
    out, _ = attend(*given[:3], PLAN, sink=given[3])
    (grad,) = torch.autograd.grad(out.square().sum(), given[wants])
    assert grad.abs().sum() > 0


def test_tangents_are_not_dropped(tensors):
    q, k, v = tensors
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="no forward-mode derivative"):
        attend(forward_ad.make_dual(q, q), k, v, PLAN)
    with pytest.raises(UnsupportedError, match="no transform of torch.func"):
        torch.vmap(lambda x: attend(x, k, v, PLAN)[0])(q[None])
