# SPDX-License-Identifier: Apache-2.0
"""Work tiles behind a plan: every pair is in one, and kernels are given them. And the checker finds what is wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ffa_case import BackwardCase
from ffa_simulator import backend, memory, plan_at
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_oracle import end_of, plan_of, random_mask

from magi_attention.common.mask import Mask
from magi_attention.common.slices import SliceTable
from magi_attention.errors import ContractError
from magi_attention.kernels import AttnOptions
from magi_attention.kernels.ffa import backward as ffa_backward
from magi_attention.kernels.ffa.arrival import Pace, backward_order, there_at
from magi_attention.kernels.ffa.plans import RangeTensors
from magi_attention.kernels.types import BackwardOperands
from magi_attention.native.planner import abi as schedule_abi
from magi_attention.native.planner.abi import WorkListHeader
from magi_attention.native.planner.schedule import BwdSchedule, Split, WorkTileShape, check_schedule, with_schedule
from magi_attention.native.planner.tile_plan import TilePlan
from magi_attention.testing import masks
from magi_attention.testing.uneven import SPLIT_CASES

pytestmark = pytest.mark.usefixtures("planner")

FEW = WorkTileShape(heads_kv=3, group=8, num_sms=40, num_ctas=40)


def work_tiles_of(words: np.ndarray, heads_kv: int) -> np.ndarray:
    """(work tiles, 3): tile, head and traversal, as the kernel reads them."""
    header = TilePlan(words).header
    return words[header.words_work_tiles :][: 8 * header.num_tiles * heads_kv].reshape(-1, 8)[:, [0, 1, 6]]


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**31), way=st.sampled_from(("plan order", "by document", "tail", "list", "arrivals")))
def test_every_pair_is_in_one_work_tile(seed, way):
    """As the checker sees it, which also knows what kernels count by. The plan stays as it was."""
    rng = np.random.default_rng(seed)
    mask = random_mask(rng, int(rng.integers(1, 3000)))
    if rng.random() < 0.3:
        total_q, total_k = (int(n) for n in rng.integers(1, 3000, 2))
        mask = Mask(SliceTable(masks.random_slices(rng, total_q, total_k, max_slices=8)), total_q, total_k)
    plan = plan_of(mask.slices, mask.total_q, mask.total_k)
    before, num_sms = plan.words.copy(), int(rng.choice((1, 8, 40, 132, 300)))
    heads_kv, group = int(rng.integers(1, 20)), int(rng.integers(1, 9))
    shape = WorkTileShape(heads_kv, group, num_sms, int(rng.integers(1, num_sms + 1)), by_document=way == "by document")
    when = None
    if way == "tail":
        most = len(plan.tiles) * heads_kv
        shape = shape._replace(tail=(int(rng.integers(0, most + 1)), int(rng.integers(2, 9))))
    if way == "list":
        shape = shape._replace(group=schedule_abi.LIST_SPLITS * int(rng.integers(1, 4)))
        shape = shape._replace(list_block_m=int(rng.choice((64, 80))))
    if way == "arrivals":
        when = np.where(rng.random(len(plan.tiles)) < 0.5, -np.inf, rng.random(len(plan.tiles)))
    print(f"{seed=} {shape}")
    words = with_schedule(plan.words, shape, when)
    check_schedule(words, shape, len(plan.words))
    assert np.array_equal(plan.words, before) and len(words) % 4 == 0


def test_tiles_whose_keys_are_there_come_first():
    """The plan's order by arrival is that of the first heads; then the order by cost. A first wave begins with what is
    there: of each pair under a causal mask one tile is."""
    total, tiles = 128 * 90, 90
    plan = plan_of(Mask.full(total).slices, total, total)
    arrivals, base = np.repeat(np.arange(10), 7)[::-1], 128 * 20
    pace = Pace(np.arange(1, 11) * 1e-3, pair_backward=1e-12, heads=4)
    words = backward_order(plan.words.copy(), pace, arrivals, base)
    own = words[TilePlan(words).header.words_first_order :][:tiles]
    work_tiles = work_tiles_of(with_schedule(words, FEW, there_at(128, pace, arrivals, base)), 3)
    assert own.tolist() != plan.order.tolist() and work_tiles[:tiles, 0].tolist() == own.tolist()
    assert work_tiles[tiles : 2 * tiles, 0].tolist() == plan.order.tolist()
    total = 128 * 150
    plan = plan_of(Mask.causal(total).slices, total, total)
    when = np.where(np.arange(150) < 75, -np.inf, 1e-3)
    begin = work_tiles_of(with_schedule(plan.words, FEW, when), 3)[: FEW.num_ctas]
    assert (begin[:, 1] == 0).all() and np.isinf(when[begin[:, 0]]).all()


# ---- work lists ------------------------------------------------------------------------------------------------------
def split_case(name: str) -> tuple[TilePlan, WorkTileShape]:
    lengths, kind, (heads, heads_kv), *_ = SPLIT_CASES[name]
    table, total = masks.varlen([0, *np.cumsum(lengths).tolist()], kind), sum(lengths)
    return plan_of(table, total, total), WorkTileShape(heads_kv, heads // heads_kv, 132, 132, list_block_m=64)


def listed(plan: TilePlan, shape: WorkTileShape) -> tuple[WorkListHeader, np.ndarray]:
    """The header, and (work tiles, 8)."""
    words = with_schedule(plan.words, shape)[len(plan.words) :]
    header = WorkListHeader.from_buffer_copy(words[:16].tobytes())
    return header, words[header.words_work_tiles :][: 8 * header.num_work_tiles].reshape(-1, 8)


@pytest.mark.parametrize("name", SPLIT_CASES)
def test_uneven_documents_are_split_and_end_no_later(name):
    *_, tiles, work_tiles = SPLIT_CASES[name]
    plan, shape = split_case(name)
    header, rows = listed(plan, shape)
    assert (header.num_partials, len(rows)) == (tiles * shape.heads_kv, work_tiles * shape.heads_kv)
    plain = listed(plan_of(masks.full(700), 700, 700), WorkTileShape(44, 4, 132, 132, list_block_m=64))
    assert not plain[0].num_partials, "even tiles stay whole"
    begin_and_end = 0.65  # steps of a whole group, as measured for four query heads
    visits = [range(*pair) for pair in zip(plan.records[:, 0] // 64, -(-plan.records[:, 1] // 64))]
    of_tile = [[b for r in visits[t[2] : t[2] + t[3]] for b in r] for t in plan.tiles.tolist()]
    split = [sum(w[4] <= b < w[5] for b in of_tile[w[0]]) / w[3] + begin_and_end for w in rows.tolist()]
    whole = np.repeat(sorted((len(blocks) + begin_and_end for blocks in of_tile), reverse=True), shape.heads_kv)
    assert end_of(split, 132) <= end_of(whole, 132) + 1e-9


@pytest.mark.parametrize("name", SPLIT_CASES)
def test_fewer_ctas_change_no_split(name):
    """Results must not depend on what is left free: only in which order blocks are taken."""
    plan, shape = split_case(name)
    lists = [listed(plan, shape._replace(num_ctas=n))[1][:, [0, 1, 2, 3, 4, 5, 7]] for n in (132, 112, 1)]
    assert all(np.array_equal(lists[0], other) for other in lists[1:])


def test_wrong_sizes_are_refused():
    plan = plan_of(masks.full(256), 256, 256)
    good = WorkTileShape(2, 4, 132, 132, list_block_m=64)
    assert len(with_schedule(plan.words, good)) > len(plan.words)
    for wrong in ({"heads_kv": 0}, {"group": 3}, {"group": 0}, {"num_sms": 0}, {"num_ctas": 0}):
        with pytest.raises(ContractError, match="kv head"):
            with_schedule(plan.words, good._replace(**wrong))


# ---- what a call gets ------------------------------------------------------------------------------------------------
CHOICES = {  # schedule, whether the kernels take a list, options, and whether the plan has work tiles
    "m-blocks of 64": (BwdSchedule(64, 0), False, {}, False),
    "m-blocks of 80": (BwdSchedule(80, 0), False, {}, True),
    "a list": (BwdSchedule(80, 0), True, {"sm_margin": 3}, False),
    "first writer": (BwdSchedule(80, 0, True), False, {}, False),
    "documents, first writer": (BwdSchedule(80, 0, True, by_document=True), False, {}, True),
    "in order": (BwdSchedule(80, 0), False, {"deterministic": True}, False),
    "documents, in order": (BwdSchedule(64, 0, by_document=True), False, {"deterministic": True}, True),
    "split, in order": (BwdSchedule(80, 0, split=Split(0, 1, 2)), False, {"deterministic": True}, False),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_kernel_gets_what_was_chosen(name, monkeypatch):
    """The device has four SMs. Range tensors have nothing that the host makes for each mask."""
    schedule, takes_list, options, has_work_tiles = CHOICES[name]
    monkeypatch.setattr(ffa_backward, "select_schedule", lambda *_: schedule)
    ffa, simulator = backend()
    simulator.takes_list = takes_list
    mask = Mask.varlen([0, 48, 128], causal=True)
    case = BackwardCase(mask.slices, 128, 128, AttnOptions(0.3, **options), heads=(8, 2), dims=(128, 128))
    ffa.backward(BackwardOperands(*case.tensors, case.slices, case.options))
    (call,) = simulator.backward_calls
    split = call.split_begin, call.split_end, call.splits_per_split_tile
    assert (call.block_m, split) == (schedule.block_m, schedule.split)
    plan, shape = plan_at(call.plan), WorkTileShape(2, 4, 4, 4 - case.options.sm_margin, schedule.by_document)
    header = plan.header
    plain = TilePlan.of_table(case.slices, 128, 128, header.tile_tokens, header.num_groups, is_transposed=True)
    assert bool(header.words_work_tiles) == has_work_tiles and bool(call.work_list) == takes_list
    assert (plan.order.tolist() != plain.order.tolist()) == schedule.by_document
    if takes_list:
        wanted = with_schedule(plan.words, shape._replace(list_block_m=80))[header.words_total :]
        assert np.array_equal(memory(call.work_list, (len(wanted),), (1,), np.int32), wanted)
        ranges = RangeTensors(*(torch.tensor(case.slices.array[:, a : a + 2]) for a in (0, 2)), None)
        ffa.backward(BackwardOperands(*case.tensors, ranges, case.options))
        assert simulator.backward_calls[1].work_list is None
    if has_work_tiles:
        rows = memory(call.plan + 4 * header.words_work_tiles, (len(plan.tiles) * 2 * 8,), (1,), np.int32)
        check_schedule(np.concatenate([plan.words[: header.words_work_tiles], rows]), shape, header.words_work_tiles)


# ---- the checker -----------------------------------------------------------------------------------------------------
def changed(words: np.ndarray, at: int, value: int) -> np.ndarray:
    made = words.copy()
    made[at] = value
    return made


def test_faults_of_work_tiles_are_found():
    plan = plan_of(Mask.causal(1000).slices, 1000, 1000)
    shape = WorkTileShape(2, 8, 132, 132, tail=(3, 4))
    words, begin = with_schedule(plan.words, shape), len(plan.words)
    check_schedule(words, shape, begin)
    last, first_tile = len(words) - 8, int(words[begin])
    order = TilePlan(words).header.words_order
    for bad, sentence in (
        (changed(words, begin, 8), "there is no such work tile"),
        (changed(words, begin + 1, 2), "there is no such work tile"),
        (changed(words, begin, (first_tile + 1) % 8), "is in [02] work tiles"),
        (changed(words, begin + 5, 3), "partial -1"),
        (changed(words, last + 2, 2), "is in [02] work tiles"),
        (changed(words, last + 5, 2), "is in 0 work tiles"),
        (changed(words, last + 4, 12), "is in 0 work tiles"),
        (changed(words, last + 7, 1), "is shared by work tiles"),
        (words[:-8], "is in 0 work tiles"),
        (np.concatenate([words, words[-8:]]), "is in 2 work tiles"),
        (words[:-4], "part of one"),
        (changed(words, order, int(words[order + 1])), "must be there once"),
    ):
        with pytest.raises(ContractError, match=sentence):
            check_schedule(bad, shape, begin)


def test_faults_of_work_lists_are_found():
    """Any word of a work tile but the ends of its m-blocks, which may lie anywhere behind the last, and its order."""
    plan, shape = split_case(next(iter(SPLIT_CASES)))
    words, begin = with_schedule(plan.words, shape), len(plan.words)
    check_schedule(words, shape, begin)
    header = WorkListHeader.from_buffer_copy(words[begin : begin + 16].tobytes())
    work_tiles, tried = begin + header.words_work_tiles, 0
    others = (0, header.words_partials, header.words_left, header.words_blocks, header.words_entries)
    for at in (*(begin + n for n in others), *range(work_tiles, begin + header.words_partials)):
        if work_tiles <= at < begin + header.words_partials and (at - work_tiles) % 8 in (5, 6):
            continue
        tried += 1
        with pytest.raises(ContractError):
            check_schedule(changed(words, at, int(words[at]) - 1), shape, begin)
    assert tried > 100 and header.num_partials
