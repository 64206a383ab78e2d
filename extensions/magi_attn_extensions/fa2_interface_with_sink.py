# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-2's functions with a learnable sink.

``sink_attention`` has the shapes. Packed forms: qkv (B, T, 3, H, D) or (T, 3, H, D), kv (B, T, 2, Hk, D) or
(T, 2, Hk, D). ``max_seqlen_*`` are hints and may be anything. ``UnsupportedError`` for ``dropout_p`` other than 0,
``alibi_slopes`` and ``block_table``. With ``return_attn_probs`` each returns ``(out, lse, probabilities)``; the last is
empty, as it is in FlashAttention without dropout.
"""

from __future__ import annotations

from typing import Any

import torch

from magi_attn_extensions.sink_attention import Result, Window, batch_attention, refuse, varlen_attention

Maybe = torch.Tensor | None


def _answer(result: Result, is_full: bool) -> Any:
    out, lse = result
    return (out, lse, out.new_empty(0)) if is_full else out


def fa2_func_with_sink(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: Maybe = None, sink_layout: str = "sh",
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Maybe = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of a batch."""
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    result = batch_attention(
        q, k, v, sink, sink_layout, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
        softcap=softcap, deterministic=deterministic,
    )  # fmt: skip
    return _answer(result, return_attn_probs)


def fa2_qkvpacked_func_with_sink(
    qkv: torch.Tensor, sink: Maybe = None, sink_layout: str = "sh",
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Maybe = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of a batch, q, k and v in one tensor."""
    return fa2_func_with_sink(
        *qkv.unbind(-3), sink, sink_layout, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def fa2_kvpacked_func_with_sink(
    q: torch.Tensor, kv: torch.Tensor, sink: Maybe = None, sink_layout: str = "sh",
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Maybe = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of a batch, k and v in one tensor."""
    return fa2_func_with_sink(
        q, *kv.unbind(-3), sink, sink_layout, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def fa2_varlen_func_with_sink(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, sink: Maybe = None, sink_layout: str = "sh", dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Maybe = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: Maybe = None,
) -> Any:  # fmt: skip
    """Attention of packed documents."""
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes, block_table=block_table)
    result = varlen_attention(
        q, k, v, sink, sink_layout, cu_seqlens_q, cu_seqlens_k, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, deterministic=deterministic,
    )  # fmt: skip
    return _answer(result, return_attn_probs)


def fa2_varlen_qkvpacked_func_with_sink(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, sink: Maybe = None, sink_layout: str = "sh",
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Maybe = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of packed documents, q, k and v in one tensor."""
    return fa2_varlen_func_with_sink(
        *qkv.unbind(-3), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, sink, sink_layout, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def fa2_varlen_kvpacked_func_with_sink(
    q: torch.Tensor, kv: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int,
    max_seqlen_k: int, sink: Maybe = None, sink_layout: str = "sh", dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Maybe = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of packed documents, k and v in one tensor."""
    return fa2_varlen_func_with_sink(
        q, *kv.unbind(-3), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, sink, sink_layout, dropout_p,
        softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip
