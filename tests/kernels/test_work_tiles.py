# SPDX-License-Identifier: Apache-2.0
"""The list of work tiles of m-blocks of 80: complete, and in step under causal masks, by a model of the cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ffa_simulator import backend, memory, plan_at
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_oracle import end_of, misses, plan_of, steps_of
from test_kernel_ffa_backward import Case

from magi_attention.common.mask import Mask
from magi_attention.common.slices import SliceTable
from magi_attention.kernels import AttnOptions
from magi_attention.kernels.ffa import schedule as schedule_module
from magi_attention.kernels.ffa.arrival import Pace, backward_order, there_at
from magi_attention.kernels.ffa.plans import RangeTensors
from magi_attention.kernels.types import BackwardOperands
from magi_attention.native.schedule import BwdSchedule, WorkTileShape, check_schedule, with_schedule
from magi_attention.native.schedule_abi import TRAVERSAL_WRAP
from magi_attention.native.tile_plan import TilePlan
from magi_attention.testing.libraries import planner_or_skip
from magi_attention.testing.masks import random_slices

FEW = WorkTileShape(heads_kv=3, group=8, num_sms=40, num_ctas=40)


@pytest.fixture(scope="module", autouse=True)
def planner():
    planner_or_skip()


def work_tiles_of(words: np.ndarray, heads_kv: int) -> np.ndarray:
    """(work tiles, 3): tile, head and traversal, as the kernel reads them."""
    header = TilePlan(words).header
    return rows_of(words[header.words_work_tiles :][: 8 * header.num_tiles * heads_kv])


def rows_of(words: np.ndarray) -> np.ndarray:
    """(work tiles, 3) of rows of ``magi_work_tile``, all of which are whole."""
    rows = words.reshape(-1, 8)
    assert (rows[:, [2, 3, 4, 5, 7]] == [0, 1, 0, 2**31 - 1, -1]).all()
    return rows[:, [0, 1, 6]]


def is_complete(work_tiles: np.ndarray, num_tiles: int, heads_kv: int) -> bool:
    every = np.stack(np.meshgrid(np.arange(num_tiles), np.arange(heads_kv)), -1).reshape(-1, 2)
    return sorted(map(tuple, work_tiles[:, :2].tolist())) == sorted(map(tuple, every.tolist()))


def in_plan_order(plan: TilePlan, shape: WorkTileShape) -> np.ndarray:
    return work_tiles_of(with_schedule(plan.words, shape._replace(keeps_plan_order=True)), shape.heads_kv)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 12), st.integers(1, 12))
def test_every_work_tile_once(seed, heads_kv, num_sms, num_ctas):
    rng = np.random.default_rng(seed)
    total_q, total_k = (int(n) for n in rng.integers(1, 3000, 2))
    slices = random_slices(rng, total_q, total_k, max_slices=5)
    if rng.random() < 0.5:
        slices = np.array([[0, total_q, 0, total_k, 1]])
    plan = plan_of(slices, total_q, total_k)
    shape = WorkTileShape(heads_kv, int(rng.integers(1, 9)), num_sms, min(num_ctas, num_sms))
    for some in (shape, shape._replace(by_document=True), shape._replace(tail=(min(heads_kv, 3), 2))):
        words = with_schedule(plan.words, some)
        assert len(words) % 4 == 0 and (some.by_document or (words[: len(plan.words)] != plan.words).sum() <= 1)
        print(f"{seed=} {some}")
        check_schedule(words, some, len(plan.words))


@pytest.mark.parametrize("tiles", (64, 97, 128, 150))
def test_causal_traversals_are_in_step(tiles):
    """As long as 24 blocks stay in the cache, next to nothing but the first visits of a wave misses it."""
    total = 128 * tiles
    plan = plan_of(np.array([[0, total, 0, total, 1]]), total, total)
    listed = work_tiles_of(with_schedule(plan.words, FEW), 3)
    assert is_complete(listed, tiles, 3)
    before = misses(plan, in_plan_order(plan, FEW), FEW.num_ctas, 24)
    now = misses(plan, listed, FEW.num_ctas, 24)
    assert now <= before and now < 0.22, (before, now)


def test_many_waves_win_most():
    total = 128 * 150
    plan = plan_of(np.array([[0, total, 0, total, 1]]), total, total)
    before = misses(plan, in_plan_order(plan, FEW), FEW.num_ctas, 24)
    now = misses(plan, work_tiles_of(with_schedule(plan.words, FEW), 3), FEW.num_ctas, 24)
    assert before > 2 * now, (before, now)


@pytest.mark.parametrize("heads_kv, group, is_worth_it", ((1, 8, True), (8, 8, True), (2, 64, True), (8, 1, False)))
def test_where_much_fits_nothing_needs_to_be_in_step(heads_kv, group, is_worth_it):
    """With one query head many more blocks stay in the cache than of 64, which a tile takes one after the other."""
    total = 128 * 128
    plan = plan_of(np.array([[0, total, 0, total, 1]]), total, total)
    shape = WorkTileShape(heads_kv, group, 40, 40)
    work_tiles = work_tiles_of(with_schedule(plan.words, shape), heads_kv)
    assert np.array_equal(work_tiles, in_plan_order(plan, shape)) != is_worth_it


@pytest.mark.parametrize(
    "mask, tiles",
    (
        (Mask.full(128 * 90), 90),
        (Mask.varlen(list(range(0, 128 * 90 + 1, 1280)), causal=True), 90),
        (Mask.causal(128 * 8), 8),
    ),
    ids=("full", "documents", "short"),
)
def test_others_keep_the_order_of_the_plan(mask, tiles):
    total = 128 * tiles
    plan = plan_of(mask.slices, total, total)
    work_tiles = work_tiles_of(with_schedule(plan.words, FEW), 3)
    assert np.array_equal(work_tiles, in_plan_order(plan, FEW))
    at_once = min(3, max(1, round(80 / tiles)))
    assert work_tiles[: at_once * tiles : at_once, 0].tolist() == plan.order.tolist()
    parts = next((n for n in (1, 2, 4, 8) if n * tiles * 3 >= 76), 8)
    wraps = (work_tiles[:, 2] == TRAVERSAL_WRAP)[: at_once * tiles]
    assert wraps.sum() == min(-(-FEW.num_ctas // parts), at_once * tiles) and wraps[: wraps.sum()].all()


def test_a_first_order_is_that_of_the_first_l2_group():
    total, tiles = 128 * 90, 90
    plan = plan_of(Mask.full(total).slices, total, total)
    arrivals, base = np.repeat(np.arange(10), 7)[::-1], 128 * 20
    pace = Pace(np.arange(1, 11) * 1e-3, pair_backward=1e-12, heads=4)
    words = backward_order(plan.words.copy(), pace, arrivals, base)
    own = words[TilePlan(words).header.words_first_order :][:tiles]
    assert own.tolist() != plan.order.tolist()
    work_tiles = work_tiles_of(with_schedule(words, FEW, there_at(128, pace, arrivals, base)), 3)
    assert work_tiles[:tiles, 0].tolist() == own.tolist() and (work_tiles[:tiles, 1] == 0).all()
    assert work_tiles[tiles : 2 * tiles, 0].tolist() == plan.order.tolist() and is_complete(work_tiles, tiles, 3)


@pytest.mark.parametrize("local", (range(75), range(75, 150), range(40, 110)), ids=("first", "last", "middle"))
def test_the_first_wave_begins_with_what_is_there(local):
    """As far as it goes: of each pair under a causal mask one tile is local, in the third case of 35 pairs both."""
    total, tiles = 128 * 150, 150
    plan = plan_of(np.array([[0, total, 0, total, 1]]), total, total)
    when = np.full(tiles, 1e-3)
    when[list(local)] = -np.inf
    work_tiles = work_tiles_of(with_schedule(plan.words, FEW, when), 3)
    begin = work_tiles[: FEW.num_ctas]
    assert (begin[:, 1] == 0).all() and np.isinf(when[begin[:, 0]]).sum() == (35 if local[0] == 40 else FEW.num_ctas)
    assert is_complete(work_tiles, tiles, 3)
    assert misses(plan, work_tiles, FEW.num_ctas, 24) < 0.22


def test_empty_tiles_begin():
    """Those that no query sees, as between local and remote keys: the end is for what can be shared out."""
    total, tiles = 128 * 150, 151
    slices = np.array([[0, total, 0, total, 1]])
    moved = np.array([[0, 6400, 0, 6400, 1], [6400, total, 0, 6400, 0], [6400, total, 6528, total + 128, 1]])
    plan, apart = plan_of(slices, total, total), plan_of(moved, total, total + 128)
    work_tiles = work_tiles_of(with_schedule(apart.words, FEW), 3)
    assert is_complete(work_tiles, tiles, 3) and work_tiles[:3].tolist() == [[50, head, 0] for head in range(3)]
    behind = work_tiles[3:] - np.outer(work_tiles[3:, 0] > 50, [1, 0, 0])
    listed = work_tiles_of(with_schedule(plan.words, FEW), 3)
    assert abs(misses(apart, work_tiles, FEW.num_ctas, 24) - misses(plan, listed, FEW.num_ctas, 24)) < 0.02
    assert sorted(behind[:, 0].tolist()) == sorted(listed[:, 0].tolist())


@pytest.mark.parametrize(
    "tiles, heads", ((32, [8]), (40, [8]), (48, [8]), (56, [4, 4]), (64, [4, 4]), (80, [4, 4]), (96, [3, 3, 2]))
)
def test_l2_groups_of_heads(tiles, heads):
    """With 132 SMs. A few long tiles behind all others are what all would wait for."""
    total = 128 * tiles
    plan = plan_of(np.array([[0, total, 0, total, 1]]), total, total)
    shape = WorkTileShape(8, 8, 132, 132)
    work_tiles = work_tiles_of(with_schedule(plan.words, shape), 8)
    ends = np.cumsum(heads)
    assert [sorted(set(part[:, 1].tolist())) for part in np.split(work_tiles, ends[:-1] * tiles)] == [
        list(range(end - count, end)) for end, count in zip(ends.tolist(), heads)
    ]
    counts = steps_of(plan)[work_tiles[:, 0]]
    end = end_of(counts.tolist(), 132)
    assert end < 1.12 * counts.sum() / 132, end / (counts.sum() / 132)


def test_what_fills_no_round_comes_together():
    """100 tiles see the last 3/5 of the queries, which no two of them fill; the others, causal, pair up."""
    total_q, many = 6400, 100 * 128
    slices = np.array([[0, total_q, 0, total_q, 1], [2560, total_q, total_q, total_q + many, 0]])
    plan = plan_of(slices, total_q, total_q + many)
    shape = WorkTileShape(3, 8, 20, 20)
    work_tiles = work_tiles_of(with_schedule(plan.words, shape), 3)
    assert is_complete(work_tiles, len(plan.tiles), 3)
    before = misses(plan, in_plan_order(plan, shape), shape.num_ctas, 24)
    now = misses(plan, work_tiles, shape.num_ctas, 24)
    assert now < before / 1.5, (before, now)


@pytest.mark.parametrize(
    "options", (AttnOptions(0.3), AttnOptions(0.3, sm_margin=3), AttnOptions(0.3, deterministic=True))
)
def test_the_kernel_gets_a_list(options, monkeypatch):
    """With m-blocks of 80, here from 4 queries a key on, and atomic dq; there are four SMs."""
    choose = lambda slices, *_: BwdSchedule(80 if slices.area >= 4 * 32 else 64, 0)  # noqa: E731
    monkeypatch.setattr(schedule_module, "_choose", choose)
    ffa, simulator = backend()
    slices = [Mask.causal(32).slices, Mask.varlen(list(range(0, 33, 2))).slices]
    for known in slices:
        case = Case(known, 32, 32, options, dims=(128, 128))
        ffa.backward(BackwardOperands(*case.tensors, known, options))
    assert [c.block_m for c in simulator.backward_calls] == [80, 64]
    wide, narrow = (plan_at(c.plan) for c in simulator.backward_calls)
    at = wide.header.words_work_tiles
    assert narrow.header.words_work_tiles == 0 and bool(at) != options.deterministic
    if not at:
        return
    rows = rows_of(memory(simulator.backward_calls[0].plan + 4 * at, (len(wide.tiles) * 2 * 8,), (1,), np.int32))
    assert is_complete(rows, len(wide.tiles), 2)
    # halves of heads
    assert rows[:, 2].tolist() == [TRAVERSAL_WRAP if 2 * i < 4 - options.sm_margin else 0 for i in range(4)]


@pytest.mark.parametrize("seed", range(20))
def test_work_tiles_at_the_end_are_split_as_the_library_asks(seed):
    """All parts of each, first parts of all before second ones; the others as without."""
    rng = np.random.default_rng(seed)
    slices = SliceTable(random_slices(rng, 900, 1300, max_slices=8))
    plan = plan_of(slices, 900, 1300)
    heads, parts = int(rng.integers(1, 5)), int(rng.integers(2, 9))
    num_work_tiles = len(plan.tiles) * heads
    num_tail = int(rng.integers(0, num_work_tiles + 1))
    shape = WorkTileShape(heads, 8, 40, 40, by_document=bool(seed % 2))
    whole, split = (
        with_schedule(plan.words, shape._replace(tail=tail))[len(plan.words) :].reshape(-1, 8)
        for tail in ((0, 1), (num_tail, parts))
    )
    kept = num_work_tiles - num_tail
    assert len(whole) == num_work_tiles and len(split) == kept + num_tail * parts, seed
    assert np.array_equal(split[:kept], whole[:kept]), seed
    ends = split[kept:].reshape(parts, num_tail, 8)
    for part in range(parts):
        rows = ends[part]
        assert np.array_equal(rows[:, [0, 1, 4, 5, 6]], whole[kept:][:, [0, 1, 4, 5, 6]]), seed
        assert (rows[:, 2:4] == [part, parts]).all() and rows[:, 7].tolist() == list(range(num_tail)), seed


@pytest.mark.parametrize("margin", (0, 3))
def test_a_call_that_takes_a_work_list_gets_one_where_the_host_knows_the_mask(margin, monkeypatch):
    """The list has the call's heads, and as many CTAs as the call may use of four SMs."""
    monkeypatch.setattr(schedule_module, "_choose", lambda *_: BwdSchedule(80, 0))
    ffa, simulator = backend()
    simulator.takes_list = True
    case = Case(Mask.causal(32).slices, 32, 32, AttnOptions(0.3, sm_margin=margin), heads=(8, 2), dims=(128, 128))
    ffa.backward(BackwardOperands(*case.tensors, case.slices, case.options))
    ranges = RangeTensors(*(torch.tensor(case.slices.array[:, a : a + 2]) for a in (0, 2)), None)
    ffa.backward(BackwardOperands(*case.tensors, ranges, case.options))
    known, unknown = simulator.backward_calls
    plan = plan_at(known.plan)
    assert known.block_m == 80 and plan.header.words_work_tiles == 0 and unknown.work_list is None
    wanted = with_schedule(plan.words, WorkTileShape(2, 4, 4, 4 - margin, list_block_m=80))[len(plan.words) :]
    assert np.array_equal(memory(known.work_list, (len(wanted),), (1,), np.int32), wanted)


def test_a_list_needs_no_tiles():
    words = with_schedule(plan_of(SliceTable([]), 10, 300).words, FEW)
    assert is_complete(work_tiles_of(words, 3), 3, 3)
