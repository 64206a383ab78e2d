# SPDX-License-Identifier: Apache-2.0
"""Schedules that the planner library chooses and makes: there is a kernel for each, and the checker finds what is
wrong."""

from __future__ import annotations

import numpy as np
import pytest
from schedule_oracle import plan_of, segments_of

from magi_attention.common.mask import Mask
from magi_attention.common.slices import SliceTable
from magi_attention.errors import ContractError
from magi_attention.kernels import AttnOptions
from magi_attention.kernels.ffa import schedule as schedule_module
from magi_attention.kernels.ffa.arrival import Pace
from magi_attention.kernels.ffa.peer_kv import TILE, RemoteKeys, RemoteMask
from magi_attention.kernels.ffa.schedule import select_schedule
from magi_attention.native.schedule import (
    NONE,
    BwdSchedule,
    WorkTileShape,
    check_schedule,
    check_waits,
    with_schedule,
)
from magi_attention.native.schedule_abi import WorkListHeader
from magi_attention.native.tile_plan import TilePlan
from magi_attention.testing import masks
from magi_attention.testing.libraries import planner_or_skip
from magi_attention.testing.uneven import SPLIT_CASES

NUM_SMS = 132
LARGEST = {False: {64: 128, 128: 80, 256: 64}, True: {64: 64, 128: 80, 256: 64}}  # m-blocks, if dq is counted


@pytest.fixture(scope="module", autouse=True)
def planner():
    planner_or_skip()


def random_mask(rng: np.random.Generator) -> Mask:
    total = int(rng.choice((100, 1000, 2500, 4096, 5120, 8192, 9000)))
    kind = int(rng.integers(0, 5))
    if kind == 0:
        return Mask.full(total) if rng.random() < 0.5 else Mask.causal(total)
    if kind == 1:
        return Mask.sliding_window(total, (int(rng.integers(0, 2000)), 0))
    if kind == 2:
        return Mask.block_sparse(rng.random((32, 32)) < 0.4, 128)
    if kind == 3:
        return Mask(SliceTable(masks.random_slices(rng, total, total, max_slices=8)), total, total)
    length = int(rng.choice((64, 500, 512, 1280, 2048)))
    edges = np.unique(rng.integers(0, total + 1, 6)) if rng.random() < 0.5 else np.arange(0, total, length)
    inside = edges[(edges > 0) & (edges < total)].tolist()
    return Mask.varlen([0, *inside, total], causal=rng.random() < 0.5)


