# SPDX-License-Identifier: Apache-2.0
"""The backward with steps of 80 queries, which head dims of 65 to 128 may take: the tests of the others once more.

And that masks choose it: see ``magi_attention.kernels.ffa.schedule.steps``.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from backward_oracle import assert_grads, assert_same, make_dout, options_of, truth
from forward_oracle import make_inputs
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
from test_ffa_backward_split import (  # noqa: F401
    test_the_last_round_adds_to_float32_buffers,
    test_units_of_the_last_round,
    workspaces,
)

from magi_attention.kernels.ffa import backward as ffa_bwd
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.ffa.schedule import work_tiles as unit_walks
from magi_attention.kernels.ffa.schedule.steps import Steps, steps_of
from magi_attention.testing import masks


def wide_where_possible(q_shape, v_shape, mask, options, processors) -> Steps:
    """Wide steps wherever there is a kernel for them."""
    return Steps(80 if not options.softcap and 64 < max(q_shape[2], v_shape[2]) <= 128 else 64, 0)


@pytest.fixture(autouse=True)
def wide_steps(monkeypatch):
    monkeypatch.setattr(ffa_bwd, "steps_of", wide_where_possible)


@pytest.fixture
def was_last_round_split(workspaces):  # noqa: F811
    return lambda: _has_parts(workspaces[0])


def _has_parts(workspace: torch.Tensor, total: int = 1300, heads: int = 176) -> bool:
    """Whether a part of dk lies behind the sum of dq, see test_ffa_backward_split.py."""
    parts_at = 32 + -(-total // 80) * heads * (2 * 80 + 80 * 128)
    parts = workspace.view(torch.float32)[parts_at : parts_at + 128]
    return parts.numel() == 128 and bool(parts.isfinite().all())


@each_dtype
def test_sizes_around_the_block(dtype):
    sizes = (1, 16, 79, 80, 81, 128, 159, 160, 161, 401)
    for seed, (tq, tk) in enumerate(product(sizes, (1, 127, 129, 300))):
        slices = np.array([[0, tq, 0, tk, seed % 4]])
        dims = ((128, 128), (80, 96), (128, 72))[seed % 3]
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
def test_walks_in_step(margin, monkeypatch):
    """Tiles of one head that are more than a wave: in pairs, beside steps of 64 in the plan's own order."""
    made, make = [], unit_walks._in_periods
    monkeypatch.setattr(unit_walks, "_in_periods", lambda *a: made.append(1) or make(*a))
    total = 128 * 190 + 7
    x = make_inputs(3, masks.causal(total), total, total, (24, 3), (128, 128), device=DEVICE)
    dout = make_dout(x, 3)
    wide = [differentiate(x, dout, sm_margin=margin) for _ in range(3)]
    assert 1 <= len(made) <= 3  # of range tensors for each call that comes before their copy has arrived
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
    monkeypatch.setattr(ffa_bwd, "steps_of", lambda *a: chosen.append(steps_of(*a)) or chosen[-1])
    ffa, total = FfaBackend(), 4500
    for slices in (masks.full(total), masks.varlen(list(range(0, total + 1, 500)), 1)):
        x = make_inputs(0, slices, total, total, (4, 1), (128, 128), device=DEVICE)
        dout, (out, lse) = make_dout(x), forward(x, ffa)
        got = ffa.backward_final(dout, x.q, x.k, x.v, out, lse, x.slices, options_of(x))
        assert_grads(x, got, truth(x, dout))
        again = ffa.backward_final(dout, x.q, x.k, x.v, out, lse, x.slices, options_of(x))
        assert_same(again, got, x.q.dtype)
    assert [s.block_m for s in chosen] == [80, 80, 64, 64]
