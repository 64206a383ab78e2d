# SPDX-License-Identifier: Apache-2.0
"""Dense float64 attention with autograd: the ground truth of distributed attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Truth:
    """Global results, natural order."""

    out: torch.Tensor
    lse: torch.Tensor
    max_logits: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsink: torch.Tensor | None


def dense_attention(q, k, v, mask, scale=None, softcap=0.0, sink=None):
    """out, lse, logits by the definition; -inf rows give zeros without producing NaN. ``mask`` (Tq, Tk), or
    (Hq, Tq, Tk) or (Hk, Tq, Tk) bool; ``sink`` (S, Hq) or (Tq, S, Hq)."""
    group = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    mask = mask.repeat_interleave(group, 0) if mask.dim() == 3 and len(mask) == k.shape[1] else mask
    logits = torch.einsum("qhd,khd->hqk", q, keys) * (q.shape[2] ** -0.5 if scale is None else scale)
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~mask, float("-inf"))
    joined = logits
    if sink is not None:
        extra = (sink[None] if sink.dim() == 2 else sink).permute(2, 0, 1).expand(-1, q.shape[0], -1)
        joined = torch.cat([logits, extra], dim=2)
    peak = joined.detach().amax(dim=2, keepdim=True).nan_to_num(neginf=0.0)
    mass = torch.exp(joined - peak)
    total = mass.sum(2, keepdim=True)
    weights = mass[:, :, : k.shape[0]] / total.clamp_min(torch.finfo(q.dtype).tiny)
    out = torch.einsum("hqk,khd->qhd", weights, values)
    is_empty = total == 0  # whose log would give NaN as a gradient
    lse = (total.masked_fill(is_empty, 1.0).log() + peak).masked_fill(is_empty, float("-inf"))
    return out, lse[..., 0].t(), logits


def truth(q, k, v, mask, dout, scale, softcap=0.0, sink=None, dlse=None) -> Truth:
    """Gradients of ``sum(out * dout)``, and of ``sum(lse * dlse)`` over the rows that see something."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    sink = None if sink is None else sink.detach().clone().requires_grad_()
    out, lse, logits = dense_attention(*leaves, mask, scale, softcap, sink)
    loss = (out * dout).sum()
    if dlse is not None:
        loss = loss + (lse * dlse)[lse.isfinite()].sum()
    loss.backward()
    grads = [x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves]
    dsink = None if sink is None else sink.grad
    return Truth(out.detach(), lse.detach(), logits.detach().amax(dim=(1, 2)), *grads, dsink)
