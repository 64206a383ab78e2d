# SPDX-License-Identifier: Apache-2.0
"""What results are compared with before they are timed: attention and its gradients in float32, on a sample of rows.

A query row of out or dq needs that row alone. A key row of dk or dv needs lse and delta (the sum of out * dout) of
every query that sees the key: these are computed for all rows, in chunks of bounded memory, from the inputs, so
nothing of what is being checked enters the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from masks import Case

from magi_attention.common.slices import row_bounds

ROWS_CHECKED = 48
# Relative error (root mean square) of a bf16 or fp16 result; one rounding of P and one of out are about 0.003.
TOLERANCE = 0.01
# Gradients are further off: P, dS, the out that delta is made of and the result are each rounded to bf16. Emulated on
# the masks of this benchmark at 1K and 4K tokens this makes 0.002 to 0.0034; kernels round in more places and orders,
# and dS = P * (dP - delta) is a difference. A tile of 128 of 32K keys left out of a row of dq makes about 0.06.
GRAD_TOLERANCE = 0.02
CHUNK_BYTES = 2**30  # of one float32 matrix of scores


def sample_rows(count: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, ROWS_CHECKED).astype(np.int64))


def seen_keys(case: Case, rows: np.ndarray) -> np.ndarray:
    """Boolean (rows, seqlen) of the chosen query rows, from the slices."""
    seen = np.zeros((len(rows), case.seqlen), dtype=bool)
    for row in case.mask.slices.array:
        start, end = row_bounds(row)
        for i in np.flatnonzero((rows >= row[0]) & (rows < row[1])):
            local = rows[i] - row[0]
            seen[i, start[local] : end[local]] = True
    return seen


def seen_by(case: Case, keys: np.ndarray) -> np.ndarray:
    """Boolean (seqlen, keys): which queries see the chosen keys, from the slices."""
    seen = np.zeros((case.seqlen, len(keys)), dtype=bool)
    for row in case.mask.slices.array:
        start, end = row_bounds(row)
        seen[row[0] : row[1]] |= (keys >= start[:, None]) & (keys < end[:, None])
    return seen


def _head_share(q: torch.Tensor, k: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Each kv head with its query heads; one at a time, for memory."""
    share = q.shape[1] // k.shape[1]
    for head in range(k.shape[1]):
        yield head, slice(head * share, (head + 1) * share)


def _weights(q_rows, k_head, seen, scale: float) -> torch.Tensor:
    s = torch.einsum("rhd,kd->rhk", q_rows, k_head) * scale
    return s.masked_fill_(~seen[:, None], float("-inf")).softmax(-1).nan_to_num_(0.0)


def reference_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, rows: torch.Tensor, dtype=torch.float32
) -> torch.Tensor:
    """Attention of the chosen rows in ``dtype``, (rows, Hq, Dv)."""
    parts = []
    for head, heads in _head_share(q, k):
        p = _weights(q[rows, heads].to(dtype), k[:, head].to(dtype), seen, q.shape[2] ** -0.5)
        parts.append(p @ v[:, head].to(dtype))
    return torch.cat(parts, 1)


def reference_dq(q, k, v, dout, seen: torch.Tensor, rows: torch.Tensor, dtype=torch.float32) -> torch.Tensor:
    """dq of the chosen rows in ``dtype``, (rows, Hq, D)."""
    scale, parts = q.shape[2] ** -0.5, []
    for head, heads in _head_share(q, k):
        k_head = k[:, head].to(dtype)
        p = _weights(q[rows, heads].to(dtype), k_head, seen, scale)
        dp = torch.einsum("rhd,kd->rhk", dout[rows, heads].to(dtype), v[:, head].to(dtype))
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        parts.append(ds @ k_head)
    return torch.cat(parts, 1)


