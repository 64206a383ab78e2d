# SPDX-License-Identifier: Apache-2.0
"""Gradients of dense attention, error bounds and comparisons of the GPU backward tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from forward_oracle import NEG_INF, Inputs, by_rows, dense

from magi_attention.common.slices import to_dense
from magi_attention.kernels.ffa import backward as ffa_backward
from magi_attention.kernels.types import AttnOptions, Grads
from magi_attention.native import abi
from magi_attention.native.ffa import FfaLibrary

NAMES = ("dq", "dk", "dv", "dsink")


@dataclass
class Truth:
    """float64: the gradients, and what an out of 16 bits may cost each value of dq, dk and dsink."""

    grads: Grads
    slack: dict[str, torch.Tensor]
    bounds: dict[str, torch.Tensor | float]  # (rows,) of dq, dk, dv; one number for dsink


def largest_block_m(dim: int, is_counted: bool) -> int:
    """The most queries that an m-block may have with head dims up to ``dim``, without softcap and dropout.
    ``is_counted``: dq is deterministic, or the first writer stores."""
    if dim <= 64:
        return 64 if is_counted else 128
    return 80 if dim <= 128 else 64


def options_of(x: Inputs, sm_margin: int = 0) -> AttnOptions:
    return AttnOptions(x.scale, x.softcap, x.sink_layout, sm_margin=sm_margin)


def make_dout(x: Inputs, seed: int = 1) -> torch.Tensor:
    """(Tq, Hq, Dv) normal values in q's dtype."""
    gen = torch.Generator(x.q.device).manual_seed(1000 + seed)
    shape = (*x.q.shape[:2], x.v.shape[2])
    return torch.randn(*shape, generator=gen, device=x.q.device).to(x.q.dtype)


