# SPDX-License-Identifier: Apache-2.0
"""Index attention by gathering the keys of each query: the reference, in plain tensor operations on any device.

Queries are taken in blocks, so that no more than ``BUDGET`` numbers of keys and values are gathered at a time. Keys are
read once for each query that lists them; a kernel would share them. Results are the same bits on every run. The
formulas are those of ``kernels.reference.sdpa``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from magi_attention.kernels.index_attn.types import IndexProblem, PreparedIndices
from magi_attention.kernels.reference.correction import safe_lse, safe_subtract
from magi_attention.kernels.reference.numerics import compute_dtype, own_or_given
from magi_attention.kernels.reference.operands import as_kernel, reference_why_not, row_delta
from magi_attention.kernels.types import AttnOptions, accumulation_dtype

BUDGET = 1 << 25  # 128 MiB of float32
_NEG_INF = float("-inf")


class _Part:
    """Some of the queries with their keys: n queries, N keys for each, G query heads per kv head."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, lists: PreparedIndices, queries: slice, dtype: torch.dtype
    ) -> None:
        self.queries, self.heads, self.acc = queries, k.shape[1], dtype
        keys, seen = _keys(lists, queries)
        self.seen = seen[:, :, None]  # (n, Hk, 1, N)
        self.sees_any = seen.any(-1)[:, :, None, None]  # (n, Hk, 1, 1)
        # A key that is not seen stands for row 0, whose values then must not matter, not even NaN.
        self.keys, self.head = torch.where(seen, keys, 0), torch.arange(self.heads, device=q.device)[:, None]
        self.q, self.k = self.grouped(q), self.gathered(k)

    def grouped(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of a tensor (Tq, Hq, D) as (n, Hk, G, D); 0 where the query sees nothing."""
        rows: torch.Tensor = x[self.queries].unflatten(1, (self.heads, -1)).to(self.acc)
        return rows.masked_fill(~self.sees_any, 0)

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of k or v as (n, Hk, N, D); 0 where nothing is seen."""
        return x[self.keys, self.head].to(self.acc).masked_fill(~self.seen.transpose(-1, -2), 0)

    def values(self, v: torch.Tensor | None, width: int) -> torch.Tensor:
        """(n, Hk, N, Dv); without v the first columns of the keys, which are not gathered again."""
        return self.k[..., :width] if v is None else self.gathered(v)

    def logits(self, options: AttnOptions) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits (n, Hk, G, N), -inf where nothing is seen, and the slope of the softcap or None."""
        logits, slope = torch.matmul(self.q, self.k.transpose(-1, -2)) * options.softmax_scale, None
        if options.softcap > 0:
            logits = torch.tanh(logits / options.softcap)
            slope = 1 - logits**2
            logits = logits * options.softcap
        return logits.masked_fill(~self.seen, _NEG_INF), slope

    def add(self, total: torch.Tensor, values: torch.Tensor) -> None:
        """Adds (n, Hk, N, D) to their rows of ``total`` (Tk * Hk, D), in one order always. What is not seen adds
        nothing to row 0, not even the NaN of a query's own row."""
        values = values.masked_fill(~self.seen.transpose(-1, -2), 0).to(total.dtype)
        rows, values = (self.keys * self.heads + self.head).flatten(), values.flatten(0, 2)
        if total.is_cuda:  # where index_add_ adds in any order, and this one sorts
            total.index_put_((rows,), values, accumulate=True)
        else:
            total.index_add_(0, rows, values)


def _keys(lists: PreparedIndices, queries: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of k (n, Hk, N) int64 of some queries, and which of them are seen."""
    number = torch.arange(queries.start, queries.stop, device=lists.rows.device) // lists.q_block_size
    listed = lists.rows[number].long()
    if lists.is_plain:
        return listed, listed >= 0
    block = lists.k_block_size
    keys = listed[..., None] * block + torch.arange(block, device=listed.device)
    if lists.k_start is not None:
        keys = keys + lists.k_start[number, None, None, None]
    seen = (listed[..., None] >= 0) & (keys >= 0) & (keys < lists.total_k)
    if lists.k_end is not None:
        seen &= keys < lists.k_end[number, None, None, None]
    return keys.flatten(2), seen.flatten(2)


def _parts(
    q: torch.Tensor, k: torch.Tensor, lists: PreparedIndices, dim_v: int, options: AttnOptions
) -> Iterator[_Part]:
    dtype = compute_dtype(q, k, options)
    if k.shape[0] == 0:  # there is no row 0 to stand for what is not seen
        lists = lists._replace(rows=lists.rows[..., :0])
    numbers = k.shape[1] * max(lists.rows.shape[2] * lists.k_block_size, 1) * (k.shape[2] + dim_v)
    step = max(BUDGET // numbers, 1)
    for start in range(0, q.shape[0], step):
        yield _Part(q, k, lists, slice(start, min(start + step, q.shape[0])), dtype)


@dataclass(frozen=True)
class IndexReference:
    """The reference as an ``IndexBackend``, ``"sdpa"`` as the dense one."""

    name: str = "sdpa"

    def why_not(self, problem: IndexProblem) -> str | None:
        return reference_why_not(problem)

    @as_kernel
    def forward(
        self, problem: IndexProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, lists: PreparedIndices
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``IndexBackend.forward``."""
        acc = accumulation_dtype(q.dtype)
        width = problem.head_dim_v
        out = q.new_empty((*q.shape[:2], width), dtype=acc if problem.has_sink else q.dtype)
        lse = q.new_empty(q.shape[:2], dtype=acc)
        for part in _parts(q, k, lists, width if problem.has_v else 0, problem.options):
            logits, _ = part.logits(problem.options)
            total = safe_lse(logits, keepdim=True)
            weights = torch.exp(safe_subtract(logits, total))
            out[part.queries] = torch.matmul(weights, part.values(v, width)).flatten(1, 2).to(out.dtype)
            lse[part.queries] = total.flatten(1)
        return out, lse

    @as_kernel
    def backward(
        self, problem: IndexProblem, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None,
        out: torch.Tensor, lse: torch.Tensor, lists: PreparedIndices, delta: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """See ``IndexBackend.backward``; dk and dv in the accumulation dtype."""
        dq, width = torch.empty_like(q), problem.head_dim_v
        dk = k.new_zeros((k.shape[0] * k.shape[1], k.shape[2]), dtype=lse.dtype)
        dv = None if v is None else dk.new_zeros((len(dk), width))
        deltas = row_delta(out, dout, delta)[..., None]
        for part in _parts(q, k, lists, width if problem.has_v else 0, problem.options):
            logits, slope = part.logits(problem.options)
            grad, values = part.grouped(dout), part.values(v, width)
            total = lse[part.queries].unflatten(1, (part.heads, -1))[..., None].to(part.acc)
            if part.acc != lse.dtype:
                total = own_or_given(safe_lse(logits, keepdim=True), total, lse.dtype)
            weights = torch.exp(safe_subtract(logits, total))
            dweights = torch.matmul(grad, values.transpose(-1, -2)) - part.grouped(deltas)
            dlogits = weights * dweights * problem.options.softmax_scale
            if slope is not None:
                dlogits = dlogits * slope
            dkeys, dvalues = (torch.matmul(a.transpose(-1, -2), b) for a, b in ((dlogits, part.q), (weights, grad)))
            if dv is None:
                dkeys[..., :width] += dvalues
            else:
                part.add(dv, dvalues)
            part.add(dk, dkeys)
            dq[part.queries] = torch.matmul(dlogits, part.k).flatten(1, 2).to(q.dtype)
        return dq, dk.view(k.shape), None if dv is None else dv.view(*k.shape[:2], width)


@torch.no_grad()
def largest_logits(options: AttnOptions, q: torch.Tensor, k: torch.Tensor, lists: PreparedIndices) -> torch.Tensor:
    """``max_logits`` (Hq,) as of ``Partial``, in the accumulation dtype; reads the keys once more."""
    largest = q.new_full((q.shape[1],), _NEG_INF, dtype=accumulation_dtype(q.dtype))
    for part in _parts(q, k, lists, 0, options):
        logits, _ = part.logits(options)
        if logits.numel():
            largest = torch.maximum(largest, logits.amax((0, 3)).flatten().to(largest.dtype))
    return largest
