# SPDX-License-Identifier: Apache-2.0
"""Ground truth of attention tests: dense mask, masked softmax, autograd; float64 unless told otherwise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from magi_attention.common.slices import SliceTable, row_bounds

NEG_INF = float("-inf")


@dataclass
class Case:
    """Inputs of one attention problem; all tensors float64 with values that the test dtype can hold."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    slices: SliceTable
    scale: float
    softcap: float = 0.0
    sink: torch.Tensor | None = None
    sink_layout: str = "sh"
    kept: torch.Tensor | None = None  # (heads, tq, tk), weights of dropout

    def cast(self, dtype: torch.dtype) -> list[torch.Tensor]:
        return [x.to(dtype) for x in (self.q, self.k, self.v, self.dout)]


@dataclass
class Truth:
    out: torch.Tensor
    lse: torch.Tensor
    max_logits: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsink: torch.Tensor | None

    def tensors(self) -> dict[str, torch.Tensor]:
        names = ("out", "lse", "max_logits", "dq", "dk", "dv", "dsink")
        return {n: getattr(self, n) for n in names if getattr(self, n) is not None}


def make_case(
    seed: int,
    tq: int,
    tk: int,
    slices: np.ndarray,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),
    softcap: float = 0.0,
    sink_shape: tuple[int, ...] | None = None,
    sink_shift: float = 0.0,
    representable: torch.dtype = torch.float64,
) -> Case:
    gen = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64).to(representable).double()

    sink = None if sink_shape is None else draw(*sink_shape).float().double() + sink_shift
    return Case(
        draw(tq, heads[0], dims[0]),
        draw(tk, heads[1], dims[0]),
        draw(tk, heads[1], dims[1]),
        draw(tq, heads[0], dims[1]),
        SliceTable(slices),
        scale=dims[0] ** -0.5 * 1.3,
        softcap=softcap,
        sink=sink,
        sink_layout="sh" if sink is None or sink.dim() == 2 else "ssh",
    )


def truth(case: Case, dtype: torch.dtype = torch.float64) -> Truth:
    """Dense attention with autograd, all of it in ``dtype`` (bfloat16: the plain 16-bit way)."""
    q, k, v, dout = case.cast(dtype)
    sink = None if case.sink is None else case.sink.to(dtype).requires_grad_()
    for x in (q, k, v):
        x.requires_grad_()
    group = q.shape[1] // k.shape[1]
    kr, vr = (x.repeat_interleave(group, dim=1) for x in (k, v))
    counts = _counts(case.slices.array, q.shape[0], k.shape[0])
    s = torch.einsum("qhd,khd->hqk", q, kr) * case.scale
    if case.softcap > 0:
        s = case.softcap * torch.tanh(s / case.softcap)
    s = s.masked_fill(counts == 0, NEG_INF)
    full = s + counts.clamp(min=1).to(dtype).log()  # a pair that two slices allow counts twice
    if sink is None:
        pass
    else:
        columns = sink.T[:, None].expand(-1, q.shape[0], -1) if sink.dim() == 2 else sink.permute(2, 0, 1)
        full = torch.cat([full, columns], dim=-1)
    # Appending a column of zeros' weight would bias rows; an empty row is cut out of the softmax instead.
    if full.shape[-1] == 0:
        empty, lse = torch.ones(s.shape[:2], dtype=torch.bool), s.new_full(s.shape[:2], NEG_INF)
        p = s
    else:
        empty = (full == NEG_INF).all(-1)
        safe = full.masked_fill(empty[..., None], 0.0)
        p = torch.softmax(safe, -1).masked_fill(empty[..., None], 0.0)[..., : k.shape[0]]
        lse = torch.logsumexp(safe, -1).masked_fill(empty, NEG_INF)
    kept = torch.ones_like(p) if case.kept is None else case.kept.to(dtype)
    out = torch.einsum("hqk,khd->qhd", p * kept, vr)
    inputs = [q, k, v] + ([] if sink is None else [sink])
    grads = torch.autograd.grad(out, inputs, dout, allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs)]
    top = s.detach().flatten(1)
    top = top.amax(1) if top.shape[1] else top.new_full((q.shape[1],), NEG_INF)
    return Truth(out.detach(), lse.detach().T, top, *grads[:3], None if sink is None else grads[3])


def _counts(slices: np.ndarray, tq: int, tk: int) -> torch.Tensor:
    """(1, tq, tk): how many slices allow each pair."""
    counts, columns = np.zeros((tq, tk), dtype=np.int64), np.arange(tk)
    for row in slices:
        start, end = row_bounds(row)
        counts[row[0] : row[1]] += (columns >= start[:, None]) & (columns < end[:, None])
    return torch.from_numpy(counts)[None]


def dropout_weights(seed: int, share: float, heads: int, q: np.ndarray, k: np.ndarray) -> torch.Tensor:
    """(heads, q, k) float64: the definition of attention dropout in ``docs/dropout.md``, in 32-bit integers. ``q`` and
    ``k`` are positions."""

    def mix(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.uint32)
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return x ^ (x >> np.uint32(16))

    state, seeds = seed % 2**64, []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        seeds.append(np.uint32((z ^ (z >> 31)) >> 32))
    with np.errstate(over="ignore"):
        of_q, of_k = mix(q.astype(np.uint32) ^ seeds[0]), mix(k.astype(np.uint32) ^ seeds[2])
        of_head = mix(np.arange(heads, dtype=np.uint32) ^ seeds[1])
        pair = mix(of_head[:, None] ^ of_q)[:, :, None] ^ of_k
        pair = pair * np.uint32(0x85EBCA6B)
        pair = (pair ^ (pair >> np.uint32(15))) * np.uint32(0xC2B2AE35)
    return torch.from_numpy((pair >= np.uint32(round(share * 2**32))) / (1 - share))


def assert_same(name: str, got: torch.Tensor, want: torch.Tensor, tol: float) -> None:
    """Equal shapes, equal infinities, no NaN, and ``|got - want| <= tol * max(1, |want|_max)``."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)} is not {tuple(want.shape)}"
    got = got.double()
    assert not got.isnan().any(), f"{name} has NaN"
    assert torch.equal(got == NEG_INF, want == NEG_INF), f"{name}: -inf at other places"
    finite = want != NEG_INF
    if finite.any():
        error = (got[finite] - want[finite]).abs().max().item()
        bound = tol * max(1.0, want[finite].abs().max().item())
        assert error <= bound, f"{name}: error {error:.3e} above {bound:.3e}"