def seen(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries that see a key (Tq,) and keys that a query sees (Tk,), bool."""
    allowed = torch.from_numpy(to_dense(x.slices.array, len(x.q), len(x.k))).to(x.q.device)
    return allowed.any(1), allowed.any(0)


def plain_grads(x: Inputs, dout: torch.Tensor) -> Grads:
    """Autograd of dense attention with every step in the dtype of q."""
    leaves = {name: getattr(x, name).detach().requires_grad_() for name in ("q", "k", "v")}
    sink = None if x.sink is None else x.sink.detach().to(x.q.dtype).requires_grad_()
    with torch.enable_grad():
        out = dense(replace(x, **leaves, sink=sink), x.q.dtype).out
    wanted = [*leaves.values(), *([] if sink is None else [sink])]
    return Grads(*torch.autograd.grad(out, wanted, dout, allow_unused=True, materialize_grads=True))


def _exact(x: Inputs, dout: torch.Tensor) -> Truth:
    forward = dense(x, torch.float64)
    q, k, v, do = (t.double() for t in (x.q, x.k, x.v, dout))
    group = q.shape[1] // k.shape[1]
    kk, vv = (t.repeat_interleave(group, dim=1) for t in (k, v))
    allowed = torch.from_numpy(to_dense(x.slices.array, len(q), len(k))).to(q.device)
    s, slope = torch.einsum("qhd,khd->hqk", q, kk) * x.scale, 1.0
    if x.softcap > 0:
        tanh = torch.tanh(s / x.softcap)
        s, slope = x.softcap * tanh, 1.0 - tanh.square()
    lse = forward.lse.T[..., None]
    p = torch.exp(s - lse.masked_fill(lse == NEG_INF, 0.0)).masked_fill(~allowed, 0.0)
    delta = (forward.out * do).sum(-1).T[..., None]
    through = p * slope * x.scale  # what turns an error of dp - delta into one of the scores' gradient
    ds = through * (torch.einsum("qhd,khd->hqk", do, vv) - delta)

    def over_group(t_KHD: torch.Tensor) -> torch.Tensor:
        return t_KHD.unflatten(1, (k.shape[1], group)).sum(2)

    grads = Grads(
        torch.einsum("hqk,khd->qhd", ds, kk),
        over_group(torch.einsum("hqk,qhd->khd", ds, q)),
        over_group(torch.einsum("hqk,qhd->khd", p, do)),
    )
    # delta is taken from an out of 16 bits. Errors of its values are independent, so they add up as squares.
    eps = torch.finfo(x.q.dtype).eps
    delta_error = 2 * eps * (forward.out * do).square().sum(-1).sqrt()  # (Tq, Hq): some 5 standard deviations
    squares = torch.einsum("hqk,qhd->khd", through.square(), (delta_error[..., None] * q).square())
    slack = {
        "dq": delta_error[..., None] * torch.einsum("hqk,khd->qhd", through, kk).abs(),
        "dk": over_group(squares).sqrt() * 2,
    }
    if x.sink is not None:
        is_per_row = x.sink.dim() == 3
        sink = x.sink.double() if is_per_row else x.sink.double()[None].expand(len(q), -1, -1)
        weight = torch.exp(sink - forward.lse[:, None])
        dsink, errors = -weight * delta[..., 0].T[:, None], weight * delta_error[:, None]
        grads.dsink = dsink if is_per_row else dsink.sum(0)
        slack["dsink"] = errors if is_per_row else errors.square().sum(0).sqrt()
    return Truth(grads, slack, {})


def truth(x: Inputs, dout: torch.Tensor, factor: float = 2.0) -> Truth:
    """The exact gradients and the allowed errors.

    By rows: ``factor`` times the error of the plain 16-bit way, but at least what rounding the scores' gradient and the
    result costs, plus what comes from an out of 16 bits, which the plain way has in more.
    """
    want, plain, eps = _exact(x, dout), plain_grads(x, dout), torch.finfo(x.q.dtype).eps
    for name in NAMES[:3]:
        exact = getattr(want.grads, name)
        if not exact.numel():
            want.bounds[name] = exact.new_zeros(len(exact))
            continue
        error = by_rows(getattr(plain, name).double() - exact)
        bound = torch.maximum(factor * error, eps * by_rows(exact))
        if name in want.slack:
            bound = bound + by_rows(want.slack[name])
        want.bounds[name] = bound + 1e-5 * max(1.0, exact.abs().max().item())
    if x.sink is not None and x.sink.numel():
        exact = want.grads.dsink
        error = (plain.dsink.double() - exact).abs().max()
        bound = max(factor * error.item(), eps * exact.abs().max().item())
        want.bounds["dsink"] = bound + want.slack["dsink"].max().item() + 1e-4
    return want


def assert_grads(
    x: Inputs, got: Grads, want: Truth, note: object = "", before: Grads | None = None, more: float = 1.0
) -> None:
    """``before`` is what float32 buffers held, to which ``got`` was added; ``more`` widens the bounds."""
    for name in NAMES:
        exact, mine = getattr(want.grads, name), getattr(got, name)
        assert (exact is None) == (mine is None), f"{note} {name}"
        if exact is None:
            continue
        assert mine.shape == exact.shape, f"{note} {name}: shape {tuple(mine.shape)} is not {tuple(exact.shape)}"
        assert not mine.isnan().any(), f"{note} {name} has NaN"
        if not exact.numel():
            continue
        error = mine.double() - exact
        bound = torch.as_tensor(want.bounds[name], device=mine.device) * more
        if before is not None and name != "dsink":
            error -= getattr(before, name).double()
            bound = bound + 1e-6 * getattr(before, name).abs().max().item()
        if name == "dsink":
            assert error.abs().max() <= bound, f"{note} dsink: {error.abs().max():.3e} above {bound:.3e}"
            continue
        excess = error.abs().flatten(1).amax(1) - bound
        row = int(excess.argmax())
        assert excess[row] <= 0, f"{note} {name}: row {row} is {excess[row]:.3e} above {bound[row]:.3e}"
    if before is None:
        sees, is_seen = seen(x)
        for name, rows in (("dq", ~sees), ("dk", ~is_seen), ("dv", ~is_seen)):
            assert not getattr(got, name)[rows].any(), f"{note} {name}: rows without a pair are not zero"


def assert_same(got: Grads, want: Grads, dtype: torch.dtype, note: object = "") -> None:
    """Two runs: dk and dv bit for bit; dq as near as another order of its sum leaves it."""
    for name in ("dk", "dv"):
        assert torch.equal(getattr(got, name), getattr(want, name)), f"{note} {name} differs"
    a, b = got.dq.double(), want.dq.double()
    assert not a.isnan().any(), f"{note} dq has NaN"
    top = b.abs().max().item() if b.numel() else 0.0
    assert ((a - b).abs() <= torch.finfo(dtype).eps * b.abs() + 1e-5 * top).all(), f"{note} dq differs"


def assert_near(got: Grads, want: Grads, note: object = "") -> None:
    """Two walks, with steps of the same size: sums in other orders, some of which are rounded to the next 16 bits. Over
    all of a gradient, as most values of long sums are far below the largest one."""
    for name in ("dq", "dk", "dv"):
        a, b = getattr(got, name).double(), getattr(want, name).double()
        apart = ((a - b).norm() / b.norm()).item()
        assert apart < 4e-3, f"{note} {name}: {apart:.1e} of its norm apart"


class WatchedLibrary:
    """A library of kernels that notes the parameters of each backward."""

    def __init__(self, library: FfaLibrary, note: Callable[[abi.FfaBwdParams], None]) -> None:
        self._library, self._note = library, note

    def backward_raw(self, params: bytes) -> int:
        self._note(abi.FfaBwdParams.from_buffer_copy(params))
        return self._library.backward_raw(params)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)


def watch_backwards(monkeypatch: pytest.MonkeyPatch, note: Callable[[abi.FfaBwdParams], None]) -> None:
    """Has ``note`` called with the parameters of each launch of keys that are all there."""
    prepare = ffa_backward.BackwardCalls._call

    def watched(self, *args):
        call = prepare(self, *args)
        return replace(call, library=WatchedLibrary(call.library, note))

    monkeypatch.setattr(ffa_backward.BackwardCalls, "_call", watched)
