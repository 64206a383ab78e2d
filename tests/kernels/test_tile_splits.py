# SPDX-License-Identifier: Apache-2.0
"""Which tiles are split by query heads because they are uneven and dq is summed in order."""

from __future__ import annotations

import numpy as np
import pytest
from ffa_simulator import backend
from schedule_oracle import NARROW, WIDE, end_of, plan_of, steps_of
from test_kernel_ffa_backward import Case

from magi_attention.common.mask import Mask
from magi_attention.common.slices import SliceTable
from magi_attention.kernels import AttnOptions
from magi_attention.kernels.ffa.schedule import select_schedule
from magi_attention.kernels.types import BackwardOperands
from magi_attention.native.schedule import NONE, BwdSchedule, Split
from magi_attention.testing.libraries import planner_or_skip

UNEVEN = [0, 2900, 3000, 3300, 3500, 3900, 4096]
NUM_SMS = 132


@pytest.fixture(scope="module", autouse=True)
def planner():
    planner_or_skip()


def schedule(mask: Mask, total: int = 4096, heads=(64, 8), dim: int = 128, num_sms=NUM_SMS, **options) -> BwdSchedule:
    options = {"deterministic": True, **options}
    shapes = (total, heads[0], dim), (total, heads[1], dim)
    return select_schedule(*shapes, mask.slices, AttnOptions(0.3, **options), num_sms)


def random_mask(rng: np.random.Generator, total: int) -> Mask:
    ends = np.unique(rng.integers(1, total, int(rng.integers(1, 12))))
    return Mask.varlen([0, *ends.tolist(), total])


@pytest.mark.parametrize("seed", range(40))
def test_what_is_split_ends_sooner(seed):
    """A run that is there, of parts that have a kernel, which ends sooner by another simulation."""
    rng = np.random.default_rng(seed)
    heads_kv, group = int(rng.choice((2, 4, 8, 16))), int(rng.choice((2, 4, 8, 16)))
    total = 128 * int(rng.integers(19 * NUM_SMS // 10, 3 * NUM_SMS)) // heads_kv
    mask = random_mask(rng, total)
    found = schedule(mask, total, (heads_kv * group, heads_kv))
    split, plan = found.split, plan_of(mask.slices, total, total)
    if split == NONE:
        return
    assert found == BwdSchedule(80, 0, split=split), f"{seed=}"
    assert 0 <= split.begin < split.end <= len(plan.tiles) and group % split.parts == 0, f"{seed=} {split}"
    of_part = group // split.parts
    assert split.parts in (2, 4, 8) and of_part & (of_part - 1) == 0, f"{seed=} {split}"
    times = {}
    for parts_of_run in (1, split.parts):
        work_tiles: list[float] = []
        for rank, count in enumerate(steps_of(plan, WIDE)[plan.order].tolist()):
            parts = parts_of_run if split.begin <= rank < split.end else 1
            work_tiles += [count * group / parts + 1.9] * (parts * heads_kv)
        times[parts_of_run] = end_of(work_tiles, NUM_SMS)
    assert times[split.parts] < 0.98 * times[1], f"{seed=} {split}"


def test_both_are_met():
    found = {schedule(random_mask(np.random.default_rng(seed), 4096)).split == NONE for seed in range(20)}
    assert found == {True, False}


@pytest.mark.parametrize("seed", range(30))
def test_halves_of_all_tiles_end_sooner(seed):
    """Where there is no kernel that splits single tiles: with six query heads of a kv head, and with softcap."""
    rng = np.random.default_rng(seed)
    heads_kv, group = int(rng.choice((2, 4, 8))), int(rng.choice((4, 6)))
    total = 128 * int(rng.integers(19 * NUM_SMS // 10, 3 * NUM_SMS)) // heads_kv
    mask = random_mask(rng, total)
    found = schedule(mask, total, (heads_kv * group, heads_kv), softcap=1.0)
    assert found.split == NONE and found.num_head_splits in (0, 2), f"{seed=}"
    if not found.num_head_splits:
        return
    plan = plan_of(mask.slices, total, total)
    steps = np.repeat(steps_of(plan, NARROW)[plan.order] * group, heads_kv)
    whole, halves = (end_of(np.repeat(steps / n + 3, n).tolist(), NUM_SMS) for n in (1, 2))
    assert halves <= 0.95 * whole, f"{seed=}"


def test_halves_are_met():
    masks = [random_mask(np.random.default_rng(seed), 4096) for seed in range(20)]
    assert {schedule(mask, softcap=1.0).num_head_splits for mask in masks} == {0, 2}


def test_one_long_document_among_short_ones():
    assert schedule(Mask.varlen(UNEVEN)).split == Split(16, 27, 2)


def test_a_last_round_that_is_far_from_full():
    """5K: 320 work tiles for 132 SMs."""
    assert schedule(Mask.full(5120), 5120).split.parts == 2


@pytest.mark.parametrize(
    "mask",
    (
        Mask.full(4096), Mask.varlen(list(range(0, 4097, 512))),
        *(Mask.varlen(UNEVEN, causal=True), Mask.sliding_window(4096, (1023, 0)), Mask.causal(4096)),
    ),
    ids=("full", "equal documents", "causal documents", "window", "causal"),
)  # fmt: skip
def test_not_where_tiles_are_alike_or_end_at_a_diagonal(mask):
    assert schedule(mask).split == NONE


def test_only_where_there_is_a_kernel():
    mask = Mask.varlen(UNEVEN)
    assert schedule(Mask.full(5120), 5120).split != NONE, "eight query heads of a kv head"
    for options in ({"dim": 64}, {"dim": 256}, {"softcap": 1.0}, {"heads": (24, 8)}, {"deterministic": False}):
        assert schedule(mask, **options).split == NONE, options
    assert schedule(mask, heads=(48, 8)).num_head_splits == 2, "halves of six heads, as before"


def test_neither_with_many_units_nor_with_few():
    mask = Mask.varlen(UNEVEN)
    for options in ({"heads": (128, 16)}, {"num_sms": 80}, {"num_sms": 140}):
        assert schedule(mask, **options).split == NONE, options
    assert schedule(Mask(SliceTable([]), 4096, 4096)).split == NONE


@pytest.mark.parametrize("is_deterministic", (False, True))
def test_the_kernel_gets_it(is_deterministic):
    ffa, simulator = backend()
    ffa.runtime.num_sms = lambda index: 6
    slices = Mask.varlen([0, 512, 576, 640, 704, 768]).slices
    options = AttnOptions(0.3, deterministic=is_deterministic)
    case = Case(slices, 768, 768, options, heads=(16, 2), dims=(128, 128))
    ffa.backward(BackwardOperands(*case.tensors, slices, case.options))
    (call,) = simulator.backward_calls
    split = call.split_begin, call.split_end, call.splits_per_split_tile
    assert split == (schedule(Mask(slices, 768, 768), 768, (16, 2), num_sms=6).split if is_deterministic else NONE)
    assert (split != NONE) == is_deterministic
