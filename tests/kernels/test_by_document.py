# SPDX-License-Identifier: Apache-2.0
"""Work tiles one document after the other: all of them, in step by a model of the cache, and only where it gains."""

from __future__ import annotations

import numpy as np
import pytest
from ffa_simulator import backend, plan_at
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_oracle import end_of, misses, plan_of, segments_of, steps_of
from test_kernel_ffa_backward import Case
from test_work_tiles import in_plan_order, is_complete, work_tiles_of

from magi_attention.common.mask import Mask
from magi_attention.common.slices import SliceTable
from magi_attention.kernels import AttnOptions
from magi_attention.kernels.ffa import backward as ffa_backward
from magi_attention.kernels.ffa.schedule import select_schedule
from magi_attention.kernels.types import BackwardOperands
from magi_attention.native.schedule import BwdSchedule, WorkTileShape, check_schedule, with_schedule
from magi_attention.native.tile_plan import TilePlan
from magi_attention.testing.libraries import planner_or_skip
from magi_attention.testing.masks import random_slices

H100 = WorkTileShape(heads_kv=8, group=8, num_sms=132, num_ctas=132)
BY_DOCUMENT = H100._replace(by_document=True)
KEPT = 28  # blocks of 8 query heads


@pytest.fixture(scope="module", autouse=True)
def planner():
    planner_or_skip()


def plan_for(mask: Mask) -> TilePlan:
    return plan_of(mask.slices, mask.total_q, mask.total_k)


def documents(lengths, causal: bool = True) -> Mask:
    return Mask.varlen(np.cumsum([0, *lengths]).tolist(), causal=causal)


def gains(mask: Mask) -> bool:
    """Whether the order is chosen, with 64 heads on 8 in deterministic order, where nothing else is."""
    shapes = (mask.total_q, 64, 128), (mask.total_k, 8, 128)
    return select_schedule(*shapes, mask.slices, AttnOptions(0.1, deterministic=True), 132).by_document


def ends_of(plan: TilePlan) -> list[int]:
    """The block behind the last one of each tile of one segment; other tiles get a number of their own."""
    segments = [segments_of(plan, tile) for tile in range(len(plan.tiles))]
    return [x[0][1] if len(x) == 1 and x[0][0] < x[0][1] else -1 - tile for tile, x in enumerate(segments)]


MANY = {
    "sixteen of 4,096": 16 * [4096], "of 2,000": 32 * [2000] + [1536], "of 256": 256 * [256],
    "mixed": [700, 5200, 1800, 9000, 3100] * 4, "few short": 8 * [1024],
}  # fmt: skip


@pytest.mark.parametrize("name", MANY)
def test_many_causal_documents_follow_one_another(name):
    mask = documents(MANY[name])
    plan = plan_for(mask)
    before, listed = in_plan_order(plan, H100), work_tiles_of(with_schedule(plan.words, BY_DOCUMENT), 8)
    assert gains(mask) and is_complete(listed, len(plan.tiles), 8)
    was, now = (misses(plan, work_tiles, 132, KEPT) for work_tiles in (before, listed))
    assert now < (0.9 if name == "mixed" else 0.7) * was, (was, now)
    assert np.array_equal(listed[:, 2], steps_of(plan)[listed[:, 0]])
    ends = np.array(ends_of(plan))[listed[:, 0]]
    assert 1 + np.count_nonzero(np.diff(ends)) == len(np.unique(ends)), "tiles of a document are not together"


IN_STEP = {
    "few": lambda: documents(4 * [4096]), "two long": lambda: documents([4096, 4096]),
    "one": lambda: documents([16384]), "one, full": lambda: documents([8192], causal=False),
    "of a tile": lambda: documents(128 * [128]), "full": lambda: documents(16 * [4096], causal=False),
    "window": lambda: Mask.sliding_window(16384, (1023, 0)),
    "nothing": lambda: Mask(SliceTable([]), 4096, 4096),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_STEP)
