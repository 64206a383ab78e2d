# SPDX-License-Identifier: Apache-2.0
"""The torch reference backends as plain forward and backward functions, without autograd.

``sdpa_*`` is dense, O(Tq * Tk) memory; ``sdpa_online_*`` is blocked, O(tokens) memory. Arguments are those of
``fa4_fwd`` and ``fa4_bwd``; float16, bfloat16, float32 and float64 are computed, the last in float64.
"""

from __future__ import annotations

import torch

from magi_attention.common.forward_meta import AttnForwardMeta
from magi_attention.functional.fa4 import AttnArg
from magi_attention.kernels.sdpa import SdpaBackend
from magi_attention.kernels.sdpa_online import SdpaOnlineBackend
from magi_attention.kernels.tables import table_from_attn_arg
from magi_attention.kernels.types import AttnOptions, Backend

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def _forward(
    backend: Backend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    attn_arg: AttnArg,
    softmax_scale: float | None,
    softcap: float,
    sink_layout: str,
    return_max_logits: bool,
) -> tuple[torch.Tensor, AttnForwardMeta]:
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    options = AttnOptions(scale, softcap, sink_layout, return_max_logits=return_max_logits)
    got = backend.forward(q, k, v, table_from_attn_arg(attn_arg), options, sink)
    return got.out.to(q.dtype), AttnForwardMeta(got.lse, got.max_logits)


def _backward(
    backend: Backend,
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    o: torch.Tensor,
    lse: torch.Tensor,
    attn_arg: AttnArg,
    softmax_scale: float | None,
    softcap: float,
    sink_layout: str,
) -> Gradients:
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    options = AttnOptions(scale, softcap, sink_layout)
    got = backend.backward(do, q, k, v, o, lse, table_from_attn_arg(attn_arg), options, sink)
    dsink = None if sink is None or got.dsink is None else got.dsink.to(sink.dtype)
    return got.dq.to(q.dtype), got.dk.to(k.dtype), got.dv.to(v.dtype), dsink


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
    return _forward(SdpaBackend(), q, k, v, sink, attn_arg, softmax_scale, softcap, sink_layout, return_max_logits)


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
    return _backward(SdpaBackend(), do, q, k, v, sink, o, lse, attn_arg, softmax_scale, softcap, sink_layout)


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
    return _forward(
        SdpaOnlineBackend(), q, k, v, sink, attn_arg, softmax_scale, softcap, sink_layout, return_max_logits
    )


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
    return _backward(SdpaOnlineBackend(), do, q, k, v, sink, o, lse, attn_arg, softmax_scale, softcap, sink_layout)
