# SPDX-License-Identifier: Apache-2.0
"""The backward with m-blocks of 80 queries, which head dims of 65 to 128 may take, or 128 for smaller ones: the tests
of the others once more.

And that masks choose it: see ``magi_attention.native.planner.schedule``.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from backward_oracle import assert_grads, assert_same, largest_block_m, make_dout, options_of, truth
from forward_oracle import Inputs, make_inputs
from test_ffa_backward import (  # noqa: F401
    DEVICE,
    check,
    differentiate,
    each_dtype,
    explicit_backend_in_poisoned_memory,
    forward,
    pytestmark,
    test_families_and_gqa,
    test_planning_on_host_and_device_gives_the_same,
    test_random_masks,
    test_special_slices,
    test_stages_add_up_in_float32,
    test_strided_and_misaligned_inputs,
    test_two_runs,
    test_what_unseen_rows_hold_does_not_matter,
)
from test_ffa_backward_split import documents, inputs, workspaces  # noqa: F401

from magi_attention.kernels.ffa import backward as ffa_backward
from magi_attention.kernels.ffa import plans as ffa_plans
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.ffa.host_ranges import HostRanges
from magi_attention.kernels.ffa.schedule import select_schedule
from magi_attention.kernels.types import BackwardOperands, Grads
from magi_attention.native.planner.schedule import BwdSchedule
from magi_attention.testing import masks

# 11 tiles: 484 work tiles, of which 88 are left to a last wave of 132 SMs; they are split in four.
LONG = 1300


def largest_where_possible(q_shape, v_shape, mask, options, processors) -> BwdSchedule:
    """The largest m-blocks for which there is a kernel."""
    largest = largest_block_m(max(q_shape[2], v_shape[2]), options.deterministic)
    return BwdSchedule(64 if options.softcap else largest, 0)


@pytest.fixture(autouse=True)
def m_blocks_of_80(monkeypatch):
    monkeypatch.setattr(ffa_backward, "select_schedule", largest_where_possible)


@pytest.fixture(autouse=True, params=("host", "device"))
def known_to(request, monkeypatch):
    """Who knows the ranges: with the host there is a list of work tiles, else none. Calls that met now the one, now the
    other would add in two orders."""
    if request.param == "host":
        monkeypatch.setattr(Inputs, "ranges", property(lambda self: self.slices.tensors()))
    else:
        monkeypatch.setattr(HostRanges, "find", lambda *_: None)
    return request.param


@pytest.fixture
def was_last_wave_split(workspaces):  # noqa: F811
    """Whether the last backward split the work tiles of the last wave: a part of dk lies behind dq_accum."""
    return lambda: _has_parts(workspaces[0])


def _has_parts(workspace: torch.Tensor, total: int = LONG, heads: int = 176) -> bool:
    parts_at = 32 + -(-total // 80) * heads * (2 * 80 + 80 * 128)
    parts = workspace.view(torch.float32)[parts_at : parts_at + 128]
    return parts.numel() == 128 and bool(parts.isfinite().all())


@each_dtype
def test_sizes_around_the_block(dtype):
    sizes = (1, 16, 79, 80, 81, 127, 128, 129, 159, 160, 161, 401)
    for seed, (tq, tk) in enumerate(product(sizes, (1, 127, 129, 300))):
        slices = np.array([[0, tq, 0, tk, seed % 4]])
        dims = ((128, 128), (80, 96), (128, 72), (64, 64), (40, 56))[seed % 5]
        check(seed, slices, tq, tk, ((4, 2), (5, 1), (3, 3))[seed // 4 % 3], dims, dtype)


def test_both_blocks_give_the_same_gradients(monkeypatch):
    """Nearly: P is rounded before dS is made of it, and sums are in another order."""
    x = make_inputs(3, masks.causal(3000), 3000, 3000, (8, 2), (128, 128), device=DEVICE)
    dout = make_dout(x, 3)
    wide = differentiate(x, dout)
    monkeypatch.undo()
    plain = differentiate(x, dout)
    for name in ("dq", "dk", "dv"):
        a, b = getattr(wide, name).float(), getattr(plain, name).float()
        assert (a - b).norm() < 4e-3 * b.norm(), name
    assert not torch.equal(wide.dk, plain.dk)  # or it was not wide


@pytest.mark.parametrize("margin", (0, 5))
def test_traversals_in_step(margin, known_to, monkeypatch):
    """Tiles of one head that are more than a wave: in pairs, beside m-blocks of 64 in the plan's own order."""
    made, make = [], ffa_plans.with_schedule

    def in_waves(words, shape, *rest):
        found = make(words, shape, *rest)
        made.append(not np.array_equal(found, make(words, shape._replace(keeps_plan_order=True), *rest)))
        return found

    monkeypatch.setattr(ffa_plans, "with_schedule", in_waves)
    total = 128 * 190 + 7
    x = make_inputs(3, masks.causal(total), total, total, (24, 3), (128, 128), device=DEVICE)
    dout = make_dout(x, 3)
    wide = [differentiate(x, dout, sm_margin=margin) for _ in range(3)]
    assert any(made) or known_to == "device"
    for again in wide[1:]:
        assert torch.equal(again.dk, wide[0].dk) and torch.equal(again.dv, wide[0].dv)
    monkeypatch.undo()
    plain = differentiate(x, dout)
    for name in ("dq", "dk", "dv"):
        a, b = getattr(wide[0], name).float(), getattr(plain, name).float()
        assert (a - b).norm() < 4e-3 * b.norm(), name


