# SPDX-License-Identifier: Apache-2.0
"""The steps of dense attention under their published names, for programs that put them together themselves.

Shapes: *heads first* is q, o, do ``(..., Hq, Tq, D)``, k, v ``(..., Hk, Tk, D)``, lse ``(..., Hq, Tq)``; *tokens first*
is ``(T, H, D)`` and ``(T, H)``. Weights are ``(..., Hq, Tq, Tk)``. Rows without a key give weight 0.
"""

from __future__ import annotations

import torch

from magi_attention.compat.functional.softmax import safe_lse, safe_softmax, softmax_bwd
from magi_attention.compat.utils.dtypes import to_higher_fp_dtype
from magi_attention.errors import ContractError

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1)[None].contiguous()


def _tokens_first(x: torch.Tensor) -> torch.Tensor:
    return x[0].transpose(0, 1).contiguous()


# ---- layouts -------------------------------------------------------------------------------------------


def sdpa_fwd_qkv_rearrange(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Three:
    """Tokens first to heads first, with a batch of 1."""
    return _heads_first(q), _heads_first(k), _heads_first(v)


def sdpa_fwd_out_lse_rearrange(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The way back for ``out`` and ``lse``."""
    return _tokens_first(out), _tokens_first(lse)


def sdpa_bwd_qkvodo_lse_rearrange(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, do: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Tokens first to heads first, all six in this order."""
    return tuple(_heads_first(x) for x in (q, k, v, o, do, lse))


def sdpa_bwd_dqdkdv_rearrange(dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Three:
    """The way back for gradients."""
    return _tokens_first(dq), _tokens_first(dk), _tokens_first(dv)


# ---- forward -------------------------------------------------------------------------------------------


def sdpa_fwd_preprocess(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    softmax_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float, int]:
    """``(q, k, v, bias (Tq, Tk), scale, copies)``: k and v once per query head, and the mask as a bias of 0 and -inf.

    ``attn_mask`` is bool, True where attention is allowed, or is added to the logits; ``is_causal`` aligns at the top.
    """
    if is_causal and attn_mask is not None:
        raise ContractError("Give attn_mask or is_causal, not both.")
    rows, columns, copies = q.shape[-2], k.shape[-2], q.shape[-3] // k.shape[-3]
    if is_causal:
        attn_mask = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril()
    bias = q.new_zeros(rows, columns)
    if attn_mask is not None:
        bias = bias.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else bias + attn_mask
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return q, k.repeat_interleave(copies, -3), v.repeat_interleave(copies, -3), bias, scale, copies


def _logits(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor, scale: float) -> torch.Tensor:
    return to_higher_fp_dtype(q @ k.mT * scale, torch.float32) + bias


def sdpa_fwd_calc(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_bias: torch.Tensor, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)`` of what ``sdpa_fwd_preprocess`` gave, heads first."""
    logits = _logits(q, k, attn_bias, softmax_scale)
    lse = safe_lse(logits, dim=-1)
    return safe_softmax(logits, lse).to(v.dtype) @ v, lse


# ---- backward ------------------------------------------------------------------------------------------


def sdpa_bwd_preprocess(do: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    """``sum_d o * do``, ``(..., Hq, Tq, 1)``."""
    return (o * do).sum(-1, keepdim=True)


def sdpa_bwd_recalc_fwd(
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, attn_bias: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """The weights once more, by the lse of the forward pass, in q's dtype."""
    return safe_softmax(_logits(q, k, attn_bias, softmax_scale), lse).to(q.dtype)


def sdpa_bwd_calc(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    delta: torch.Tensor | None,
    attn_weight: torch.Tensor,
    softmax_scale: float,
) -> Three:
    """``(dq, dk, dv)``, the last two once per query head. ``delta`` is that of ``sdpa_bwd_preprocess``, or None."""
    dweight = do @ v.mT
    dlogits = softmax_bwd(dweight, attn_weight) if delta is None else attn_weight * (dweight - delta)
    dlogits = (dlogits * softmax_scale).to(q.dtype)
    return dlogits @ k, dlogits.mT @ q, attn_weight.mT @ do


def sdpa_bwd_postprocess(dk: torch.Tensor, dv: torch.Tensor, rep_times: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over the ``rep_times`` query heads of each key head."""
    dk, dv = (x.unflatten(-3, (-1, rep_times)).sum(-3) for x in (dk, dv))
    return dk, dv
