# SPDX-License-Identifier: Apache-2.0
"""Attention of each query to a list of keys of its own, by gathering these keys: forward and backward.

Plain tensor operations on any device. Queries are taken in blocks, so that no more than ``BUDGET`` numbers of keys and
values are gathered at a time. Keys are read once for each query that lists them; a kernel would share them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from magi_attention.errors import ContractError
from magi_attention.kernels.reference.correction import safe_lse, safe_subtract
from magi_attention.kernels.types import accumulation_dtype

BUDGET = 1 << 25  # 128 MiB of float32


def gathered_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, indices: torch.Tensor, scale: float | None = None,
    block: int = 1, first: torch.Tensor | None = None, end: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``(out (Tq, Hq, Dv) in q's dtype, lse (Tq, Hq))``, differentiable in q, k and v; the lse has no gradient.

    q (Tq, Hq, D), k (Tk, Hk, D), v (Tk, Hk, Dv). ``indices`` integer (Tq, Hk, N): query t, in the heads of kv head h,
    sees the blocks ``indices[t, h]`` of ``block`` keys, counted from key ``first[t]`` (Tq,), and of these the keys
    before ``end[t]`` (Tq,); by default from 0 and all. Negative entries are none; one that is there twice counts once.
    A query without keys gives out 0, lse -inf and gradients 0. Sums are float32, and float64 for float64; results are
    the same bits on every run. ``scale`` is ``D ** -0.5`` by default. ``ContractError`` for shapes that do not fit
    together and for a block that begins after the last key.
    """
    tokens, heads = q.shape[0], k.shape[1]
    wanted = (tokens, heads)
    if indices.dim() != 3 or tuple(indices.shape[:2]) != wanted or indices.is_floating_point():
        raise ContractError(
            f"indices are {tuple(indices.shape)} {indices.dtype} with q {tuple(q.shape)} and k {tuple(k.shape)}; give "
            f"integers ({tokens} queries, {heads} kv heads, keys)."
        )
    if k.shape[:2] != v.shape[:2] or q.shape[2] != k.shape[2] or q.shape[1] % heads:
        raise ContractError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: give (tokens, heads, head dim), k and v of "
            "the same tokens and heads, and heads of q that are a multiple of theirs."
        )
    first = torch.zeros(tokens, dtype=torch.int64, device=q.device) if first is None else first
    end = torch.full_like(first, k.shape[0]) if end is None else end
    ordered = indices.long().sort(dim=-1).values
    ordered[..., 1:].masked_fill_(ordered[..., 1:] == ordered[..., :-1], -1)
    if ordered.numel() and int((ordered * block + first[:, None, None]).amax()) >= k.shape[0]:
        raise ContractError(
            f"An entry of indices is {int(indices.max())}, in blocks of {block}, but k has only {k.shape[0]} rows."
        )
    scale = q.shape[2] ** -0.5 if scale is None else float(scale)
    out, lse = _Gathered.apply(q, k, v, ordered, first, end, scale, block)
    return out, lse


class _Part:
    """Keys and values of some queries: rows (n, Hk, N) of the flattened k, what of them is seen, and the tensors."""

    def __init__(self, saved: tuple[torch.Tensor, ...], queries: slice, scale: float, block: int) -> None:
        q, k, v, indices, first, end = saved
        self.queries, self.acc = queries, accumulation_dtype(q.dtype)
        listed = indices[queries]
        keys = listed[..., None] * block + torch.arange(block, device=q.device) + first[queries, None, None, None]
        seen = (listed[..., None] >= 0) & (keys < end[queries, None, None, None])
        self.seen = seen.flatten(2)[:, :, None]  # (n, Hk, 1, N)
        heads = torch.arange(k.shape[1], device=q.device)[:, None]
        self.rows = torch.where(self.seen[:, :, 0], keys.flatten(2), 0) * k.shape[1] + heads
        self.k, self.v = (x.flatten(0, 1)[self.rows].to(self.acc) for x in (k, v))
        self.q = self.grouped(q)
        logits = torch.matmul(self.q, self.k.transpose(-1, -2)) * scale
        self.logits = logits.masked_fill(~self.seen, float("-inf"))

    def grouped(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of a tensor (Tq, Hq, ...) as (n, Hk, queries of one kv head, ...)."""
        return x[self.queries].unflatten(1, (self.rows.shape[1], -1)).to(self.acc)

    def add(self, total: torch.Tensor, values: torch.Tensor) -> None:
        """Adds (n, Hk, N, D) to their rows of ``total``, in one order always."""
        rows, values = self.rows.flatten(), values.flatten(0, 2)
        if total.is_cuda:  # where index_add_ adds in any order, and this one sorts
            total.index_put_((rows,), values, accumulate=True)
        else:
            total.index_add_(0, rows, values)


def _parts(saved: tuple[torch.Tensor, ...], scale: float, block: int) -> Iterator[_Part]:
    q, k, v, indices = saved[:4]
    numbers = k.shape[1] * max(indices.shape[2] * block, 1) * (k.shape[2] + v.shape[2])
    step = max(BUDGET // numbers, 1)
    for start in range(0, q.shape[0], step):
        yield _Part(saved, slice(start, start + step), scale, block)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        *saved, scale, block = inputs
        q, v = saved[0], saved[2]
        out = q.new_empty((*q.shape[:2], v.shape[2]))
        lse = q.new_empty(q.shape[:2], dtype=accumulation_dtype(q.dtype))
        for part in _parts(tuple(saved), scale, block):
            total = safe_lse(part.logits, keepdim=True)
            weights = torch.exp(safe_subtract(part.logits, total))
            out[part.queries] = torch.matmul(weights, part.v).flatten(1, 2).to(q.dtype)
            lse[part.queries] = total.flatten(1)
        ctx.save_for_backward(*saved, out, lse)
        ctx.options = scale, block
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor, _dlse: object) -> tuple[torch.Tensor | None, ...]:
        *saved, out, lse = ctx.saved_tensors
        q, k, v = saved[:3]
        scale, block = ctx.options
        dq = torch.empty_like(q)
        dk, dv = (x.new_zeros((x.shape[0] * x.shape[1], x.shape[2]), dtype=lse.dtype) for x in (k, v))
        for part in _parts(tuple(saved), scale, block):
            grad = part.grouped(dout)
            delta = (grad * part.grouped(out)).sum(-1, keepdim=True)
            weights = torch.exp(safe_subtract(part.logits, part.grouped(lse)[..., None]))
            part.add(dv, torch.matmul(weights.transpose(-1, -2), grad))
            dlogits = weights * (torch.matmul(grad, part.v.transpose(-1, -2)) - delta) * scale
            part.add(dk, torch.matmul(dlogits.transpose(-1, -2), part.q))
            dq[part.queries] = torch.matmul(dlogits, part.k).flatten(1, 2).to(q.dtype)
        return dq, dk.view(k.shape).to(k.dtype), dv.view(v.shape).to(v.dtype), None, None, None, None, None