def single_share(mask: Mask, block_m: int) -> float:
    """Of the m-blocks, those that one segment of one tile visits."""
    plan = plan_of(mask.slices, mask.total_q, mask.total_k)
    visits = np.zeros(-(-mask.total_q // block_m), dtype=int)
    for tile in range(len(plan.tiles)):
        for first, end in segments_of(plan, tile, block_m):
            visits[first:end] += 1
    return float((visits == 1).mean())


def check_choice(mask: Mask, found: BwdSchedule, heads: tuple[int, int], dim: int, options: AttnOptions) -> None:
    group, is_counted = heads[0] // heads[1], options.deterministic or found.first_writer
    padded = 64 if dim <= 64 else 128 if dim <= 128 else 256
    assert found.block_m in ({64, LARGEST[is_counted][padded]} if options.is_plain else {64})
    assert found.num_head_splits == 0 or group % found.num_head_splits == 0
    assert not (options.deterministic and found.first_writer)
    begin, end, parts = found.split
    if found.split != NONE:
        assert options.deterministic and found.block_m == 80 and not found.by_document and not found.num_head_splits
        assert 0 <= begin < end <= -(-mask.total_k // 128) and group % parts == 0 and parts in (2, 4, 8)
    if found.direct_dq_store:
        assert is_counted and options.is_plain and found.split == NONE
        assert single_share(mask, found.block_m) >= 0.1


def test_there_is_a_kernel_for_what_is_chosen():
    """Of random masks and shapes; and each way is chosen somewhere."""
    met, draws = set(), np.random.default_rng(11)
    for _ in range(600):
        seed = int(draws.integers(1 << 30))
        rng = np.random.default_rng(seed)
        mask, heads_kv = random_mask(rng), int(rng.choice((1, 4, 8, 16)))
        if rng.random() < 0.4:  # a work tile or two for each SM
            heads_kv = max(300 * 128 // mask.total_k, 1)
        heads, dim = (heads_kv * int(rng.choice((1, 2, 3, 4, 8))), heads_kv), int(rng.choice((40, 64, 128, 128, 256)))
        options = AttnOptions(
            0.3, deterministic=rng.random() < 0.5, softcap=float(rng.choice((0.0, 0.0, 0.0, 8.0)))
        )
        shapes = (mask.total_q, heads[0], dim), (mask.total_k, heads[1], dim)
        found = select_schedule(*shapes, mask.slices, options, NUM_SMS)
        print(f"{seed=} {heads=} {dim=} {options.deterministic=} {options.softcap=} {found}")
        check_choice(mask, found, heads, dim, options)
        met |= {name for name, value in found._asdict().items() if value not in (0, NONE)} | {found.block_m}
        assert select_schedule(*shapes, SliceTable(mask.slices.array), options, NUM_SMS) == found, "no clock is read"
    assert met == {*BwdSchedule._fields, 64, 80, 128}


def test_what_was_chosen_is_kept_with_the_mask(monkeypatch):
    mask, made, choose = Mask.varlen([0, 3000, 7680]), [], schedule_module.choose
    monkeypatch.setattr(schedule_module, "choose", lambda *a: made.append(a) or choose(*a))
    shapes = (7680, 64, 128), (7680, 8, 128)
    options = [AttnOptions(0.3), AttnOptions(0.3, deterministic=True), AttnOptions(0.3, softcap=1.0)]
    first = [select_schedule(*shapes, mask.slices, x, NUM_SMS) for x in options]
    again = [select_schedule(*shapes, mask.slices, x, NUM_SMS) for x in options]
    assert all(a is b for a, b in zip(first, again)) and len(made) == 3
    select_schedule(*shapes, mask.slices, options[0], 264)  # machines may have GPUs of two kinds
    assert len(made) == 4


def test_a_mask_is_planned_once(monkeypatch):
    """Whatever is asked of it, also when a launch has taken its plan."""
    mask, made, build = Mask.varlen([0, 3000, 4000]), [], TilePlan.build
    monkeypatch.setattr(TilePlan, "build", lambda *a: made.append(a) or build(*a))
    for deterministic in (False, True):
        for heads in ((64, 8), (16, 16)):
            shapes = (4000, heads[0], 128), (4000, heads[1], 128)
            select_schedule(*shapes, mask.slices, AttnOptions(0.3, deterministic=deterministic), NUM_SMS)
            if not deterministic:
                TilePlan.of_table(mask.slices, 4000, 4000, 128, 2, is_transposed=True, is_kept=len(made) > 1)
    assert len(made) <= 2, "one for those that choose, and one for the second launch"


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("queries, keys", ((0, 8192), (8192, 0), (8192, 8192)))
def test_nothing_to_do(queries, keys, deterministic):
    options = AttnOptions(0.3, deterministic=deterministic)
    found = select_schedule((queries, 64, 128), (keys, 8, 128), SliceTable([]), options, NUM_SMS)
    assert found == BwdSchedule(64, 0)


def beside_remote(local: int, rows: list[list[int]], remote: int, heads=(64, 8)) -> list[BwdSchedule]:
    """Schedules of a rank with so many keys of others behind its own, by default and in deterministic order."""
    arrivals, pace = np.zeros(remote // TILE, dtype=np.int32), Pace(np.array([1e-3]))
    mask = RemoteMask(SliceTable(np.array(rows)), local, local, arrivals, pace, 0)
    shapes = (local, heads[0], 128), (local, heads[1], 128)
    options = [AttnOptions(0.3, deterministic=is_deterministic) for is_deterministic in (False, True)]
    return [select_schedule(*shapes, RemoteKeys(mask, b""), x, NUM_SMS) for x in options]


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_split_beside_keys_of_other_ranks(seed):
    """There is no kernel for that; dq of a block with a single contribution waits there, too."""
    rng = np.random.default_rng(seed)
    local, remote = 128 * int(rng.integers(1, 40)), 128 * int(rng.integers(1, 100))
    rows = masks.random_slices(rng, local, local + remote, max_slices=12, drop=0.0)
    heads_kv = int(rng.choice((1, 4, 8)))
    for found in beside_remote(local, rows, remote, (8 * heads_kv, heads_kv)):
        assert not found.num_head_splits and found.split == NONE and not found.direct_dq_store, seed


def test_documents_beside_keys_of_other_ranks():
    """Halves of causal documents of 2,048: their first half is another rank's. As if all keys were local."""
    starts = range(0, 8192, 1024)
    pairs = [[[q, q + 1024, 8192 + q, 9216 + q, 0], [q, q + 1024, q, q + 1024, 1]] for q in starts]
    rows = [row for pair in pairs for row in pair]
    options = [AttnOptions(0.3, deterministic=is_deterministic) for is_deterministic in (False, True)]
    shapes = (8192, 64, 128), (16384, 8, 128)
    local = [select_schedule(*shapes, SliceTable(np.array(rows)), x, NUM_SMS) for x in options]
    assert beside_remote(8192, rows, 8192) == local and local[0].first_writer


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
        (changed(words, begin, (first_tile + 1) % 8), "is twice there|has no work tile"),
        (changed(words, begin + 5, 3), "partial -1"),
        (changed(words, last + 2, 2), "is twice there|has no work tile"),
        (changed(words, last + 5, 2), "has no work tile from m-block 2 on"),
        (changed(words, last + 4, 12), "has no work tile before m-block 12"),
        (changed(words, last + 7, 1), "is shared by work tiles"),
        (words[:-8], "has no work tile"),
        (np.concatenate([words, words[-8:]]), "is twice there"),
        (words[:-4], "part of one"),
        (changed(words, order, int(words[order + 1])), "must be there once"),
    ):
        with pytest.raises(ContractError, match=sentence):
            check_schedule(bad, shape, begin)


def test_faults_of_work_lists_are_found():
    """Any word of a work tile but the ends of its m-blocks, which may lie anywhere behind the last, and its order."""
    lengths, kind, (heads, heads_kv), *_ = next(iter(SPLIT_CASES.values()))
    total, edges = sum(lengths), [0, *np.cumsum(lengths).tolist()]
    plan = plan_of(masks.varlen(edges, kind), total, total)
    shape, begin = WorkTileShape(heads_kv, heads // heads_kv, 132, 132, list_block_m=64), len(plan.words)
    words = with_schedule(plan.words, shape)
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


def test_a_circle_of_waits_is_found():
    """Two work tiles start with a counter at which the other has the first target."""
    steps, targets = np.array([2, 2]), np.array([1, 0, 1, 0])
    with pytest.raises(ContractError, match="waits for ever"):
        check_waits(steps, np.array([0, 1, 1, 0]), targets, 2)
    check_waits(steps, np.array([1, 0, 1, 0]), np.array([0, 0, 1, 1]), 2)


def test_waiting_for_what_no_cta_takes_is_found():
    """The first work tile waits for the third, which is taken only where there are as many CTAs."""
    steps, counters, targets = np.array([1, 1, 1]), np.array([0, 0, 0]), np.array([2, 1, 0])
    check_waits(steps, counters, targets, 3)
    with pytest.raises(ContractError, match="with 2 of 3 work tiles taken"):
        check_waits(steps, counters, targets, 2)


def test_an_order_that_depends_on_time_is_found():
    steps, counters = np.array([1, 1, 1]), np.array([0, 0, 0])
    for targets in ([0, 0, 1], [0, 1, 1], [0, 2, 2]):
        with pytest.raises(ContractError, match="and is number"):
            check_waits(steps, counters, np.array(targets), 3)
    check_waits(np.array([3, 1]), np.array([0, 1, 0, 0]), np.array([0, 0, 0, 2]), 1)  # one counts twice, then another
