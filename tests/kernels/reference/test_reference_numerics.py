# SPDX-License-Identifier: Apache-2.0
"""The torch backends on numbers that plain formulas spoil: values that are not finite, and logits of 1e5 to 1e7."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from attn_oracle import Case, make_case, truth

from magi_attention.api import Mask, attend, index_attn_func, make_plan
from magi_attention.common.slices import FULL, SliceTable, to_dense
from magi_attention.kernels import AttnOptions, Backend, SdpaBackend, SdpaOnlineBackend
from magi_attention.kernels.reference.numerics import masked_product
from magi_attention.kernels.types import BackwardOperands, Operands
from magi_attention.testing.masks import random_slices

BACKENDS = {"sdpa": SdpaBackend(), "sdpa_ol": SdpaOnlineBackend(), "small": SdpaOnlineBackend(block_q=24, block_k=40)}
each_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
NAMES = ("out", "lse", "dq", "dk", "dv")


def run(backend: Backend, case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    q, k, v, dout = case.cast(dtype)
    options = AttnOptions(case.scale, case.softcap, return_max_logits=True)
    part = backend.forward(Operands(q, k, v, case.slices, options))
    grads = backend.backward(BackwardOperands(dout, q, k, v, part.out.to(dtype), part.lse, case.slices, options))
    return dict(zip(NAMES, (part.out, part.lse, grads.dq, grads.dk, grads.dv), strict=True))


def row_by_row(case: Case) -> dict[str, torch.Tensor]:
    """Each query by itself with no other keys than its own."""
    q, k, v, dout = case.q, case.k, case.v, case.dout
    group, allowed = q.shape[1] // k.shape[1], to_dense(case.slices.array, len(q), len(k))
    out, lse, dq = torch.zeros_like(dout), q.new_full(q.shape[:2], -math.inf), torch.zeros_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for i in range(len(q)):
        seen = np.flatnonzero(allowed[i])
        for h in range(q.shape[1]) if len(seen) else ():
            keys, values = k[seen, h // group], v[seen, h // group]
            s, slope = keys @ q[i, h] * case.scale, 1.0
            if case.softcap:
                slope = 1 - torch.tanh(s / case.softcap) ** 2
                s = case.softcap * torch.tanh(s / case.softcap)
            p = torch.softmax(s, 0)
            out[i, h], lse[i, h] = p @ values, torch.logsumexp(s, 0)
            ds = p * (values @ dout[i, h] - (out[i, h] * dout[i, h]).sum()) * slope * case.scale
            dq[i, h] = ds @ keys
            dk[seen, h // group] += ds[:, None] * q[i, h]
            dv[seen, h // group] += p[:, None] * dout[i, h]
    return dict(zip(NAMES, (out, lse, dq, dk, dv), strict=True))


def assert_contained(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tol: float) -> int:
    """Equal where the truth is finite, and not finite where it is not; returns how many are not."""
    spoilt = 0
    for name in NAMES:
        is_finite, x = want[name].isfinite(), got[name].double()
        empty = want[name] == -math.inf if name == "lse" else torch.zeros_like(is_finite)
        assert (x[empty] == -math.inf).all(), name
        assert torch.equal(x.isfinite(), is_finite), f"{name}: not finite at other places"
        assert torch.allclose(x[is_finite], want[name][is_finite], rtol=tol, atol=tol), name
        spoilt += int((~is_finite & ~empty).sum())
    return spoilt


def spoil(rng: np.random.Generator, x: torch.Tensor, value: float) -> torch.Tensor:
    x = x.clone()
    x[int(rng.integers(len(x))), int(rng.integers(x.shape[1])), int(rng.integers(x.shape[2]))] = value
    return x


SPOILT = [(name, math.nan) for name in ("q", "k", "v", "dout")] + [
    (name, value) for name in ("v", "dout") for value in (math.inf, -math.inf)
]


@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize(("name", "value"), SPOILT)
def test_what_is_not_finite_reaches_only_who_may_see_it(name, value, softcap) -> None:
    spoilt = 0
    for seed in range(6):
        print(f"seed {seed}")
        rng = np.random.default_rng(seed)
        tq, tk = (int(x) for x in rng.integers(20, 70, 2))
        case = make_case(seed, tq, tk, random_slices(rng, tq, tk, max_slices=10), (2, 1), (8, 6), softcap)
        case = replace(case, **{name: spoil(rng, getattr(case, name), value)})
        want = row_by_row(case)
        for backend in BACKENDS.values():
            for dtype, tol in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
                spoilt += assert_contained(run(backend, case, dtype), want, tol)
    assert spoilt > 0


@each_backend
@pytest.mark.parametrize("name", ["q", "k"])
def test_infinite_queries_and_keys_stay_in_their_document(backend, name) -> None:
    """What comes of them there depends on the order of sums; elsewhere nothing does."""
    lengths = [20, 1, 30, 20]
    mask = Mask.from_lengths(lengths, causal=True)
    own = slice(21, 51)  # the third
    for seed in range(3):
        print(f"seed {seed}")
        rng = np.random.default_rng(seed)
        case = make_case(seed, 71, 71, mask.slices.array)
        clean = row_by_row(case)
        x = getattr(case, name).clone()
        x[own][int(rng.integers(30)), 0, int(rng.integers(16))] = rng.choice([-1, 1]) * math.inf
        got = run(backend, replace(case, **{name: x}), torch.float32)
        for key in NAMES:
            for rest in (slice(0, own.start), slice(own.stop, None)):
                assert torch.allclose(got[key][rest].double(), clean[key][rest], rtol=1e-4, atol=1e-4), key
        assert not all(got[key][own].isfinite().all() for key in NAMES)


@each_backend
def test_products_of_a_forbidden_pair_may_overflow(backend) -> None:
    """Finite values whose logit or whose dout v is beyond float32, in two documents."""
    case = make_case(0, 40, 40, Mask.from_lengths([20, 20]).slices.array)
    for large, other in (("q", "k"), ("dout", "v")):
        changed = {large: getattr(case, large).clone(), other: getattr(case, other).clone()}
        changed[large][:20] *= 1e25
        changed[other][20:] *= 1e25
        changed[other][:20] *= 1e-25
        changed[large][20:] *= 1e-25
        odd = replace(case, **changed)
        got, want = run(backend, odd, torch.float32), row_by_row(odd)
        for name in NAMES:
            assert got[name].isfinite().all(), name
            size = want[name].abs().amax((1, 2), keepdim=True) if want[name].dim() == 3 else 1.0
            assert ((got[name].double() - want[name]).abs() <= 2e-4 * size + 1e-30).all(), (large, name)


@each_backend
def test_dropout_keeps_it_contained(backend) -> None:
    mask = Mask.from_lengths([30, 30], causal=True)
    case = make_case(5, 60, 60, mask.slices.array)
    plan = make_plan(mask, 1)
    for name in ("q", "k", "v"):
        x = {n: getattr(case, n).float() for n in "qkv"}
        x[name][10, 0, 0] = math.nan
        for t in x.values():
            t.requires_grad_()
        out, _ = attend(*x.values(), plan, dropout_p=0.3, dropout_seed=1)
        out.sum().backward()
        assert out[30:].isfinite().all() and all(t.grad[30:].isfinite().all() for t in x.values())
        assert not out[:30].isfinite().all()


@pytest.mark.parametrize("seed", range(20))
def test_masked_product_is_that_of_allowed_pairs(seed) -> None:
    print(f"seed {seed}")
    rng, gen = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    weights = torch.randn(2, 7, 9, generator=gen, dtype=torch.float64)
    weights[torch.rand(weights.shape, generator=gen) < 0.1] = 0
    x = torch.randn(2, 9, 5, generator=gen, dtype=torch.float64)
    for value in (math.nan, math.inf, -math.inf, math.inf)[: int(rng.integers(5))]:
        x = spoil(rng, x, value)
    allowed = torch.rand(7, 9, generator=gen) < 0.6
    want = torch.zeros(2, 7, 5, dtype=torch.float64)
    for b, i, j in np.ndindex(2, 7, 9):
        if allowed[i, j]:
            want[b, i] += weights[b, i, j] * x[b, j]
    assert torch.allclose(masked_product(weights, allowed, x), want, equal_nan=True)


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_index_attention_keeps_it_with_those_that_list_it(name) -> None:
    """A list that is shorter than others is filled up with row 0, which others may own."""
    gen = torch.Generator().manual_seed(1)
    x = {n: torch.randn(12, 2, 8, generator=gen) for n in ("q", "k", "v", "dout")}
    lists = torch.full((12, 2, 5), -1)
    lists[:6, :, :3] = torch.arange(6)[:, None, None].clamp(max=3) + torch.arange(3)
    lists[6:, :, :4] = torch.arange(4) + 8
    x[name][9, 1, 2] = math.nan
    q, k, v = (x[n].requires_grad_() for n in "qkv")
    out, meta = index_attn_func(q, k, v, lists)
    out.backward(x["dout"])
    for got in (out, meta.lse, q.grad, k.grad, v.grad):
        assert got[:6].isfinite().all()
    assert not all(t.isfinite().all() for t in (out, q.grad, k.grad, v.grad))


# ---- large logits -----------------------------------------------------------------------------------


def large_case(seed: int, size: float, spread: float | None, softcap: float = 0.0) -> Case:
    """Logits of about ``size``, those of a row apart by all of it, or by ``spread`` only."""
    rng = np.random.default_rng(seed)
    tq, tk = (int(x) for x in rng.integers(30, 80, 2))
    case = make_case(seed, tq, tk, random_slices(rng, tq, tk, max_slices=6), softcap=softcap)
    q, k = case.q, case.k
    if spread is None:
        q, k = q * size**0.5, k * size**0.5
    else:
        q, k = q.clone(), k * spread
        q[..., 0], k[..., 0] = 2048.0, size / 2048.0 / case.scale  # the same logit of all keys
    given = {"q": q, "k": k, "v": case.v, "dout": case.dout}
    return replace(case, **{name: x.float().double() for name, x in given.items()})


@each_backend
@pytest.mark.parametrize("spread", [None, 1.0], ids=["apart", "close"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("size", [1e5, 1e6, 1e7])
def test_large_logits(backend, size, sign, spread) -> None:
    for seed in range(8):
        print(f"seed {seed}")
        case = large_case(seed, sign * size if spread else size, spread)
        got, want = run(backend, case, torch.float32), truth(case)
        q, k, v, dout = (float(x.detach().abs().max()) for x in (case.q, case.k, case.v, case.dout))
        weight, many = v * dout * case.v.shape[2] * case.scale, len(case.q) ** 0.5
        sizes = {"out": v, "lse": 10 * size, "dq": weight * k, "dk": weight * q * many, "dv": dout * many}
        for name, x in got.items():
            exact = getattr(want, name)
            empty = exact == -math.inf
            error = (x.double() - exact)[~empty].abs().max().item()
            assert error <= 1e-6 * sizes[name], f"{name}: {error:.2e} of {sizes[name]:.2e}"


@each_backend
def test_a_large_softcap(backend) -> None:
    for seed in range(8):
        print(f"seed {seed}")
        case = large_case(seed, 1e6, None, softcap=3e5)
        got, want = run(backend, case, torch.float32), truth(case)
        for name in ("out", "dv"):
            assert torch.allclose(got[name].double(), getattr(want, name), rtol=1e-5, atol=1e-5), name


def test_rows_over_two_calls_keep_the_lse_that_is_given() -> None:
    """As over ranks: half of the keys each, and lse of all of them; logits that float32 holds exactly."""
    case = make_case(2, 16, 32, np.array([[0, 16, 0, 32, FULL]]))
    q, k, v, dout = case.cast(torch.float32)
    q[..., 0], k[..., 0] = 1024.0, 128.0
    options, lse_of = AttnOptions(1.0), truth(replace(case, q=q.double(), k=k.double(), scale=1.0))
    half = np.array([[0, 16, 0, 16, FULL]])
    for backend in BACKENDS.values():
        total = torch.zeros_like(v)
        for keys in (slice(0, 16), slice(16, 32)):
            rows = dout, q, k[keys], v[keys], lse_of.out.float(), lse_of.lse.float()
            total[keys] = backend.backward(BackwardOperands(*rows, SliceTable(half), options)).dv
        weight = (total.double() - lse_of.dv).abs().max() / lse_of.dv.abs().max()
        assert weight < 0.02  # lse of 1.3e5 is right to 0.008


@pytest.mark.parametrize("size", [1e5, 1e6, 1e7])
def test_large_logits_of_index_attention(size) -> None:
    for seed in range(4):
        print(f"seed {seed}")
        case = replace(large_case(seed, size, 1.0), sink=None)
        total, group = len(case.k), case.q.shape[1] // case.k.shape[1]
        lists = torch.rand(len(case.q), 1, total, generator=torch.Generator().manual_seed(seed)).argsort(-1)[..., :9]
        lists = lists.expand(-1, case.k.shape[1], -1)
        rows, keys = np.nonzero(torch.zeros(len(case.q), total).scatter_(1, lists[:, 0], 1.0).numpy())
        slices = np.stack([rows, rows + 1, keys, keys + 1, np.zeros_like(rows)], axis=1)
        want = truth(replace(case, slices=SliceTable(slices)))
        q, k, v = (x.detach().float().requires_grad_() for x in (case.q, case.k, case.v))
        out, _ = index_attn_func(q, k, v, lists, softmax_scale=case.scale)
        out.backward(case.dout.float())
        assert (out.double() - want.out).abs().max() <= 1e-6 * case.v.abs().max() * group
        assert (v.grad.double() - want.dv).abs().max() <= 1e-6 * case.dout.abs().max() * len(q)
