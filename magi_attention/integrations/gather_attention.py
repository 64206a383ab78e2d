# SPDX-License-Identifier: Apache-2.0
"""``gather_attn`` of attn_gym (0.0.17) by our kernels: DeepSeek V4's attention, where a key is its own value.

``from magi_attention.integrations.gather_attention import gather_attn`` in place of
``from attn_gym.sparse import gather_attn``. attn_gym itself is not needed. Over ranks, take ``attend_index``:
docs/guides/dsa.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from magi_attention.errors import ContractError
from magi_attention.functional.sparse.index_attn import index_attn_func


@dataclass(frozen=True)
class GatherAttnAux:
    """lse (B, H, T), sinks included; None unless it was asked for."""

    lse: torch.Tensor | None = None


def gather_attn(
    query: torch.Tensor,
    local_kv: torch.Tensor,
    sparse_kv: torch.Tensor,
    kv_indices: torch.Tensor,
    attention_sink: torch.Tensor | None = None,
    *,
    sliding_window_size: int = 512,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    impl: Any = "fused",
    kernel_options: dict[str, Any] | None = None,
    scale: float | None = None,
    return_aux: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, GatherAttnAux]:
    """One softmax over a causal window of ``local_kv`` and the rows of ``sparse_kv`` that ``kv_indices`` name.

    Args:
        query: (B, H, T, D). local_kv: (B, 1 or H, T, D). sparse_kv: (B, 1 or H, X, D). One floating dtype.
        kv_indices: int32 or int64 (B, T, N), the same for all heads: rows of sparse_kv, of the query's own document
            where there are ``cu_seqlens_k``. Those that are negative or beyond count as none. **A row that is there
            twice counts once**; attn_gym counts it twice. Top-k gives none twice.
        attention_sink: (H,), logits that take their share of the softmax.
        sliding_window_size: tokens of the window, the query's own included.
        cu_seqlens, cu_seqlens_k: int32 (documents + 1) offsets of documents in the T tokens and in the X rows, for
            B = 1; both or neither.
        impl, kernel_options: "fused" and None; which kernel runs is chosen here.
        scale: of the dots; ``D ** -0.5`` without it.
        return_aux: an object with ``lse``, as attn_gym's ``AuxRequest``; then the result is (out, ``GatherAttnAux``).

    Returns out (B, H, T, D). Gradients of query, local_kv, sparse_kv and attention_sink; bits repeat under
    ``torch.use_deterministic_algorithms(True)``.

    ``ContractError`` for tensors that do not fit together.
    """
    _check(query, local_kv, sparse_kv, kv_indices, sliding_window_size, cu_seqlens, cu_seqlens_k)
    if getattr(impl, "value", impl) != "fused" or kernel_options:
        raise ContractError("impl and kernel_options choose a kernel of attn_gym; leave both out.")
    batch, heads, tokens, dim = query.shape
    kv_heads, pool = local_kv.shape[1], tokens + sparse_kv.shape[2]
    kv = torch.cat((local_kv, sparse_kv), 2).transpose(1, 2).reshape(batch * pool, kv_heads, dim)
    rows = _rows(kv_indices, tokens, pool, sliding_window_size, cu_seqlens, cu_seqlens_k)
    out, meta = index_attn_func(
        query.transpose(1, 2).reshape(batch * tokens, heads, dim),
        kv,
        None,
        rows.flatten(0, 1)[:, None].expand(-1, kv_heads, -1),
        head_dim_v=dim,
        sink=None if attention_sink is None else attention_sink[None],
        softmax_scale=scale,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    out = out.unflatten(0, (batch, tokens)).transpose(1, 2)
    if return_aux is None:
        return out
    lse = meta.lse.unflatten(0, (batch, tokens)).transpose(1, 2) if return_aux.lse else None  # type: ignore[union-attr]
    return out, GatherAttnAux(lse)


def _rows(
    kv_indices: torch.Tensor, tokens: int, pool: int, window: int, cu_q: torch.Tensor | None, cu_k: torch.Tensor | None
) -> torch.Tensor:
    """int32 (B, T, window + N): where in B pools, one after the other, each query's keys are; -1 for none."""
    batch, device = len(kv_indices), kv_indices.device
    at = torch.arange(tokens, device=device)
    if cu_q is None or cu_k is None:
        begin, first, last = torch.zeros_like(at), torch.zeros_like(at), torch.full_like(at, pool - tokens)
    else:  # tokens behind the last document are one more, without rows of sparse_kv
        document = torch.searchsorted(cu_q[1:].contiguous(), at, right=True)
        begin, first = cu_q[document], cu_k[document]
        last = torch.cat((cu_k[1:], cu_k[-1:]))[document]
    local = at[:, None] - torch.arange(min(window, tokens), device=device)
    local = torch.where(local >= begin[:, None], local, -1).expand(batch, -1, -1)
    is_there = (kv_indices >= 0) & (kv_indices < (last - first)[:, None])
    chosen = torch.where(is_there, kv_indices + (tokens + first)[:, None], -1)
    rows = torch.cat((local, chosen), 2)
    of_batch = pool * torch.arange(batch, device=device)[:, None, None]
    return torch.where(rows >= 0, rows + of_batch, -1).int()


def _check(
    query: torch.Tensor, local_kv: torch.Tensor, sparse_kv: torch.Tensor, kv_indices: torch.Tensor, window: int,
    cu_q: torch.Tensor | None, cu_k: torch.Tensor | None,
) -> None:  # fmt: skip
    if query.dim() != 4 or local_kv.dim() != 4 or sparse_kv.dim() != 4:
        raise ContractError("query, local_kv and sparse_kv are (B, heads, tokens, D); give four dimensions.")
    batch, heads, tokens, dim = query.shape
    kv_heads = local_kv.shape[1]
    fits = kv_heads in (1, heads) and tuple(local_kv.shape) == (batch, kv_heads, tokens, dim)
    if not fits or sparse_kv.shape != (batch, kv_heads, sparse_kv.shape[2], dim):
        raise ContractError(
            f"local_kv is {tuple(local_kv.shape)} and sparse_kv {tuple(sparse_kv.shape)} with query "
            f"{tuple(query.shape)}; give ({batch}, 1 or {heads}, {tokens}, {dim}) and as many heads of rows of {dim}."
        )
    is_integer = kv_indices.dtype in (torch.int32, torch.int64)
    if not is_integer or kv_indices.dim() != 3 or kv_indices.shape[:2] != (batch, tokens):
        raise ContractError(
            f"kv_indices are {tuple(kv_indices.shape)} {kv_indices.dtype}; give integers ({batch}, {tokens}, rows)."
        )
    if isinstance(window, bool) or not isinstance(window, int) or window < 0:
        raise ContractError(f"sliding_window_size is {window!r}; give an integer, 0 or more.")
    if (cu_q is None) != (cu_k is None) or (cu_q is not None and batch != 1):
        raise ContractError("cu_seqlens and cu_seqlens_k belong together, with one batch; give both or neither.")
    if cu_q is not None and cu_k is not None and (cu_q.dim() != 1 or cu_q.shape != cu_k.shape):
        raise ContractError(
            f"cu_seqlens are {tuple(cu_q.shape)} and cu_seqlens_k {tuple(cu_k.shape)}; give (documents + 1,) of both."
        )


__all__ = ["GatherAttnAux", "gather_attn"]
