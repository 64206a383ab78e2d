# SPDX-License-Identifier: Apache-2.0
"""Backwards that take up one document after the other: with atomic dq, where the first writer stores, and in
deterministic mode, with m-blocks of either size; under masks that would not choose it, too. That masks do:
``tests/kernels/schedule``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from backward_oracle import assert_grads, assert_same, make_dout, options_of, truth
from forward_oracle import make_inputs
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
from test_ffa_backward_deterministic import CASES, assert_same_bits
from test_ffa_backward_split import ranges_on_the_host  # noqa: F401

from magi_attention.kernels.ffa import backward as ffa_backward
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.ffa.schedule import select_schedule
from magi_attention.kernels.types import BackwardOperands, Grads
from magi_attention.native.planner.schedule import BwdSchedule
from magi_attention.testing import masks

MODES = {
    "atomic, 80": (BwdSchedule(80, 0, by_document=True), False),
    "first writer, 64": (BwdSchedule(64, 0, first_writer=True, by_document=True), False),
    "first writer, 80": (BwdSchedule(80, 0, first_writer=True, by_document=True), False),
    "deterministic, 64": (BwdSchedule(64, 0, by_document=True), True),
    "deterministic, 80": (BwdSchedule(80, 0, by_document=True), True),
}
each_mode = pytest.mark.parametrize("mode", MODES)
MANY = (80, 40)  # heads, so that few tiles are many work tiles, as has to be where the plan lists these


def force(monkeypatch, mode: str) -> bool:
    """Whether the mode is deterministic."""
    schedule, is_ordered = MODES[mode]
    monkeypatch.setattr(ffa_backward, "select_schedule", lambda *_: schedule)
    return is_ordered


@each_mode
@each_dtype
@pytest.mark.parametrize("name", CASES)
def test_right(mode, name, dtype, monkeypatch):
    is_ordered = force(monkeypatch, mode)
    for total, dims in ((1337, (128, 128)), (1400, (72, 120))):
        x = make_inputs(0, CASES[name](total), total, total, MANY, dims, dtype=dtype, device=DEVICE)
        dout = make_dout(x)
        want, first = truth(x, dout), differentiate(x, dout, deterministic=is_ordered)
        assert_grads(x, first, want, (name, total))
        for _ in range(2):
            again = differentiate(x, dout, deterministic=is_ordered)
            assert_same_bits(again, first, (name, total)) if is_ordered else assert_grads(x, again, want, (name, total))


@pytest.mark.parametrize("dim", (64, 256))
@pytest.mark.parametrize("name", CASES)
def test_other_head_dims(name, dim, monkeypatch):
    """In deterministic mode, where they choose it; and where the first writer stores."""
    for mode in ("deterministic, 64", "first writer, 64"):
        is_ordered = force(monkeypatch, mode)
        x = make_inputs(1, CASES[name](900), 900, 900, (8, 2), (dim, dim), device=DEVICE)
        dout = make_dout(x)
        assert_grads(x, differentiate(x, dout, deterministic=is_ordered), truth(x, dout), (name, mode))


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "atomic, 80"])
def test_random_masks(mode, monkeypatch):
    is_ordered = force(monkeypatch, mode)

    @settings(max_examples=60, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
    @given(
        seed=st.integers(0, 2**32 - 1),
        sizes=st.tuples(st.integers(1, 700), st.integers(1, 700)),
        count=st.integers(1, 40),
        heads=st.sampled_from([(4, 4), (8, 1), (5, 1), (6, 2)]),
    )
    def run(seed, sizes, count, heads):
        slices = masks.random_slices(np.random.default_rng(seed), *sizes, max_slices=count)
        x = make_inputs(seed % 1000, slices, *sizes, heads, (128, 128), device=DEVICE)
        dout = make_dout(x, seed % 1000)
        assert_grads(x, differentiate(x, dout, deterministic=is_ordered), truth(x, dout), (seed, sizes, count, heads))

    run()


@pytest.mark.parametrize("lengths", ([1024] * 16, [4096] * 3 + [512] * 8 + [2048], [700, 5200, 90, 9000]), ids=len)
def test_as_chosen(lengths, monkeypatch):
    """Long ones, against the plan's own order with m-blocks of the same size, which round dS alike; with SMs left free,
    too."""
    total, chosen, ffa = sum(lengths), [], FfaBackend()
    documents = masks.varlen(np.cumsum([0, *lengths]).tolist(), 1)
    x = make_inputs(2, documents, total, total, (32, 4), (128, 128), device=DEVICE)
    dout, (out, lse) = make_dout(x), forward(x, ffa)

    def backward(schedule=None, **options) -> Grads:
        """As chosen, or with ``schedule``."""
        choose = lambda *a: schedule or chosen.append(select_schedule(*a)) or chosen[-1]  # noqa: E731
        monkeypatch.setattr(ffa_backward, "select_schedule", choose)
        return ffa.backward_final(
            BackwardOperands(dout, x.q, x.k, x.v, out, lse, x.slices, replace(options_of(x), **options))
        )

    first = backward(deterministic=True)
    for margin in (0, 60):
        for is_ordered in (True, False, False):
            got = backward(deterministic=is_ordered, sm_margin=margin)
            want = backward(BwdSchedule(chosen[-1].block_m, 0), sm_margin=margin)
            for mine, theirs in zip((got.dq, got.dk, got.dv), (want.dq, want.dk, want.dv)):
                torch.testing.assert_close(mine.float(), theirs.float(), atol=4e-3, rtol=1.6e-2)  # other orders of sums
            if is_ordered and margin == 0:
                assert_same_bits(got, first, lengths)
    assert [s.by_document for s in chosen if s.first_writer] == 4 * [True], chosen


def nobody_waits(rank: int, world: int, mode: str) -> bool:
    """Beside other kernels, which hold SMs while work tiles are scheduled."""
    schedule, is_ordered = MODES[mode]
    ffa_backward.select_schedule = lambda *_: schedule
    for lengths in ([300, 1300, 700], [128] * 20, [2000, 90]):
        total = sum(lengths)
        documents = masks.varlen(np.cumsum([0, *lengths]).tolist(), 1)
        x = make_inputs(3, documents, total, total, MANY, (128, 128), device=DEVICE)
        dout = make_dout(x)
        want = differentiate(x, dout, deterministic=is_ordered)
        for n in beside_long_kernels():
            again = differentiate(x, dout, deterministic=is_ordered)
            if is_ordered:
                assert_same_bits(again, want, (lengths, n))
            else:
                assert_same(again, want, x.q.dtype, (lengths, n))
    return True


@each_mode
def test_nobody_waits_for_ever(mode):
    assert in_a_process(nobody_waits, mode)