def test_nothing_is_gained(name):
    assert not gains(IN_STEP[name]())


def test_what_ends_later_is_not_taken_though_less_is_missed():
    mask = documents(4 * [4096])
    plan = plan_for(mask)
    orders = in_plan_order(plan, H100), work_tiles_of(with_schedule(plan.words, BY_DOCUMENT), 8)
    before, after = (misses(plan, work_tiles, 132, KEPT) for work_tiles in orders)
    sooner, later = (end_of(steps_of(plan)[work_tiles[:, 0]].tolist(), 132) for work_tiles in orders)
    assert after < before and later > sooner and not gains(mask)


def test_the_order_of_the_plan_is_that_of_the_documents():
    """Kernels that sum dq in order follow it, and see by the work tiles that it is another one. The plan
    itself stays as it was."""
    plan = plan_for(documents([300, 2000, 129, 700]))
    before = plan.words.copy()
    made = TilePlan(with_schedule(plan.words, BY_DOCUMENT))
    ends = np.array(ends_of(plan))[made.order].tolist()
    assert sorted(made.order.tolist()) == list(range(len(plan.tiles)))
    assert made.header.words_work_tiles and ends[0] == -(-2300 // 80)  # the longest
    assert np.array_equal(plan.words, before) and made.order.tolist() != plan.order.tolist()
    assert TilePlan(with_schedule(plan.words, H100)).order.tolist() == plan.order.tolist()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 12))
def test_every_work_tile_once(seed, heads, num_ctas):
    rng = np.random.default_rng(seed)
    total_q, total_k = (int(n) for n in rng.integers(1, 3000, 2))
    plan = plan_of(random_slices(rng, total_q, total_k, max_slices=8), total_q, total_k)
    shape = WorkTileShape(heads, 4, num_ctas, num_ctas, by_document=True)
    words = with_schedule(plan.words, shape)
    print(f"{seed=} {shape}")
    check_schedule(words, shape, len(plan.words))
    work_tiles = work_tiles_of(words, heads)
    assert np.array_equal(work_tiles[:, 2], steps_of(plan)[work_tiles[:, 0]])


@pytest.mark.parametrize("takes_list", (False, True))
@pytest.mark.parametrize("mode", ("atomic", "first writer", "deterministic", "m-blocks of 64"))
def test_the_kernel_gets_the_order(mode, takes_list, monkeypatch):
    """Where the plan lists work tiles and there is no work list; and with an order of dq in m-blocks of any size."""
    schedule = BwdSchedule(64 if mode == "m-blocks of 64" else 80, 0, mode == "first writer", by_document=True)
    monkeypatch.setattr(ffa_backward, "select_schedule", lambda *_: schedule)
    ffa, simulator = backend()
    simulator.takes_list = takes_list and mode == "atomic"
    options = AttnOptions(0.3, deterministic=mode in ("deterministic", "m-blocks of 64"))
    case = Case(Mask.varlen([0, 48, 128], causal=True).slices, 128, 128, options, heads=(8, 2), dims=(128, 128))
    ffa.backward(BackwardOperands(*case.tensors, case.slices, options))
    plan = plan_at(simulator.backward_calls[0].plan)
    by_cost = plan_of_call(case, plan).order.tolist()
    if mode == "atomic" and takes_list:
        assert plan.header.words_work_tiles == 0 and plan.order.tolist() == by_cost
        return
    order = TilePlan(with_schedule(plan_of_call(case, plan).words, BY_DOCUMENT)).order.tolist()
    assert plan.header.words_work_tiles and plan.order.tolist() == order != by_cost


def plan_of_call(case: Case, plan: TilePlan) -> TilePlan:
    """The same in the order of cost."""
    header = plan.header
    return TilePlan.of_table(case.slices, 128, 128, header.tile_tokens, header.num_groups, is_transposed=True)
