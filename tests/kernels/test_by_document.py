# SPDX-License-Identifier: Apache-2.0
"""Work tiles one document after the other: all of them, in step by a model of the cache, and only where it gains."""

from __future__ import annotations

import numpy as np
import pytest
from ffa_simulator import backend, plan_at
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernel_ffa_backward import Case
from test_work_tiles import in_plan_order, is_complete, misses, plan_of, work_tiles_of

from magi_attention.common.mask import Mask
from magi_attention.common.slices import SliceTable
from magi_attention.kernels import AttnOptions
from magi_attention.kernels.ffa import backward as ffa_backward
from magi_attention.kernels.ffa.schedule import by_document as by_document_module
from magi_attention.kernels.ffa.schedule import work_tiles as work_tiles_module
from magi_attention.kernels.ffa.schedule.select_schedule import BwdSchedule
from magi_attention.kernels.ffa.schedule.simulate import blocks_of_tiles, starts_of
from magi_attention.kernels.ffa.schedule.work_tiles import WorkTileShape, gain_by_document, with_work_tiles
from magi_attention.kernels.types import BackwardOperands
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


def documents(lengths, causal: bool = True) -> TilePlan:
    return plan_for(Mask.varlen(np.cumsum([0, *lengths]).tolist(), causal=causal))


def with_descending(plan: TilePlan, work_tiles: np.ndarray) -> np.ndarray:
    """Work tiles with the number of descending blocks in place of ``TRAVERSAL_WRAP``."""
    first = blocks_of_tiles(plan).first[work_tiles[:, 0]]
    is_wrap = work_tiles[:, 2] == work_tiles_module.abi.TRAVERSAL_WRAP
    return np.column_stack([work_tiles[:, :2], np.where(is_wrap, first, work_tiles[:, 2])])


def estimate(plan: TilePlan, work_tiles: np.ndarray) -> float:
    """The share of what is missed."""
    tiles, work_tiles = blocks_of_tiles(plan), with_descending(plan, work_tiles)
    return by_document_module.missed(tiles, work_tiles, starts_of(tiles.count[work_tiles[:, 0]] + 0.1, 132), 132, KEPT)


MANY = {
    "sixteen of 4,096": 16 * [4096], "of 2,000": 32 * [2000] + [1536], "of 256": 256 * [256],
    "mixed": [700, 5200, 1800, 9000, 3100] * 4, "few short": 8 * [1024],
}  # fmt: skip


@pytest.mark.parametrize("name", MANY)
def test_many_causal_documents_follow_one_another(name):
    plan = documents(MANY[name])
    before, listed = in_plan_order(plan.words, H100), work_tiles_of(with_work_tiles(plan.words, BY_DOCUMENT), 8)
    assert gain_by_document(plan, H100) > 0.1 and is_complete(listed, len(plan.tiles), 8)
    was, now = (misses(plan, work_tiles, 132, KEPT) for work_tiles in (before, listed))
    assert now < (0.9 if name == "mixed" else 0.7) * was, (was, now)
    tiles = blocks_of_tiles(plan)
    assert np.array_equal(listed[:, 2], tiles.count[listed[:, 0]])
    ends = (tiles.first + tiles.count)[listed[:, 0]]
    changes = 1 + np.count_nonzero(np.diff(ends))
    assert changes == len(np.unique(ends)), "tiles of a document are not together"


IN_STEP = {
    "few": lambda: documents(4 * [4096]), "two long": lambda: documents([4096, 4096]),
    "one": lambda: documents([16384]), "one, full": lambda: documents([8192], causal=False),
    "of a tile": lambda: documents(128 * [128]), "full": lambda: documents(16 * [4096], causal=False),
    "window": lambda: plan_for(Mask.sliding_window(16384, (1023, 0))),
    "nothing": lambda: plan_of(SliceTable([]), 4096, 4096),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_STEP)
def test_nothing_is_gained(name):
    assert gain_by_document(IN_STEP[name](), H100) < 0.05


def test_what_ends_later_is_not_taken_though_less_is_missed():
    plan = documents(4 * [4096])
    before, after = in_plan_order(plan.words, H100), by_document_module.by_document(blocks_of_tiles(plan), 8)
    assert estimate(plan, after) < estimate(plan, before)
    assert gain_by_document(plan, H100) < 0


@pytest.mark.parametrize("lengths", (8 * [4096], 16 * [4096], 32 * [4096], 32 * [2000], 64 * [1024]), ids=str)
def test_the_estimate_is_near_the_model(lengths):
    plan = documents(lengths)
    before, after = in_plan_order(plan.words, H100), by_document_module.by_document(blocks_of_tiles(plan), 8)
    for work_tiles in (before, after):
        assert abs(estimate(plan, work_tiles) - misses(plan, work_tiles, 132, KEPT)) < 0.25


def test_the_order_of_the_plan_is_that_of_the_documents():
    """Kernels that sum dq in order follow it, and see by the work tiles that it is another one. The plan
    itself stays as it was."""
    plan = documents([300, 2000, 129, 700])
    before = plan.words.copy()
    made, tiles = TilePlan(with_work_tiles(plan.words, BY_DOCUMENT)), blocks_of_tiles(plan)
    ends = (tiles.first + tiles.count)[made.order].tolist()
    assert sorted(made.order.tolist()) == list(range(len(plan.tiles)))
    assert made.header.words_work_tiles and ends[0] == -(-2300 // 80)  # the longest
    assert np.array_equal(plan.words, before) and made.order.tolist() != plan.order.tolist()
    assert TilePlan(with_work_tiles(plan.words, H100)).order.tolist() == plan.order.tolist()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 12))
def test_every_work_tile_once(seed, heads, num_ctas):
    rng = np.random.default_rng(seed)
    total_q, total_k = (int(n) for n in rng.integers(1, 3000, 2))
    plan = plan_of(random_slices(rng, total_q, total_k, max_slices=8), total_q, total_k)
    tiles = blocks_of_tiles(plan)
    work_tiles = by_document_module.by_document(tiles, heads)
    assert is_complete(work_tiles, len(plan.tiles), heads), (seed, heads)
    assert np.array_equal(work_tiles[:, 2], tiles.count[work_tiles[:, 0]])
    assert sorted(by_document_module.document_order(tiles).tolist()) == list(range(len(plan.tiles)))
    shape = WorkTileShape(heads, 4, num_ctas, num_ctas)
    assert np.isfinite(gain_by_document(plan, shape)), (seed, heads, num_ctas)


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
    order = by_document_module.document_order(blocks_of_tiles(plan)).tolist()
    assert plan.header.words_work_tiles and plan.order.tolist() == order != by_cost


def plan_of_call(case: Case, plan: TilePlan) -> TilePlan:
    """The same in the order of cost."""
    header = plan.header
    return TilePlan.of_table(case.slices, 128, 128, header.tile_tokens, header.num_groups, is_transposed=True)
