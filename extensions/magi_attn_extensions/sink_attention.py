# SPDX-License-Identifier: Apache-2.0
"""What the FlashAttention wrappers share: their masks as slices, their layouts, and what they refuse.

All of them run ``flex_flash_attn_func``: our kernels on a GPU, the reference on a CPU, in any floating dtype there.
A sink is part of that call, so gradients of q, k, v and of the sink come from its backward. Shapes, lse included, are
those of FlashAttention:

=========  ======================  =====================  ==================================
form       q, out                  lse (float32, and      sink "ssh" (sink "sh" is (S, Hq))
                                   float64 for float64)
=========  ======================  =====================  ==================================
batch      (B, Tq, Hq, D)          (B, Hq, Tq)            (B, Tq, S, Hq)
varlen     (total_q, Hq, D)        (Hq, total_q)          (total_q, S, Hq)
=========  ======================  =====================  ==================================

The lse includes the sink, and both have gradients. A query without keys gives out 0; its lse is that of the sink, or
-inf.
"""

from __future__ import annotations

from typing import Any

import torch

from magi_attention.common.scalars import as_window
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.functional import flex_flash_attn_func

Result = tuple[torch.Tensor, torch.Tensor]
Window = tuple[int, int]

_REMEDIES = {
    "dropout_p": "pass 0.0 and drop out elsewhere, such as after the output projection",
    "alibi_slopes": "pass None and use rotary embeddings, which act on q and k before the call",
    "block_table": "pass None and k, v without pages",
    "qv": "pass None, and append qv to q and v to k",
    "q_descale": "pass None and q in bfloat16 or float16",
    "k_descale": "pass None and k in bfloat16 or float16",
    "v_descale": "pass None and v in bfloat16 or float16",
    "attention_chunk": "pass 0 and give each chunk a document of its own in cu_seqlens",
}


def refuse(**values: Any) -> None:
    """``UnsupportedError`` for the first argument that is neither None nor 0."""
    for name, value in values.items():
        if value is not None and not (isinstance(value, (int, float)) and value == 0):
            raise UnsupportedError(f"{name} is not supported: {_REMEDIES[name]}.")


def window_slices(
    q_start: torch.Tensor, q_len: torch.Tensor, k_start: torch.Tensor, k_len: torch.Tensor, left: int, right: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FlashAttention's window on documents (N,) as slices: ``(q_ranges (3N, 2), k_ranges (3N, 2), types (3N,))``.

    Query i of a document sees its keys ``i + k_len - q_len - left`` to ``i + k_len - q_len + right``, as far as they
    exist; a bound of -1 is none. Only tensor operations, so that nobody waits for a GPU. ``common.infer`` has the
    published rule, which drops all queries that come before the first key; FlashAttention lets ``right`` reach keys.
    """
    offset = k_len - q_len
    left_len = q_len + k_len if left < 0 else left
    right_len = q_len + k_len if right < 0 else right
    first = (-offset - right_len).clamp(min=0).minimum(q_len)  # queries before it end short of the first key
    moves = (left_len - offset).maximum(first).minimum(q_len)  # from here on the left bound moves
    stops = (q_len - right_len - 1).maximum(first).minimum(q_len)  # from here on the right bound is the last key
    edges = torch.stack([first, moves.minimum(stops), moves.maximum(stops), q_len], dim=1)
    begin, end = edges[:, :-1], edges[:, 1:]
    types = (end <= stops[:, None]).int() + 2 * (begin >= moves[:, None]).int()  # 1 causal, 2 inverse, 3 both
    k_begin = (begin + (offset - left_len)[:, None]).clamp(min=0)
    k_end = (end + (offset + right_len)[:, None]).minimum(k_len[:, None]).maximum(k_begin)
    q_ranges = torch.stack([begin, end], dim=2) + q_start[:, None, None]
    k_ranges = torch.stack([k_begin, k_end], dim=2) + k_start[:, None, None]
    return q_ranges.flatten(0, 1).int(), k_ranges.flatten(0, 1).int(), types.flatten()


def batch_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, sink_layout: str, **options: Any
) -> Result:
    """q (B, Tq, Hq, D), k (B, Tk, Hk, D), v (B, Tk, Hk, Dv): ``(out (B, Tq, Hq, Dv), lse (B, Hq, Tq))``."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4 or not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ContractError(f"{shapes}: give (batch, tokens, heads, head dim) each, with one batch size.")
    size, tq, tk = q.shape[0], q.shape[1], k.shape[1]
    if sink is not None and sink_layout == "ssh":
        if sink.dim() != 4 or sink.shape[:2] != q.shape[:2]:
            raise ContractError(
                f'sink has shape {tuple(sink.shape)}; layout "ssh" of a batch needs ({size}, {tq}, num_sinks, '
                f"{q.shape[2]})."
            )
        sink = sink.flatten(0, 1)
    number = torch.arange(size)
    documents = number * tq, torch.full((size,), tq), number * tk, torch.full((size,), tk)
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    out, lse = _attention(*rows, sink, sink_layout, documents, **options)
    return out.unflatten(0, (size, tq)), lse.unflatten(0, (size, tq)).transpose(1, 2).contiguous()


def varlen_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, sink_layout: str,
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None, **options: Any,
) -> Result:  # fmt: skip
    """q (total_q, Hq, D), k (total_k, Hk, D), v (total_k, Hk, Dv): ``(out (total_q, Hq, Dv), lse (Hq, total_q))``.

    ``cu_seqlens_*`` (N + 1,) integer bounds of documents, on the CPU or on q's device. ``seqused_*`` (N,): of each
    document only so many rows at its beginning count; further queries give out 0.
    """
    if cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.dim() != 1 or not cu_seqlens_q.numel():
        raise ContractError(
            f"cu_seqlens_q {tuple(cu_seqlens_q.shape)}, cu_seqlens_k {tuple(cu_seqlens_k.shape)}: give as many bounds "
            "of both, one more than documents."
        )
    q_len = cu_seqlens_q.diff() if seqused_q is None else seqused_q
    k_len = cu_seqlens_k.diff() if seqused_k is None else seqused_k
    documents = cu_seqlens_q[:-1], q_len, cu_seqlens_k[:-1], k_len
    out, lse = _attention(q, k, v, sink, sink_layout, documents, **options)
    return out, lse.t().contiguous()


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, sink_layout: str,
    documents: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], *, causal: bool,
    window_size: Window = (-1, -1), **options: Any,
) -> Result:  # fmt: skip
    left, right = as_window(window_size, "window_size")
    mask = window_slices(*documents, left, 0 if causal else right)
    out, meta = flex_flash_attn_func(q, k, v, *mask, sink=sink, sink_layout=sink_layout, **options)
    return out, meta.lse
