# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-4's functions with a learnable sink.

``sink_attention`` has the shapes. ``max_seqlen_*``, ``num_splits`` and ``pack_gqa`` are hints and may be anything. With
``return_attn_probs`` each returns ``(out, lse)``.
"""

from __future__ import annotations

from typing import Any

import torch

from magi_attn_extensions.sink_attention import batch_attention, varlen_attention


def fa4_func_with_sink(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None = None, sink_layout: str = "sh",
    softmax_scale: float | None = None, causal: bool = False, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of a batch."""
    result = batch_attention(
        q, k, v, sink, sink_layout, softmax_scale=softmax_scale, causal=causal, softcap=softcap,
        deterministic=deterministic,
    )  # fmt: skip
    return result if return_attn_probs else result[0]


def fa4_varlen_func_with_sink(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, sink: torch.Tensor | None = None, sink_layout: str = "sh",
    softmax_scale: float | None = None, causal: bool = False, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of packed documents."""
    result = varlen_attention(
        q, k, v, sink, sink_layout, cu_seqlens_q, cu_seqlens_k, softmax_scale=softmax_scale, causal=causal,
        softcap=softcap, deterministic=deterministic,
    )  # fmt: skip
    return result if return_attn_probs else result[0]
