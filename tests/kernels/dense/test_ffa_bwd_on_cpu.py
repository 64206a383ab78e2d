# SPDX-License-Identifier: Apache-2.0
"""The kernels of the backward for Hopper, as they are, on the CPU: random masks against gradients in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from backward_oracle import assert_grads, make_dout, options_of, truth
from forward_oracle import Inputs, dense, make_inputs
from hopper_library import HopperOnCpu, random_dropout, random_problem
from schedule_oracle import plan_of

from magi_attention.common.slices import to_dense
from magi_attention.errors import ContractError
from magi_attention.kernels import SdpaBackend
from magi_attention.kernels.ffa import backward as ffa_backward
from magi_attention.kernels.ffa import plans as ffa_plans
from magi_attention.kernels.ffa.schedule import select_schedule
from magi_attention.kernels.reference.operands import delta_with_dlse
from magi_attention.kernels.types import AttnOptions, BackwardOperands, Grads, Operands
from magi_attention.native.planner.schedule import BwdSchedule
from magi_attention.testing import masks

pytestmark = pytest.mark.usefixtures("planner")

SOURCE = Path(__file__).with_name("ffa_bwd_on_cpu.cpp")
KINDS = (
    (torch.bfloat16, (64, 64)),
    (torch.float16, (128, 128)),
    (torch.bfloat16, (40, 56)),
    (torch.float16, (72, 120)),
)
HEADS = ((4, 2), (5, 1), (3, 3), (8, 2))


MANY_SEGMENTS = 4  # of a tile, from which on it is walked head by head


def segments_of_tiles(x: Inputs) -> float:
    """The average over the tiles of keys."""
    plan = plan_of(x.slices, len(x.q), len(x.k))
    return len(plan.records) / len(plan.tiles)


def random_inputs(seed: int, most: int, **options) -> Inputs:
    return random_problem(seed, most, KINDS, HEADS, **options)[1]


def differentiate(hopper: HopperOnCpu, x: Inputs, dout, forward, deterministic: bool, delta=None) -> Grads:
    """``forward``: what comes of ``x`` in float64. With ``delta`` out is NaN, as kernels do not read it."""
    out, lse = forward.out.to(x.q.dtype), forward.lse.float().contiguous()
    out = out if delta is None else torch.full_like(out, float("nan"))
    options = replace(options_of(x), deterministic=deterministic)
    saved = BackwardOperands(dout, x.q, x.k, x.v, out, lse, x.slices, options, x.sink, delta)
    return hopper.backend.backward_final(saved)


def check(hopper: HopperOnCpu, x: Inputs, seed: int, deterministic: bool = False, is_poisoned: bool = False) -> Grads:
    """``is_poisoned``: queries that see nothing and keys that nobody sees hold NaN."""
    dout = make_dout(x, seed)
    want, forward = truth(x, dout), dense(x, torch.float64)
    if is_poisoned:
        seen = torch.from_numpy(to_dense(x.slices.array, len(x.q), len(x.k)))
        for operand, rows in ((x.q, seen.any(1)), (dout, seen.any(1)), (x.k, seen.any(0)), (x.v, seen.any(0))):
            operand[~rows] = float("nan")
    got = differentiate(hopper, x, dout, forward, deterministic)
    assert_grads(x, got, want, f"{seed=}")
    return got


def check_dropout(hopper: HopperOnCpu, x: Inputs, seed: int, deterministic: bool) -> None:
    dropout, dout = random_dropout(seed, 0.3, len(x.q), len(x.k)), make_dout(x, seed)
    options = replace(options_of(x), dropout_p=0.3, deterministic=deterministic)
    exact = [t.double() for t in (x.q, x.k, x.v)]
    forward = SdpaBackend().forward(Operands(*exact, x.slices, options, dropout=dropout))
    want = SdpaBackend().backward(
        BackwardOperands(dout.double(), *exact, forward.out, forward.lse, x.slices, options, dropout=dropout)
    )
    out, lse = forward.out.to(x.q.dtype), forward.lse.float()
    got = hopper.backend.backward_final(
        BackwardOperands(dout, x.q, x.k, x.v, out, lse, x.slices, options, dropout=dropout)
    )
    for name in ("dq", "dk", "dv"):
        exact_grad, scale = getattr(want, name), getattr(want, name).abs().max().item()
        error = (getattr(got, name).double() - exact_grad).abs().max().item()
        assert error <= 0.02 * scale, f"{seed=} {name}"


@pytest.mark.parametrize("seed", range(3))
def test_gradients_of_lse(hopper, seed):
    """With delta the kernels do not read out, whatever is in it; with softcap, sinks and in order."""
    sink = (2, HEADS[0][0]) if seed else None
    x = random_inputs(seed, 200, softcap=(0.0, 8.0, 0.0)[seed], sink_shape=sink)
    dout, forward, options = make_dout(x, seed), dense(x, torch.float64), replace(options_of(x), deterministic=seed > 1)
    exact = [t.double() for t in (x.q, x.k, x.v)]
    delta = delta_with_dlse(forward.out, dout.double(), forward.lse, forward.lse.sin())
    sink = None if x.sink is None else x.sink.double()
    wanted = [
        SdpaBackend().backward(
            BackwardOperands(dout.double(), *exact, forward.out, forward.lse, x.slices, options, sink, d)
        )
        for d in (delta, None)
    ]
    hopper.use((1, 2, 3)[seed], seed)
    got = differentiate(hopper, x, dout, forward, seed > 1, delta.float().contiguous())
    for name in ("dq", "dk", "dsink"):
        mine, want, without = (getattr(grads, name) for grads in (got, *wanted))
        if want is not None:
            error, scale = (mine.double() - want).abs().max().item(), want.abs().max().item()
            assert error <= 0.02 * scale < (want - without).abs().max().item(), f"{seed=} {name}"


@pytest.mark.parametrize("seed", range(8))
def test_random_masks(hopper, seed):
    hopper.use((1, 1, 2, 3)[seed % 4], seed)
    check(hopper, random_inputs(seed, 350), seed)


OTHER_DIMS = ((96, 96), (72, 88), (192, 128), (168, 96), (192, 192), (136, 184), (256, 256), (224, 200))


# By day the exact head dims with softcap and the padded ones with dropout: pads are zeros to both.
BY_NIGHT = {(option, dims) for option, n in (("softcap", 1), ("dropout", 0)) for dims in OTHER_DIMS[n::2]}
OPTION_DIMS = [
    pytest.param(option, dims, marks=pytest.mark.nightly if (option, dims) in BY_NIGHT else ())
    for option in ("none", "softcap", "dropout")
    for dims in OTHER_DIMS
]


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize(("option", "dims"), OPTION_DIMS)
def test_other_head_dims(hopper, dims, option, deterministic):
    """Above 128, one pass for dk, dv and dq where registers hold both, else one for dk and dq and one for dv."""
    seed = OTHER_DIMS.index(dims) + 10 * len(option) + deterministic
    rng = np.random.default_rng(seed)
    tq, tk = (int(n) for n in rng.integers(50, 180, 2))
    slices = masks.random_slices(rng, tq, tk, max_slices=5)
    options = {"softcap": 15.0} if option == "softcap" else {}
    x = make_inputs(seed, slices, tq, tk, HEADS[seed % 4], dims, torch.bfloat16, "cpu", **options)
    hopper.use(1 + seed % 3, seed)
    if option == "dropout":
        check_dropout(hopper, x, seed, deterministic)
    else:
        check(hopper, x, seed, deterministic)


@pytest.mark.parametrize("seed", range(4))
def test_many_segments(hopper, seed):
    """Blocks of queries here and there, so that the tiles of the plan are traversed once for each head."""
    rng, size = np.random.default_rng(seed), 10
    seen = rng.random((50, 2)) < 0.5
    slices = [[i * size, (i + 1) * size, j * 120, (j + 1) * 120, 0] for i, j in np.argwhere(seen)]
    dtype, dims = KINDS[seed]
    x = make_inputs(seed, slices, 50 * size, 240, HEADS[seed], dims, dtype, "cpu")
    assert segments_of_tiles(x) >= MANY_SEGMENTS
    parts = select_schedule(x.q.shape, x.v.shape, x.slices, options_of(x), 1 + seed % 3).num_head_splits
    assert parts == 2 or HEADS[seed] != (8, 2)
    hopper.use(1 + seed % 3, seed)
    check(hopper, x, seed)


@pytest.mark.parametrize("seed", range(2))
def test_many_segments_of_listed_work_tiles(hopper, seed, monkeypatch):
    """Few work tiles, which the host lists."""
    lists, made = [], ffa_plans.with_schedule
    monkeypatch.setattr(ffa_plans, "with_schedule", lambda *a: lists.append(a[1].list_block_m) or made(*a))
    monkeypatch.setattr(ffa_backward, "select_schedule", lambda *_: BwdSchedule(64, 0))
    rng, size = np.random.default_rng(seed), 6
    seen = rng.random((45, 3)) < 0.5
    seen[:, 2] &= np.arange(45) < 12
    slices = [[i * size, (i + 1) * size, j * 128, (j + 1) * 128, 0] for i, j in np.argwhere(seen)]
    x = make_inputs(seed, slices, 45 * size, 384, (4, 1), (128, 128), torch.float16, "cpu")
    assert segments_of_tiles(x) >= MANY_SEGMENTS
    hopper.use(2, seed)
    check(hopper, x, seed)
    assert lists == [64]


@pytest.mark.parametrize("seed", range(4))
def test_what_unseen_rows_hold_does_not_matter(hopper, seed):
    """Documents with rows between them that see nothing, as pads: the same gradients whatever lies there."""
    rng = np.random.default_rng(seed)
    edges = np.sort(rng.choice(np.arange(1, 330), 6, replace=False))
    slices = [[a, b, a, b, 1] for a, b in ((0, edges[0]), (edges[1], edges[2]), (edges[3], edges[4]))]
    dtype, dims = KINDS[seed % 2]
    x = make_inputs(seed, slices, 340, 340, HEADS[seed], dims, dtype, "cpu")
    hopper.use(1 + seed % 2, seed)
    check(hopper, x, seed, seed > 1, is_poisoned=True)


ONE_OF_EACH = (0, 3, 5, 6)  # kinds, and numbers of CTAs


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=() if n in ONE_OF_EACH else pytest.mark.nightly) for n in range(8)], ids=str
)
def test_deterministic(hopper, seed):
    """CTAs wait for each other; whichever goes on when, the bits are the same."""
    x, found = random_inputs(seed, 300), []
    for order in (seed, 100 + seed):
        hopper.use((1, 2, 3, 4)[seed // 2], order)
        found.append(check(hopper, x, seed, True))
    for name in ("dq", "dk", "dv"):
        assert torch.equal(*(getattr(grads, name) for grads in found)), f"{seed=} {name}"


@pytest.mark.parametrize("seed", range(2))
def test_softcap_and_sinks(hopper, seed):
    hopper.use(1, seed)
    heads = HEADS[0][0]
    check(hopper, random_inputs(seed, 200, softcap=8.0, sink_shape=(2, heads)), seed, seed == 1)


def test_softcap_without_semaphores_is_refused(hopper, monkeypatch):
    monkeypatch.setattr(AttnOptions, "is_plain", True)  # so that atomics are asked for
    monkeypatch.setattr(ffa_backward, "select_schedule", lambda *_: BwdSchedule(64, 0))
    hopper.use(1, 0)
    with pytest.raises(ContractError, match=r"With softcap or dropout dq_mode must be 2 .* or 1 .*; it is 0"):
        check(hopper, random_inputs(0, 100, softcap=8.0), 0)


@pytest.mark.parametrize("queries", (64, 80))
@pytest.mark.parametrize("dq_mode", ("atomic", "deterministic", "first writer", "direct store"))
def test_dq_modes(hopper, queries, dq_mode, monkeypatch):
    deterministic, direct = dq_mode == "deterministic", dq_mode == "direct store"
    schedule = BwdSchedule(queries, 0, first_writer=direct or "first" in dq_mode, direct_dq_store=direct)
    monkeypatch.setattr(ffa_backward, "select_schedule", lambda *_: schedule)
    seed = 1 if queries == 80 else 0  # head dim 128, which has blocks of 80, or 64
    x = random_inputs(seed, 300)
    hopper.use(2, queries)
    check(hopper, x, seed, deterministic)


@pytest.mark.parametrize("queries", (64, 80))
@pytest.mark.parametrize("dq_mode", ("atomic", "deterministic", "first writer"))
def test_parts_of_a_prime_number_of_heads(hopper, queries, dq_mode, monkeypatch):
    """7 heads in 2, 3 and 4 parts, of which some have a head more; in order in 7."""
    for parts in (2, 3, 4):
        schedule = BwdSchedule(queries, parts, first_writer="first" in dq_mode)
        monkeypatch.setattr(ffa_backward, "select_schedule", lambda *_, found=schedule: found)
        slices = masks.random_slices(np.random.default_rng(parts), 200, 180, max_slices=5)
        x = make_inputs(parts, slices, 200, 180, (14, 2), (128, 128), torch.float16, "cpu")
        hopper.use(1 + parts % 3, parts)
        check(hopper, x, parts, dq_mode == "deterministic")


@pytest.mark.parametrize("seed", range(6))
def test_m_blocks_of_128_of_small_head_dims(hopper, seed, monkeypatch):
    """m-blocks of 128 queries; keys that no query sees and queries that see nothing hold NaN."""
    monkeypatch.setattr(ffa_backward, "select_schedule", lambda *_: BwdSchedule(128, 0))
    x = random_inputs(4 * seed + (0, 2)[seed % 2], 400)
    assert max(x.q.shape[2], x.v.shape[2]) <= 64
    hopper.use(1 + seed % 3, seed)
    check(hopper, x, seed, is_poisoned=True)


@pytest.mark.parametrize("seed", range(2))
def test_dropout(hopper, seed):
    hopper.use(1, seed)
    check_dropout(hopper, random_inputs(seed, 200), seed, deterministic=seed == 1)