def row_statistics(case: Case, q, k, v, dout, chunk_bytes: int = CHUNK_BYTES) -> tuple[torch.Tensor, torch.Tensor]:
    """lse and delta of all rows, (T, Hq) float32; both 0 where a row sees nothing."""
    tokens, heads, dim = q.shape
    chunk = max(1, min(tokens, chunk_bytes // (4 * tokens * (heads // k.shape[1]))))
    lse, delta = (q.new_zeros((tokens, heads), dtype=torch.float32) for _ in range(2))
    bounds = [(int(row[0]), int(row[1]), *row_bounds(row)) for row in case.mask.slices.array]
    for first in range(0, tokens, chunk):
        last = min(first + chunk, tokens)
        low, seen = _seen_block(bounds, first, last, q.device)
        keys = slice(low, low + seen.shape[1])
        if not seen.shape[1]:
            continue
        for head, mine in _head_share(q, k):
            shape = (last - first, mine.stop - mine.start, seen.shape[1])
            s = q[first:last, mine].float().flatten(0, 1) @ k[keys, head].float().t()
            s = s.mul_(dim**-0.5).view(shape).masked_fill_(~seen[:, None], float("-inf"))
            part = s.logsumexp(-1)
            part = part.masked_fill_(part == float("-inf"), 0.0)
            p = s.sub_(part[..., None]).exp_()
            dp = dout[first:last, mine].float().flatten(0, 1) @ v[keys, head].float().t()
            lse[first:last, mine] = part
            delta[first:last, mine] = dp.view(shape).mul_(p).sum(-1)
    return lse, delta


def _seen_block(bounds: Sequence[tuple], first: int, last: int, device) -> tuple[int, torch.Tensor]:
    """First key that any of the rows sees, and a boolean (rows, keys) from there to the last one."""
    pieces = []
    for q0, q1, start, end in bounds:
        a, b = max(first, q0), min(last, q1)
        if a < b:
            pieces.append((a, b, start[a - q0 : b - q0], end[a - q0 : b - q0]))
    pieces = [p for p in pieces if (p[3] > p[2]).any()]
    if not pieces:
        return 0, torch.zeros((last - first, 0), dtype=torch.bool, device=device)
    low = min(int(p[2][p[3] > p[2]].min()) for p in pieces)
    high = max(int(p[3][p[3] > p[2]].max()) for p in pieces)
    columns = torch.arange(low, high, device=device)
    seen = torch.zeros((last - first, high - low), dtype=torch.bool, device=device)
    for a, b, start, end in pieces:
        start_t, end_t = (torch.from_numpy(x).to(device)[:, None] for x in (start, end))
        seen[a - first : b - first] |= (columns >= start_t) & (columns < end_t)
    return low, seen


def reference_dkv(q, k, v, dout, lse, delta, seen: torch.Tensor, keys: torch.Tensor):
    """dk and dv of the chosen keys in float32, (keys, Hk, D) and (keys, Hk, Dv); ``seen`` is (T, keys)."""
    scale, dk, dv = q.shape[2] ** -0.5, [], []
    for head, heads in _head_share(q, k):
        q_head, dout_head = q[:, heads].float(), dout[:, heads].float()
        s = torch.einsum("thd,kd->thk", q_head, k[keys, head].float()) * scale
        p = s.sub_(lse[:, heads, None]).exp_().masked_fill_(~seen[:, None], 0.0)
        dp = torch.einsum("thd,kd->thk", dout_head, v[keys, head].float())
        dv.append(torch.einsum("thk,thd->kd", p, dout_head))
        ds = dp.sub_(delta[:, heads, None]).mul_(p).mul_(scale)
        dk.append(torch.einsum("thk,thd->kd", ds, q_head))
    return torch.stack(dk, 1), torch.stack(dv, 1)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Root mean square of the difference over that of the reference; inf if anything is not finite."""
    got = got.float()
    if not torch.isfinite(got).all():
        return float("inf")
    return ((got - want).norm() / want.norm().clamp_min(1e-30)).item()


class ForwardCheck:
    """Compares an out with the reference: ``{"out": relative error}``."""

    tolerance = TOLERANCE

    def __init__(self, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        rows = sample_rows(case.seqlen)
        self._rows = torch.from_numpy(rows).to(q.device)
        self._want = reference_rows(q, k, v, torch.from_numpy(seen_keys(case, rows)).to(q.device), self._rows)

    def __call__(self, out: torch.Tensor) -> dict[str, float]:
        return {"out": relative_error(out[self._rows], self._want)}


class BackwardCheck:
    """Compares (dq, dk, dv) with the reference: the relative error of each."""

    tolerance = GRAD_TOLERANCE

    def __init__(self, case: Case, q, k, v, dout) -> None:
        rows = sample_rows(case.seqlen)
        at = self._rows = torch.from_numpy(rows).to(q.device)
        seen, seen_t = (torch.from_numpy(f(case, rows)).to(q.device) for f in (seen_keys, seen_by))
        self._shapes = (q.shape, k.shape, v.shape)
        lse, delta = row_statistics(case, q, k, v, dout)
        dk, dv = reference_dkv(q, k, v, dout, lse, delta, seen_t, at)
        self._want = {"dq": reference_dq(q, k, v, dout, seen, at), "dk": dk, "dv": dv}

    def __call__(self, grads: Sequence[torch.Tensor]) -> dict[str, float]:
        for (name, _), got, shape in zip(self._want.items(), grads, self._shapes):
            if got.shape != shape:
                raise ValueError(f"{name} is {tuple(got.shape)}, not {tuple(shape)}.")
        return {n: relative_error(got[self._rows], want) for (n, want), got in zip(self._want.items(), grads)}
