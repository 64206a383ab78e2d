# SPDX-License-Identifier: Apache-2.0
"""The peer ``cudnn_flex`` of the kernel benchmark: its key endpoints against dense masks, and both of its directions
with a stand-in for the wheel that reads nothing but the endpoints."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import kernel
import masks
import numpy as np
import peers
import peers_backward
import pytest
import torch

from magi_attention.common.slices import empty_slices, to_dense
from magi_attention.kernels import AttnOptions, SdpaOnlineBackend
from magi_attention.kernels.cudnn_flex.endpoints import key_endpoints
from magi_attention.kernels.types import Operands
from magi_attention.testing.masks import random_slices

HEADS, DIM = (4, 2), 16


def seen_by(endpoints: np.ndarray, total_k: int) -> np.ndarray:
    """(total_q, total_k) by the definition: key j is seen where an odd number of endpoints is above it."""
    above = endpoints[0].T[:, :, None] > np.arange(total_k)
    return above.sum(axis=1) % 2 == 1


def check_form(endpoints: np.ndarray, total_q: int, total_k: int) -> None:
    """What the wheel demands: int32, contiguous, an odd number, sorted, within the keys."""
    assert endpoints.dtype == np.int32 and endpoints.flags.c_contiguous
    assert endpoints.shape[::2] == (1, total_q) and endpoints.shape[1] % 2 == 1
    assert (np.diff(endpoints[0], axis=0) >= 0).all()
    assert endpoints.min(initial=0) >= 0 and endpoints.max(initial=0) <= total_k


@pytest.mark.parametrize("seed", range(20))
def test_endpoints_equal_the_dense_mask(seed):
    rng = np.random.default_rng(seed)
    for attempt in range(100):
        total_q, total_k = (int(n) for n in rng.integers(1, 90, 2))
        slices = random_slices(rng, total_q, total_k, max_slices=int(rng.integers(1, 24)))
        print(f"seed {seed}, attempt {attempt}: {total_q} x {total_k}, slices {slices.tolist()}")
        endpoints = key_endpoints(slices, total_q)
        check_form(endpoints, total_q, total_k)
        want = to_dense(slices, total_q, total_k)
        assert np.array_equal(seen_by(endpoints, total_k), want)
        # No more endpoints than the row with the most needs; its intervals are where its keys begin.
        begins = np.diff(want, axis=1, prepend=False) & want
        needed = begins.sum(axis=1) + (begins.any(axis=1) & ~want[:, 0])
        assert endpoints.shape[1] == 2 * max(1, needed.max()) - 1


def test_masks_without_pairs():
    for slices in (empty_slices(), np.array([[2, 5, 3, 3, 0], [1, 1, 0, 4, 1]])):
        endpoints = key_endpoints(slices, 6)
        assert endpoints.shape == (1, 1, 6) and not endpoints.any()


class StandIn:
    """``create_mask_plan`` and ``flex_attn_func`` on the CPU, by the dense mask of the endpoints."""

    def __init__(self) -> None:
        self.plans: list[dict] = []

    def create_mask_plan(self, mask_func, q, k, v, *, build_backward, **documents):
        self.plans.append(documents | {"build_backward": build_backward, "rank": q.dim()})
        endpoints, total = mask_func.numpy(), mask_func.shape[2]
        if q.dim() == 4:
            return seen_by(endpoints, total)
        assert documents["cu_seqlens_q"].dtype == torch.int32
        dense, cu = np.zeros((total, total), dtype=bool), documents["cu_seqlens_k"].tolist()
        for start, end in zip(cu[:-1], cu[1:]):
            assert end - start <= documents["max_seqlen_k"]
            dense[start:end, start:end] = seen_by(endpoints[:, :, start:end], end - start)
        return dense

    def flex_attn_func(self, q, k, v, *, mask_plan):
        is_fixed = q.dim() == 4
        if is_fixed:
            q, k, v = (x.squeeze(0) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * q.shape[2] ** -0.5
        scores = scores.masked_fill(~torch.from_numpy(mask_plan), -torch.inf)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.double()).to(q.dtype)
        return out[None] if is_fixed else out


@pytest.fixture
def wheel(monkeypatch):
    stand_in = StandIn()
    module = SimpleNamespace(create_mask_plan=stand_in.create_mask_plan, flex_attn_func=stand_in.flex_attn_func)
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(flex_attention=module))
    monkeypatch.setitem(sys.modules, "cudnn.flex_attention", module)
    return stand_in


def case_of(name: str) -> masks.Case:
    if name.startswith("varlen"):
        return masks.Case(name, 130, (50, 1, 30, 49))
    return masks.make_case(name, 130, window=40 if "window" in name else None)


@pytest.mark.parametrize("is_thd", [False, True])
@pytest.mark.parametrize("name", masks.NAMES)
def test_both_directions(wheel, name, is_thd):
    case, make = case_of(name), peers._cudnn_flex(is_thd)
    q, k, v, dout = kernel.make_inputs(case, HEADS, DIM, torch.bfloat16, "cpu", has_dout=True)
    if is_thd and not case.is_varlen:
        with pytest.raises(peers.Unfit, match="no documents"):
            make(q, k, v, case)
        return
    out = make(q, k, v, case)()
    ours, options = SdpaOnlineBackend(), AttnOptions(DIM**-0.5)
    exact = [x.double() for x in (q, k, v)]
    want = ours.forward(Operands(*exact, case.mask.slices, options))
    torch.testing.assert_close(out.double(), want.out, rtol=2e-2, atol=2e-2)
    found = {"rank": 3 if is_thd else 4, "build_backward": False}
    assert found.items() <= wheel.plans[0].items() and ("cu_seqlens_q" in wheel.plans[0]) == is_thd

    leaves = [x.requires_grad_() for x in exact]
    out_exact = StandIn().flex_attn_func(*leaves, mask_plan=case.mask.to_dense())
    want_grads = torch.autograd.grad(out_exact, leaves, dout.double())
    for is_both in (False, True):
        call = peers_backward.by_autograd(make, is_both)(q, k, v, dout, case)
        for _ in range(2):  # a call can be repeated
            for got, grad in zip(call(), want_grads):
                torch.testing.assert_close(got.double(), grad, rtol=3e-2, atol=3e-2)
    assert all(plan["build_backward"] for plan in wheel.plans[1:]) and len(wheel.plans) == 3


def test_what_it_cannot_run_is_said(wheel, monkeypatch):
    case = case_of("causal")
    make = peers._cudnn_flex(is_thd=False)
    for dim, dtype, words in ((16, torch.float32, "float16 and bfloat16"), (136, torch.bfloat16, "head dims"),
                              (20, torch.bfloat16, "head dims")):  # fmt: skip
        with pytest.raises(peers.Unfit, match=words):
            make(*kernel.make_inputs(case, HEADS, dim, dtype, "cpu"), case)

    def refuse(*tensors, **options):
        raise NotImplementedError("supports SM90, SM100, and SM103; got SM80")

    monkeypatch.setattr(sys.modules["cudnn.flex_attention"], "create_mask_plan", refuse)
    with pytest.raises(peers.Unfit, match="got SM80"):
        make(*kernel.make_inputs(case, HEADS, DIM, torch.bfloat16, "cpu"), case)


def test_it_is_left_out_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(peers, "_has", lambda module: module == "cudnn.flex_attention")
    assert {"cudnn_flex", "cudnn_flex_thd"} <= peers.available().keys()
    monkeypatch.setattr(peers, "_has", lambda module: False)
    assert list(peers.available()) == ["magi", "magi_host", "magi_attend", "cudnn", "fa2", "flex"]
