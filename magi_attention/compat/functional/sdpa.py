# SPDX-License-Identifier: Apache-2.0
"""The torch reference backends as plain forward and backward functions, without autograd.

``sdpa_*`` is dense, O(Tq * Tk) memory; ``sdpa_online_*`` is blocked, O(tokens) memory. Arguments are those of
``fa4_fwd`` and ``fa4_bwd``; float16, bfloat16, float32 and float64 are computed, the last in float64.
"""

from __future__ import annotations

import torch

from magi_attention.common.forward_meta import AttnForwardMeta
from magi_attention.compat.functional.backend_call import AttnArg, Gradients, options_for, run_backward, run_forward
from magi_attention.compat.functional.sdpa_parts import (  # noqa: F401
    sdpa_bwd_calc,
    sdpa_bwd_dqdkdv_rearrange,
    sdpa_bwd_postprocess,
    sdpa_bwd_preprocess,
    sdpa_bwd_qkvodo_lse_rearrange,
    sdpa_bwd_recalc_fwd,
    sdpa_fwd_calc,
    sdpa_fwd_out_lse_rearrange,
    sdpa_fwd_preprocess,
    sdpa_fwd_qkv_rearrange,
)
from magi_attention.kernels.reference.sdpa import SdpaBackend
from magi_attention.kernels.reference.sdpa_online import SdpaOnlineBackend


def sdpa_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    attn_arg: AttnArg,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink_layout: str = "sh",
    return_max_logits: bool = False,
) -> tuple[torch.Tensor, AttnForwardMeta]:
    """Dense forward: ``(out (Tq, Hq, Dv) in q's dtype, AttnForwardMeta)``."""
    options = options_for(q, softmax_scale, softcap, sink_layout, return_max_logits=return_max_logits)
    return run_forward(SdpaBackend(), q, k, v, sink, attn_arg, options)


def sdpa_bwd(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    o: torch.Tensor,
    lse: torch.Tensor,
    attn_arg: AttnArg,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink_layout: str = "sh",
    deterministic: bool = False,
) -> Gradients:
    """Dense backward: ``(dq, dk, dv, dsink)``. ``o``, ``lse`` are final; always ``deterministic`` on CPU."""
    options = options_for(q, softmax_scale, softcap, sink_layout, deterministic=deterministic)
    return run_backward(SdpaBackend(), do, q, k, v, sink, o, lse, attn_arg, options)


def sdpa_online_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    attn_arg: AttnArg,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink_layout: str = "sh",
    return_max_logits: bool = False,
) -> tuple[torch.Tensor, AttnForwardMeta]:
    """Blocked forward; arguments and results of ``sdpa_fwd``."""
    options = options_for(q, softmax_scale, softcap, sink_layout, return_max_logits=return_max_logits)
    return run_forward(SdpaOnlineBackend(), q, k, v, sink, attn_arg, options)


def sdpa_online_bwd(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    o: torch.Tensor,
    lse: torch.Tensor,
    attn_arg: AttnArg,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink_layout: str = "sh",
    deterministic: bool = False,
) -> Gradients:
    """Blocked backward; arguments and results of ``sdpa_bwd``."""
    options = options_for(q, softmax_scale, softcap, sink_layout, deterministic=deterministic)
    return run_backward(SdpaOnlineBackend(), do, q, k, v, sink, o, lse, attn_arg, options)
