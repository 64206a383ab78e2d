# SPDX-License-Identifier: Apache-2.0
"""What sparse results are compared with before they are timed: a sample of rows, as of ``reference``.

Rows of out and dq are computed in float64. Rows of dk and dv need all queries, and are computed in float32. The
patterns are read by ``seen``, which none of the implementations uses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from reference import (
    CHUNK_BYTES,
    GRAD_TOLERANCE,
    TOLERANCE,
    reference_dkv,
    reference_dq,
    reference_rows,
    relative_error,
    sample_rows,
)
from sparse_cases import SparseCase


class SparseForwardCheck:
    """Compares an out with the reference: ``{"out": relative error}``."""

    tolerance = TOLERANCE

    def __init__(self, case: SparseCase, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> None:
        self._rows = torch.from_numpy(sample_rows(case.seqlen)).to(q.device)
        values = k[..., : case.head_dim_v] if v is None else v
        self._want = reference_rows(q, k, values, case.seen(self._rows), self._rows, torch.float64)

    def __call__(self, out: torch.Tensor) -> dict[str, float]:
        return {"out": relative_error(out[self._rows], self._want)}


class SparseBackwardCheck:
    """Compares (dq, dk, dv) with the reference: the relative error of each. Without v dk holds both gradients."""

    tolerance = GRAD_TOLERANCE

    def __init__(self, case: SparseCase, q, k, v, dout) -> None:
        at = self._rows = torch.from_numpy(sample_rows(case.seqlen)).to(q.device)
        everyone = torch.arange(case.seqlen, device=q.device)
        seen_by = torch.cat([case.seen(part)[:, at] for part in everyone.split(4096)])
        values = k[..., : case.head_dim_v] if v is None else v
        lse, delta = statistics(case, q, k, values, dout)
        dk, dv = reference_dkv(q, k, values, dout, lse, delta, seen_by, at)
        self._want = {"dq": reference_dq(q, k, values, dout, case.seen(at), at, torch.float64), "dk": dk}
        if v is None:
            dk[..., : case.head_dim_v] += dv
        else:
            self._want["dv"] = dv

    def __call__(self, grads: Sequence[torch.Tensor]) -> dict[str, float]:
        return {n: relative_error(got[self._rows], want) for (n, want), got in zip(self._want.items(), grads)}


def statistics(case: SparseCase, q, k, v, dout) -> tuple[torch.Tensor, torch.Tensor]:
    """lse and delta of all rows, (T, Hq) float32; both 0 where a row sees nothing."""
    tokens, heads, dim = q.shape
    share = heads // k.shape[1]
    lse, delta = (q.new_zeros((tokens, heads), dtype=torch.float32) for _ in range(2))
    for rows in torch.arange(tokens, device=q.device).split(max(1, CHUNK_BYTES // (4 * tokens * share))):
        hidden = ~case.seen(rows)[:, None]
        at = slice(int(rows[0]), int(rows[-1]) + 1)
        for head in range(k.shape[1]):
            mine = slice(head * share, (head + 1) * share)
            s = torch.matmul(q[at, mine].float(), k[:, head].float().t()) * dim**-0.5
            part = s.masked_fill_(hidden, float("-inf")).logsumexp(-1)
            part = part.masked_fill_(part == float("-inf"), 0.0)
            dp = torch.matmul(dout[at, mine].float(), v[:, head].float().t())
            lse[at, mine], delta[at, mine] = part, s.sub_(part[..., None]).exp_().mul_(dp).sum(-1)
    return lse, delta
