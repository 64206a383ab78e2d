# SPDX-License-Identifier: Apache-2.0
"""Ground truth of the extensions: masked softmax with sinks in float64, by the definition."""

from __future__ import annotations

import torch

NEG_INF = float("-inf")


def dense_attention(q, k, v, allowed, scale, softcap=0.0, sink=None):
    """``(out (Tq, Hq, Dv), lse (Tq, Hq))``; ``allowed`` (Hq or 1, Tq, Tk) bool; ``sink`` (Tq or 1, S, Hq)."""
    group = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = torch.einsum("qhd,khd->hqk", q, keys) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    exponents = torch.where(allowed, logits, NEG_INF)
    if sink is not None:
        extra = sink.permute(2, 0, 1).expand(-1, q.shape[0], -1)
        exponents = torch.cat([exponents, extra], dim=2)
    top = exponents.detach().amax(2, keepdim=True).clamp(min=-1e300) if exponents.shape[2] else 0.0
    mass = torch.exp(exponents - top)
    total = mass.sum(2, keepdim=True)
    weights = mass[..., : k.shape[0]] / torch.where(total == 0, 1.0, total)
    return torch.einsum("hqk,khd->qhd", weights, values), (total.log() + top)[..., 0].t()


def assert_equal_gradients(got, want, leaves, dout, names, tolerance=1e-10):
    """Outputs ``got`` and ``want`` and their gradients with respect to ``leaves``, which both were made from."""
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    ours = torch.autograd.grad(got, leaves, dout)
    theirs = torch.autograd.grad(want, leaves, dout.to(want.dtype))
    for name, a, b in zip(names, ours, theirs):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"d{n}: {text}")
