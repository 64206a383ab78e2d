# SPDX-License-Identifier: Apache-2.0
"""Problems, dense attention in any dtype, error bounds and comparisons of the GPU forward tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from magi_attention.common.slices import SliceTable, to_dense

NEG_INF = float("-inf")


@dataclass
class Inputs:
    """One problem. q (Tq, Hq, D), k (Tk, Hk, D), v (Tk, Hk, Dv) in a 16-bit dtype; sink (S, Hq) or (Tq, S, Hq)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slices: SliceTable
    scale: float
    softcap: float = 0.0
    sink: torch.Tensor | None = None

    @property
    def sink_layout(self) -> str:
        return "ssh" if self.sink is not None and self.sink.dim() == 3 else "sh"

    @property
    def ranges(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return tuple(x.to(self.q.device) for x in self.slices.tensors())


@dataclass
class Result:
    out: torch.Tensor
    lse: torch.Tensor
    max_logits: torch.Tensor | None


def make_inputs(
    seed: int,
    slices: SliceTable | np.ndarray,
    tq: int,
    tk: int,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    size: float = 1.0,
    softcap: float = 0.0,
    sink_shape: tuple[int, ...] | None = None,
) -> Inputs:
    """Normal values; those of q and k times ``size``."""
    gen = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, device=device)

    return Inputs(
        (draw(tq, heads[0], dims[0]) * size).to(dtype),
        (draw(tk, heads[1], dims[0]) * size).to(dtype),
        draw(tk, heads[1], dims[1]).to(dtype),
        slices if isinstance(slices, SliceTable) else SliceTable(slices),
        dims[0] ** -0.5,
        softcap,
        None if sink_shape is None else draw(*sink_shape),
    )


def dense(x: Inputs, dtype: torch.dtype) -> Result:
    """Attention by a dense mask, every step of it in ``dtype``."""
    q, k, v = (t.to(dtype) for t in (x.q, x.k, x.v))
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    allowed = torch.from_numpy(to_dense(x.slices.array, len(q), len(k))).to(q.device)
    s = torch.einsum("qhd,khd->hqk", q, k) * x.scale
    if x.softcap > 0:
        s = x.softcap * torch.tanh(s / x.softcap)
    s = s.masked_fill(~allowed, NEG_INF)
    top = s.flatten(1).amax(1) if s[0].numel() else s.new_full((q.shape[1],), NEG_INF)
    if x.sink is not None:
        sink = x.sink.to(dtype)
        columns = sink.T[:, None].expand(-1, len(q), -1) if sink.dim() == 2 else sink.permute(2, 0, 1)
        s = torch.cat([s, columns], dim=-1)
    is_empty = (s == NEG_INF).all(-1)
    safe = s.masked_fill(is_empty[..., None], 0.0)
    p = torch.softmax(safe, -1).masked_fill(is_empty[..., None], 0.0)[..., : len(k)]
    lse = torch.logsumexp(safe, -1).masked_fill(is_empty, NEG_INF) if s.shape[-1] else s.new_full(s.shape[:2], NEG_INF)
    return Result(torch.einsum("hqk,khd->qhd", p, v), lse.T, top)


def allowed_error_of_huge_logits(x: Inputs, want: Result) -> float:
    """A weight is as exact as its logit; float32 sums of the products leave some 10^-6 of it."""
    top = want.max_logits.max().item()
    return (4 * torch.finfo(x.q.dtype).eps + 4e-6 * top) * want.out.abs().max().item()


def by_rows(error: torch.Tensor) -> torch.Tensor:
    """(Tq, Hq, Dv) to the largest of each row and its 15 neighbours on either side, (Tq,)."""
    worst = error.abs().flatten(1).amax(1)
    return torch.nn.functional.max_pool1d(worst[None, None], 31, stride=1, padding=15)[0, 0]


def allowed_error(x: Inputs, want: Result) -> torch.Tensor:
    """(Tq,): twice the error of the plain 16-bit way, but at least what rounding the exact result costs.

    By rows, because rows that see few keys have larger results and errors than rows that see many.
    """
    if not want.out.numel():
        return want.out.new_zeros(len(want.out))
    plain = dense(x, x.q.dtype).out.double()
    bound = torch.maximum(2 * by_rows(plain - want.out), torch.finfo(x.q.dtype).eps / 2 * by_rows(want.out))
    assert (bound < by_rows(want.out) * 0.5 + 1e-6).all(), "the plain way is too wrong to be a measure; give a bound"
    return bound


def assert_numbers(name: str, got: torch.Tensor, want: torch.Tensor, tol: float) -> None:
    """Float32 results: -inf at the same places, the rest within ``tol * max(1, |want|)``."""
    got = got.double()
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)} is not {tuple(want.shape)}"
    assert not got.isnan().any(), f"{name} has NaN"
    finite = want != NEG_INF
    assert torch.equal(got != NEG_INF, finite), f"{name}: -inf at other places"
    excess = ((got - want).abs() / want.abs().clamp_min(1.0))[finite]
    assert not finite.any() or excess.max() <= tol, f"{name}: relative error {excess.max():.2e} above {tol:.2e}"


def assert_right(
    x: Inputs, got: Result, tol: float | torch.Tensor | None = None, want: Result | None = None, note: object = ""
) -> Result:
    """Compares with the float64 truth, which is returned. ``tol`` replaces the bound of the plain 16-bit way."""
    want = dense(x, torch.float64) if want is None else want
    assert got.out.shape == want.out.shape, f"{note} out: shape {tuple(got.out.shape)}"
    assert not got.out.isnan().any(), f"{note} out has NaN"
    bound = allowed_error(x, want) if tol is None else tol
    if want.out.numel():
        excess = (got.out.double() - want.out).abs().flatten(1).amax(1) - bound
        row = int(excess.argmax())
        assert excess[row] <= 0, f"{note} out: row {row} is {excess[row]:.3e} above its bound"
    # The GPU's fast tanh has a relative error of 2^-11.
    lse_tol = 1e-3 * max(1.0, x.softcap) if x.softcap else 3e-5
    assert_numbers(f"{note} lse", got.lse, want.lse, lse_tol)
    if got.max_logits is not None:
        assert_numbers(f"{note} max_logits", got.max_logits, want.max_logits, lse_tol)
    return want
