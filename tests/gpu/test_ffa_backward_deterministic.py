# SPDX-License-Identifier: Apache-2.0
"""``deterministic=True`` of the backward kernels: right, and the same bits whatever else the GPU does.

In each of the three semaphore orders: by expected time, in waves (masks of bands, and many tiles) and by tile (tiles
that contribute to a block in several segments).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from backward_oracle import assert_grads, assert_near, make_dout, options_of, truth
from forward_oracle import Inputs, make_inputs
from graph_capture import capture
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from long_kernels import beside_long_kernels
from places import in_a_process
from test_ffa_backward import (  # noqa: F401
    DEVICE,
    differentiate,
    each_dtype,
    explicit_backend_in_poisoned_memory,
    forward,
    pytestmark,
)

from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.kernels.ffa import backward as ffa_backward
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.ffa.schedule import select_schedule
from magi_attention.kernels.types import BackwardOperands, Grads
from magi_attention.testing import masks


def scattered(total: int) -> np.ndarray:
    """Each 16 queries see a few keys here and there, so a tile of keys is visited by a block of queries many times."""
    rng = np.random.default_rng(total)
    rows = []
    for q in range(0, total, 16):
        edges = sorted(rng.choice(total + 1, 6, replace=False).tolist())
        rows += [(q, min(q + 16, total), *edges[i : i + 2], 0) for i in (0, 2, 4)]
    return np.array(rows)


CASES = {
    "full": masks.full,
    "causal": masks.causal,
    "documents": lambda n: masks.varlen([0, n // 7, n // 2, n // 2 + n // 20, n], 1),
    "window": lambda n: masks.sliding_window(n, min(200, n // 4)),
    "scattered": scattered,
}


def bits(grads: Grads) -> list[torch.Tensor]:
    return [
        g.contiguous().view(torch.int16 if g.element_size() == 2 else torch.int32)
        for g in (grads.dq, grads.dk, grads.dv)
    ]


def assert_same_bits(got: Grads, first: Grads, note) -> None:
    for name, x, y in zip(("dq", "dk", "dv"), bits(got), bits(first)):
        assert torch.equal(x, y), (note, name, int((x != y).sum()))


@each_dtype
@pytest.mark.parametrize("dims", ((64, 64), (128, 128), (72, 120), (256, 256)), ids=str)
@pytest.mark.parametrize("name", CASES)
def test_right_and_the_same_every_time(name, dims, dtype):
    for total, heads in ((1337, (8, 2)), (300, (5, 1)), (65, (2, 2))):
        x = make_inputs(0, CASES[name](total), total, total, heads, dims, dtype=dtype, device=DEVICE)
        dout = make_dout(x)
        first = differentiate(x, dout, deterministic=True)
        assert_grads(x, first, truth(x, dout), (name, total, heads))
        for _ in range(4):
            assert_same_bits(differentiate(x, dout, deterministic=True), first, (name, total, heads))


def assert_same_beside_other_work(x: Inputs, name: str) -> None:
    """Kernels that come and go on other streams change which CTA gets which tile, and when."""
    dout, noise = make_dout(x), torch.randn(2048, 2048, device=DEVICE, dtype=torch.bfloat16)
    first = differentiate(x, dout, deterministic=True)
    side = torch.cuda.Stream()
    for n in range(10):
        with torch.cuda.stream(side):
            for _ in range(n):
                noise = torch.nn.functional.normalize(noise @ noise)
        assert_same_bits(differentiate(x, dout, deterministic=True), first, (name, n))
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", CASES)
def test_the_same_beside_other_work(name):
    total = 4096
    x = make_inputs(1, CASES[name](total), total, total, (16, 2), (128, 128), device=DEVICE)
    assert_same_beside_other_work(x, name)


def short_work_tiles_beside_long_kernels(rank: int, world: int) -> bool:
    for name, make in CASES.items():
        for dim in (64, 128, 256):
            x = make_inputs(3, make(700), 700, 700, (8, 2), (dim, dim), device=DEVICE)
            dout = make_dout(x)
            found = [differentiate(x, dout, deterministic=True) for _ in beside_long_kernels()]
            for again in found[1:]:
                assert_same_bits(again, found[0], (name, dim))
    return True


def two_at_a_time(rank: int, world: int) -> bool:
    streams = [torch.cuda.Stream() for _ in range(2)]
    x = make_inputs(4, CASES["causal"](4096), 4096, 4096, (16, 2), (128, 128), device=DEVICE)
    dout = make_dout(x)
    first = differentiate(x, dout, deterministic=True)
    torch.cuda.synchronize()
    found = []
    for n in range(30):
        with torch.cuda.stream(streams[n % 2]):
            found.append(differentiate(x, dout, deterministic=True))
    torch.cuda.synchronize()
    for n, again in enumerate(found):
        assert_same_bits(again, first, n)
    return True


@pytest.mark.parametrize("work", (short_work_tiles_beside_long_kernels, two_at_a_time), ids=lambda f: f.__name__)
def test_nobody_waits_for_ever(work):
    """In a process of its own: where CTAs once waited in a circle, nothing but its end helped."""
    assert in_a_process(work)


@pytest.mark.parametrize("margin", (1, 40, 131))
def test_with_multiprocessors_left_free(margin):
    for name, make in CASES.items():
        x = make_inputs(2, make(1000), 1000, 1000, (8, 2), (128, 128), device=DEVICE)
        dout = make_dout(x)
        got = [differentiate(x, dout, deterministic=True, sm_margin=margin) for _ in range(3)]
        assert_grads(x, got[0], truth(x, dout), (name, margin))
        for again in got[1:]:
            assert_same_bits(again, got[0], (name, margin))


@pytest.mark.parametrize("total, heads", ((3000, (24, 12)), (2048, (40, 20)), (4600, (8, 8))), ids=str)
def test_l2_groups_between_one_and_two(total, heads):
    """Tiles and heads that are two to three work tiles for each of 132 multiprocessors."""
    for name in ("causal", "documents"):
        x = make_inputs(4, CASES[name](total), total, total, heads, (128, 128), device=DEVICE)
        dout = make_dout(x)
        first = differentiate(x, dout, deterministic=True)
        assert_grads(x, first, truth(x, dout), name)
        for _ in range(4):
            assert_same_bits(differentiate(x, dout, deterministic=True), first, name)


@each_dtype
def test_uneven_documents_split_their_heads(dtype, monkeypatch):
    chosen = []
    monkeypatch.setattr(ffa_backward, "select_schedule", lambda *a: chosen.append(select_schedule(*a)) or chosen[-1])
    documents = masks.varlen([0, 640, 768, 896, 1024], 0)
    x = make_inputs(5, documents, 1024, 1024, (128, 32), (64, 64), dtype=dtype, device=DEVICE)
    dout, ffa = make_dout(x), FfaBackend()
    out, lse = forward(x, ffa)
    options = replace(options_of(x), deterministic=True)
    found = [ffa.backward_final(BackwardOperands(dout, x.q, x.k, x.v, out, lse, x.slices, options)) for _ in range(5)]
    assert_grads(x, found[0], truth(x, dout), dtype)
    for again in found[1:]:
        assert_same_bits(again, found[0], dtype)
    splits = [schedule.num_head_splits for schedule in chosen]
    assert splits == [2] * 5, "one long document should be worth it with about 132 multiprocessors"


def test_options():
    for options in ({"softcap": 20.0}, {"sink_shape": (2, 8)}, {"softcap": 5.0, "sink_shape": (777, 1, 8)}):
        x = make_inputs(3, masks.varlen([0, 100, 777], 1), 777, 777, (8, 2), (128, 128), **options, device=DEVICE)
        dout = make_dout(x)
        first = differentiate(x, dout, deterministic=True)
        assert_grads(x, first, truth(x, dout), options)
        assert_same_bits(differentiate(x, dout, deterministic=True), first, options)


# One L2 group, of about two work tiles for each SM of an H100: many tiles of few heads, few of many; one query head in
# a work tile, or two; and three, which do not begin apart.
FEW_HEADS = (
    (64, (16, 16), 1900),
    (128, (16, 16), 1900),
    (256, (8, 8), 1900),
    (64, (32, 32), 1000),
    (128, (24, 24), 1000),
    (64, (16, 8), 4000),
    (64, (96, 32), 1000),
)


@pytest.mark.parametrize("dim, heads, total", FEW_HEADS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_work_tiles_that_begin_apart(name, dim, heads, total):
    x = make_inputs(7, CASES[name](total), total, total, heads, (dim, dim), device=DEVICE)
    dout = make_dout(x)
    first = differentiate(x, dout, deterministic=True)
    assert_grads(x, first, truth(x, dout), (name, dim))
    for _ in range(3):
        assert_same_bits(differentiate(x, dout, deterministic=True), first, (name, dim))


def test_later_l2_groups():
    """Those behind the first have targets of their own, and the last is smaller: 88 kv heads each on an H100."""
    total, heads = 300, (1500, 300)
    for name, make in CASES.items():
        x = make_inputs(6, make(total), total, total, heads, (64, 64), device=DEVICE)
        dout = make_dout(x)
        first = differentiate(x, dout, deterministic=True)
        assert_grads(x, first, truth(x, dout), name)
        for _ in range(3):
            assert_same_bits(differentiate(x, dout, deterministic=True), first, name)


def test_more_tiles_than_are_compared():
    """Beyond 128K keys the order is that of waves. Gradients as without the wish, but for the order of the sums."""
    total = 140_000
    x = make_inputs(
        4, masks.varlen(list(range(0, total, 3500)) + [total], 1), total, total, (2, 1), (64, 64), device=DEVICE
    )
    dout = make_dout(x)
    first, free = differentiate(x, dout, deterministic=True), differentiate(x, dout)
    assert_same_bits(differentiate(x, dout, deterministic=True), first, total)
    assert_near(first, free)


def assert_same_from_a_graph(x: Inputs) -> None:
    dout, leaves, ranges = make_dout(x), [t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v)], x.ranges

    def step():
        out, _ = flex_flash_attn_func(*leaves, *ranges, deterministic=True)
        return Grads(*torch.autograd.grad(out, leaves, dout))

    graph, want, got = capture(step)
    for _ in range(3):
        graph.replay()
        assert_same_bits(got, want, "graph")


def test_in_a_cuda_graph():
    assert_same_from_a_graph(make_inputs(5, masks.causal(900), 900, 900, (8, 2), (128, 128), device=DEVICE))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(seed=st.integers(0, 2**31))
def test_random_masks(seed):
    rng = np.random.default_rng(seed)
    tq, tk = (int(n) for n in rng.integers(1, 900, 2))
    heads = [(4, 4), (8, 2), (5, 1)][rng.integers(3)]
    dims = [(64, 64), (128, 128), (256, 256)][rng.integers(3)]
    slices = masks.random_slices(rng, tq, tk, max_slices=int(rng.integers(1, 40)))
    x = make_inputs(seed, slices, tq, tk, heads, dims, device=DEVICE)
    dout = make_dout(x)
    first = differentiate(x, dout, deterministic=True)
    assert_grads(x, first, truth(x, dout), seed)
    assert_same_bits(differentiate(x, dout, deterministic=True), first, seed)
