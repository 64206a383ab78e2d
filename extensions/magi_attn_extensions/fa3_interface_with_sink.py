# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3's functions with a learnable sink.

``sink_attention`` has the shapes. ``max_seqlen_*``, ``num_splits`` and ``pack_gqa`` are hints and may be anything;
``sm_margin`` is how many SMs a GPU kernel leaves free. ``UnsupportedError`` for ``qv``, descales and
``attention_chunk``. With ``return_attn_probs`` each returns ``(out, lse)``.
"""

from __future__ import annotations

from typing import Any

import torch

from magi_attention.errors import ContractError
from magi_attn_extensions.sink_attention import Window, batch_attention, refuse, varlen_attention

Maybe = torch.Tensor | None


def fa3_func_with_sink(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: Maybe = None, sink_layout: str = "sh",
    softmax_scale: float | None = None, causal: bool = False, qv: Maybe = None, q_descale: Maybe = None,
    k_descale: Maybe = None, v_descale: Maybe = None, window_size: Window = (-1, -1), attention_chunk: int = 0,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
    sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of a batch."""
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
    result = batch_attention(
        q, k, v, sink, sink_layout, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
        softcap=softcap, deterministic=deterministic, sm_margin=sm_margin,
    )  # fmt: skip
    return result if return_attn_probs else result[0]


def fa3_qkvpacked_func_with_sink(
    qkv: torch.Tensor, sink: Maybe = None, sink_layout: str = "sh", softmax_scale: float | None = None,
    causal: bool = False, q_descale: Maybe = None, k_descale: Maybe = None, v_descale: Maybe = None,
    window_size: Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, deterministic: bool = False,
    num_heads_q: int | None = None, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of a batch in one tensor: qkv (B, T, 3, H, D), or (B, T, Hq + 2 Hk, D) with ``num_heads_q`` Hq."""
    if qkv.dim() == 5:
        q, k, v = qkv.unbind(-3)
    else:
        heads = qkv.shape[-2]
        if num_heads_q is None or num_heads_q >= heads or (heads - num_heads_q) % 2:
            raise ContractError(
                f"qkv is {tuple(qkv.shape)} and num_heads_q {num_heads_q}; give num_heads_q heads of q, then as many "
                "of k as of v."
            )
        num_heads_kv = (heads - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, num_heads_kv, num_heads_kv], dim=-2)
    return fa3_func_with_sink(
        q, k, v, sink, sink_layout, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
        attention_chunk, softcap, deterministic=deterministic, sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )  # fmt: skip


def fa3_varlen_func_with_sink(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, sink: Maybe = None, sink_layout: str = "sh", seqused_q: Maybe = None,
    seqused_k: Maybe = None, softmax_scale: float | None = None, causal: bool = False, qv: Maybe = None,
    q_descale: Maybe = None, k_descale: Maybe = None, v_descale: Maybe = None, window_size: Window = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of packed documents; of each only the first ``seqused_q`` and ``seqused_k`` (N,) rows count."""
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
    result = varlen_attention(
        q, k, v, sink, sink_layout, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softmax_scale=softmax_scale,
        causal=causal, window_size=window_size, softcap=softcap, deterministic=deterministic, sm_margin=sm_margin,
    )  # fmt: skip
    return result if return_attn_probs else result[0]
