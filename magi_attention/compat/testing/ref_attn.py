# SPDX-License-Identifier: Apache-2.0
"""Dense attention with autograd, to compare with. Memory grows with queries x keys x heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from magi_attention.common.forward_meta import AttnForwardMeta
from magi_attention.errors import ContractError, UnsupportedError

ONLINE_BLOCK = 1024  # keys at a time with online_softmax


def ref_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    *,
    sink: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    layout: str = "thd",
    sink_layout: str = "sh",
    backend: str = "sdpa",
    high_precision: bool = False,
    return_lse: bool = False,
    return_max_logits: bool = False,
    online_softmax: bool = False,
) -> tuple[torch.Tensor, AttnForwardMeta]:
    """``out = softmax(scale q k^T) v`` over the allowed pairs; a row without any gives out 0 and lse -inf.

    Args:
        q, k, v: (tokens, heads, head dim); query head h uses KV head ``h // (Hq // Hk)``.
        mask: bool ``(Tq, Tk)``, True where attention is allowed.
        sink: extra logits of the denominator, ``(s, Hq)`` for layout ``sh``, ``(Tq, s, Hq)`` for ``ssh``;
            neither scaled nor capped.
        softmax_scale: ``head_dim ** -0.5`` by default.
        softcap: if above 0, logits become ``softcap * tanh(logits / softcap)``.
        backend: ``sdpa`` computes out by torch's function (without softcap, which it has not), ``torch``
            by matrix products and a softmax.
        high_precision: compute in float64; out has q's dtype, float64 if q has.
        online_softmax: the ``torch`` way in blocks of 1024 keys, for long sequences.
    Returns:
        (out in q's dtype, AttnForwardMeta): lse float32 (float64 if computed so) ``(Tq, Hq)`` and max_logits
        ``(Hq,)`` where asked for, else None.
    """
    _check(q, k, v, mask, layout, backend)
    group = q.shape[1] // k.shape[1]
    wide = torch.float64 if high_precision else q.dtype
    q_HTD, k_HTD, v_HTD = (
        x.to(wide).repeat_interleave(copies, dim=1).transpose(0, 1) for x, copies in ((q, 1), (k, group), (v, group))
    )
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    allowed = mask.bool()
    blocks = ONLINE_BLOCK if online_softmax else max(len(k), 1)
    use_sdpa = backend == "sdpa" and not online_softmax and softcap == 0.0
    out_HTD, lse_HT, peak_H = _blockwise(q_HTD, k_HTD, v_HTD, allowed, scale, softcap, blocks)
    if use_sdpa:
        out_HTD = _sdpa(q_HTD, k_HTD, v_HTD, allowed, scale)
    if sink is not None:
        total_HT = _logaddexp(lse_HT, _sink_lse(sink, sink_layout, len(q)).to(lse_HT.dtype))
        out_HTD = out_HTD * _weight(lse_HT, total_HT).to(out_HTD.dtype)
        lse_HT = total_HT
    meta = AttnForwardMeta(
        lse=lse_HT.transpose(0, 1) if return_lse else None, max_logits=peak_H if return_max_logits else None
    )
    return out_HTD.transpose(0, 1).to(q.dtype), meta


def _check(q, k, v, mask, layout: str, backend: str) -> None:
    if layout != "thd":
        raise UnsupportedError(f"layout={layout!r}: only 'thd' is there; transpose the tensors.")
    if backend not in ("sdpa", "torch"):
        raise ContractError(f"backend={backend!r} is unknown; use 'sdpa' or 'torch'.")
    if q.shape[1] % k.shape[1] or k.shape != (*v.shape[:2], k.shape[2]):
        raise ContractError(f"Heads of q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit.")
    if mask.is_floating_point():
        raise ContractError(f"mask is {mask.dtype}; give booleans: `mask == 0` of one that is added to logits.")
    if tuple(mask.shape) != (len(q), len(k)):
        raise ContractError(f"mask has shape {tuple(mask.shape)}; give {(len(q), len(k))}.")


def _sdpa(q_HTD, k_HTD, v_HTD, allowed, scale) -> torch.Tensor:
    # Rows that see nothing are NaN in some versions of torch, so they see everything and are zeroed.
    seen = allowed.any(dim=1)
    filled = allowed | ~seen[:, None]
    out = F.scaled_dot_product_attention(q_HTD[None], k_HTD[None], v_HTD[None], attn_mask=filled, scale=scale)
    return torch.where(seen[None, :, None], out[0], 0.0)


def _blockwise(q_HTD, k_HTD, v_HTD, allowed, scale, softcap, block):
    """Blocks of keys merged by their log-sum-exp; softmax in at least float32."""
    heads, rows = q_HTD.shape[:2]
    wide = torch.promote_types(q_HTD.dtype, torch.float32)
    lse = torch.full((heads, rows), -torch.inf, dtype=wide, device=q_HTD.device)
    out = torch.zeros((heads, rows, v_HTD.shape[-1]), dtype=wide, device=q_HTD.device)
    peak_H = torch.full((heads,), -torch.inf, dtype=wide, device=q_HTD.device)
    for start in range(0, k_HTD.shape[1], block):
        keys, values = k_HTD[:, start : start + block], v_HTD[:, start : start + block]
        logits = (q_HTD @ keys.transpose(1, 2)).to(wide) * scale
        if softcap > 0.0:
            logits = softcap * torch.tanh(logits / softcap)
        visible = allowed[:, start : start + block]
        logits = logits.masked_fill(~visible, -torch.inf)
        if rows:
            peak_H = torch.maximum(peak_H, logits.detach().amax(dim=(1, 2)))
        shift = logits.detach().amax(dim=2, keepdim=True).nan_to_num(neginf=0.0)
        weight = torch.exp(logits - shift)
        mass = weight.sum(dim=2, keepdim=True)
        seen = visible.any(dim=1)[None, :, None]
        safe = torch.where(seen, mass, 1.0)
        block_lse = torch.where(seen, torch.log(safe) + shift, -torch.inf)[..., 0]
        block_out = (weight / safe).to(values.dtype) @ values
        merged = _logaddexp(lse, block_lse)
        out = out * _weight(lse, merged) + block_out.to(wide) * _weight(block_lse, merged)
        lse = merged
    return out.to(q_HTD.dtype), lse, peak_H


@torch.no_grad()
def _calc_attn_lse(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor, softmax_scale: float | None = None
) -> torch.Tensor:
    """Natural log-sum-exp ``(Tq, Hq)``, at least float32, of q ``(Tq, Hq, D)`` and k ``(Tk, Hk, D)``; mask ``(Tq, Tk)``
    or one per query head ``(Hq, Tq, Tk)``."""
    if mask.dim() == 2:
        _, meta = ref_attn_func(q, k, k, mask, softmax_scale=softmax_scale, backend="torch", return_lse=True)
        return meta.lse
    group = q.shape[1] // k.shape[1]
    heads = [
        _calc_attn_lse(q[:, h : h + 1], k[:, h // group : h // group + 1], mask[h], softmax_scale)
        for h in range(q.shape[1])
    ]
    return torch.cat(heads, dim=1)


def _logaddexp(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``log(e^a + e^b)`` with finite gradients where one side, or both, are -inf."""
    none_a, none_b = a == -torch.inf, b == -torch.inf
    both = torch.logaddexp(torch.where(none_a, 0.0, a), torch.where(none_b, 0.0, b))
    return torch.where(none_a, b, torch.where(none_b, a, both))


def _weight(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    none = part == -torch.inf
    difference = torch.where(none, 0.0, part) - torch.where(none, 0.0, whole)
    return torch.where(none, 0.0, torch.exp(difference))[..., None]


def _sink_lse(sink: torch.Tensor, sink_layout: str, rows: int) -> torch.Tensor:
    """Log-sum-exp of the sink, ``(Hq, Tq)``."""
    if sink_layout == "sh":
        return torch.logsumexp(sink, dim=0)[:, None].expand(-1, rows)
    if sink_layout == "ssh":
        return torch.logsumexp(sink, dim=1).transpose(0, 1)
    raise UnsupportedError(f"sink_layout={sink_layout!r} is not there; use 'sh' or 'ssh'.")
