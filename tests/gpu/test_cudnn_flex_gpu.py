# SPDX-License-Identifier: Apache-2.0
"""The backend ``cudnn_flex`` against float64: masks, head dims, sinks, stages, unseen rows, the deterministic order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from backward_oracle import assert_grads, make_dout, options_of, truth
from forward_oracle import Inputs, Result, assert_right, make_inputs

from magi_attention.common.slices import SliceTable, cut_k, trim
from magi_attention.kernels.cudnn_flex.backend import CudnnFlexBackend
from magi_attention.kernels.types import AttnOptions, Grads, Problem
from magi_attention.testing import masks

DEVICE = "cuda"
BACKEND = CudnnFlexBackend()


def why_not() -> str | None:
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU"
    capability = torch.cuda.get_device_capability()
    problem = Problem("cuda", torch.bfloat16, 4, 2, 64, 64, AttnOptions(0.1), capability=capability)
    return BACKEND.why_not(problem)


REASON = why_not()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


def options_with(x: Inputs, **changes) -> AttnOptions:
    return replace(options_of(x), **changes)


def attend(x: Inputs) -> Result:
    got = BACKEND.forward(x.q, x.k, x.v, x.slices, options_with(x, return_max_logits=True), x.sink)
    return Result(got.out.to(x.q.dtype), got.lse, got.max_logits)


def differentiate(x: Inputs, dout: torch.Tensor, deterministic: bool = False) -> Grads:
    options = options_with(x, deterministic=deterministic)
    got = BACKEND.forward(x.q, x.k, x.v, x.slices, options, x.sink)
    grads = BACKEND.backward(dout, x.q, x.k, x.v, got.out, got.lse, x.slices, options, x.sink)
    for name in ("dq", "dk", "dv"):
        setattr(grads, name, getattr(grads, name).to(x.q.dtype))
    return grads


@pytest.mark.parametrize(
    "dims, heads", (((64, 64), (4, 2)), ((128, 128), (4, 2)), ((96, 96), (5, 1)), ((96, 80), (3, 3))), ids=str
)
def test_families(dims, heads):
    for seed, slices in enumerate(masks.mask_families(400).values()):
        x = make_inputs(seed, slices, 400, 400, heads, dims, device=DEVICE)
        assert_right(x, attend(x))
        dout = make_dout(x, seed)
        assert_grads(x, differentiate(x, dout), truth(x, dout), (seed, dims))


def test_random_masks():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        slices = masks.random_slices(rng, 400, 300, max_slices=int(rng.integers(1, 30)))
        x = make_inputs(seed, slices, 400, 300, (4, 2), (64, 64), device=DEVICE)
        assert_right(x, attend(x))
        dout = make_dout(x, seed)
        assert_grads(x, differentiate(x, dout), truth(x, dout), seed)


@pytest.mark.parametrize("shape", ((2, 4), (400, 1, 4)), ids=str)
def test_sinks(shape):
    x = make_inputs(1, masks.causal(400), 400, 400, (4, 2), (64, 64), device=DEVICE, sink_shape=shape)
    assert_right(x, attend(x))
    dout = make_dout(x)
    assert_grads(x, differentiate(x, dout), truth(x, dout), shape)


def test_stages_merge_by_their_lse():
    x = make_inputs(2, masks.varlen([0, 150, 400], 1), 400, 400, (4, 2), (64, 64), device=DEVICE)
    live = trim(x.slices.array)
    parts = [SliceTable(cut_k(live, start, end)[0]) for start, end in ((0, 130), (130, 400))]
    options, got = options_of(x), None
    for part in parts:
        got = BACKEND.forward(x.q, x.k, x.v, part, options, None, got)
    whole = BACKEND.forward(x.q, x.k, x.v, x.slices, options)
    assert (got.lse - whole.lse).abs().max() < 1e-3 and (got.out - whole.out).abs().max() < 2e-2
    dout, grads = make_dout(x), None
    for part in parts:
        grads = BACKEND.backward(dout, x.q, x.k, x.v, got.out, got.lse, part, options, init=grads)
    for name in ("dq", "dk", "dv"):
        setattr(grads, name, getattr(grads, name).to(x.q.dtype))
    assert_grads(x, grads, truth(x, dout, 4.0), "each stage is rounded")


def test_what_unseen_rows_hold_does_not_matter():
    slices = np.array([[0, 200, 10, 100, 0], [230, 380, 150, 330, 1]])
    x = make_inputs(3, slices, 400, 400, (4, 2), (64, 64), device=DEVICE)
    dout = make_dout(x)
    want, grads = attend(x), differentiate(x, dout, deterministic=True)
    for t, rows in ((x.q, slice(200, 230)), (dout, slice(200, 230)), (x.k, slice(100, 150)), (x.v, slice(100, 150))):
        t[rows] = float("nan")
    got, again = attend(x), differentiate(x, dout, deterministic=True)
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)
    assert all(torch.equal(getattr(again, name), getattr(grads, name)) for name in ("dq", "dk", "dv"))


def test_the_deterministic_order_gives_the_same_bits():
    x = make_inputs(4, masks.causal(2000), 2000, 2000, (8, 2), (128, 128), device=DEVICE)
    dout = make_dout(x)
    first = differentiate(x, dout, deterministic=True)
    assert_grads(x, first, truth(x, dout), "deterministic")
    for _ in range(10):
        again = differentiate(x, dout, deterministic=True)
        assert all(torch.equal(getattr(again, name), getattr(first, name)) for name in ("dq", "dk", "dv"))


def test_masks_without_pairs():
    x = make_inputs(5, SliceTable([]), 30, 20, (4, 2), (64, 64), device=DEVICE)
    got = attend(x)
    assert not got.out.any() and got.lse.isneginf().all() and got.max_logits.isneginf().all()
    grads = differentiate(x, make_dout(x))
    assert not any(t.any() for t in (grads.dq, grads.dk, grads.dv))