def test_a_long_mask_chooses_it(monkeypatch):
    monkeypatch.undo()
    chosen = []
    monkeypatch.setattr(ffa_backward, "select_schedule", lambda *a: chosen.append(select_schedule(*a)) or chosen[-1])
    ffa, total = FfaBackend(), 4500
    for slices in (masks.full(total), masks.varlen(list(range(0, total + 1, 500)), 1)):
        x = make_inputs(0, slices, total, total, (4, 1), (128, 128), device=DEVICE)
        dout, (out, lse) = make_dout(x), forward(x, ffa)
        got = ffa.backward_final(BackwardOperands(dout, x.q, x.k, x.v, out, lse, x.slices, options_of(x)))
        assert_grads(x, got, truth(x, dout))
        again = ffa.backward_final(BackwardOperands(dout, x.q, x.k, x.v, out, lse, x.slices, options_of(x)))
        assert_same(again, got, x.q.dtype)
    assert [s.block_m for s in chosen] == [80, 80, 64, 64]


@each_dtype
@pytest.mark.parametrize("dims", ((128, 128), (96, 80)), ids=str)
def test_work_tiles_of_the_last_wave(was_last_wave_split, known_to, dims, dtype):
    for seed, slices in enumerate((masks.full(LONG).array, masks.causal(LONG).array, documents(3, total=LONG))):
        x = inputs(seed, slices, dims, dtype, LONG)
        dout = make_dout(x, seed)
        got, want = differentiate(x, dout), truth(x, dout)
        assert was_last_wave_split() or known_to == "device"
        assert_grads(x, got, want, (seed, dims))
        assert_same(differentiate(x, dout), got, dtype, seed)
        assert_grads(x, differentiate(x, dout, sm_margin=20), want, (seed, dims, "fewer multiprocessors"))


def test_the_last_wave_adds_to_float32_buffers(was_last_wave_split):
    ffa, x = FfaBackend(), inputs(2, masks.full(LONG).array, total=LONG)
    dout, (out, lse) = make_dout(x), forward(x, ffa)
    before = Grads(*(torch.randn_like(t, dtype=torch.float32) for t in (x.q, x.k, x.v)))
    into = Grads(*(t.clone() for t in (before.dq, before.dk, before.dv)))
    ffa.backward(BackwardOperands(dout, x.q, x.k, x.v, out, lse, x.slices, options_of(x)), into)
    assert was_last_wave_split()
    assert_grads(x, into, truth(x, dout), before=before)
