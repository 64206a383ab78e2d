# SPDX-License-Identifier: Apache-2.0
"""Work lists of the backward (csrc/planner/schedule/work_list.cpp): every pair once, and what the kernels count by."""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
from schedule_oracle import end_of, segments_of

from magi_attention.common.slices import SliceTable
from magi_attention.errors import ContractError
from magi_attention.native import schedule_abi
from magi_attention.native.schedule import WorkTileShape, check_schedule, with_schedule
from magi_attention.native.tile_plan import TilePlan
from magi_attention.testing import masks
from magi_attention.testing.libraries import planner_or_skip
from magi_attention.testing.uneven import SPLIT_CASES

WHOLE = 2**31 - 1
PARTS = schedule_abi.LIST_SPLITS


@pytest.fixture(autouse=True)
def planner():
    planner_or_skip()


class List(NamedTuple):
    """Arrays of a work list: rows of ``WorkTile``, ``Partial`` and ``ListEntry``; and the others."""

    header: schedule_abi.WorkListHeader
    work_tiles: np.ndarray
    partials: np.ndarray
    left: np.ndarray
    blocks: np.ndarray
    tiles_of_block: np.ndarray
    entries: np.ndarray


def read(words: np.ndarray, tiles: int, m_blocks: int, heads_kv: int) -> List:
    header = schedule_abi.WorkListHeader.from_buffer_copy(words[:16].tobytes())
    assert header.words_total == len(words)

    def rows(name: str, count: int, kind: type[ctypes.Structure] | None, *shape: int) -> np.ndarray:
        at, size = getattr(header, f"words_{name}"), ctypes.sizeof(kind) // 4 if kind else 1
        assert at % 4 == 0 and at + count * size <= len(words)
        found = words[at : at + count * size]
        if kind is None:
            return found.reshape(shape)
        fields = [(field, np.int32) for field, *_ in kind._fields_]
        return np.frombuffer(found.tobytes(), dtype=fields)

    return List(
        header,
        rows("work_tiles", header.num_work_tiles, schedule_abi.WorkTile),
        rows("partials", header.num_partials, schedule_abi.Partial),
        rows("left", tiles * heads_kv * PARTS, None, tiles, heads_kv, PARTS),
        rows("blocks", m_blocks, None, m_blocks),
        rows("tiles_of_block", m_blocks * header.tile_words, None, m_blocks, header.tile_words),
        rows("entries", header.num_entries, schedule_abi.ListEntry),
    )


class Case(NamedTuple):
    plan: TilePlan
    shape: WorkTileShape
    visits: list[list[tuple[int, int]]]  # of each tile: blocks of each segment
    list: List

    @property
    def m_blocks(self) -> int:
        return -(-self.plan.header.total_k // self.shape.list_block_m)


def make(slices: SliceTable, total_q: int, total_k: int, shape: WorkTileShape) -> Case:
    plan = TilePlan.of_table(slices, total_q, total_k, 128, 2, is_transposed=True)
    visits = [segments_of(plan, tile, shape.list_block_m) for tile in range(len(plan.tiles))]
    words = with_schedule(plan.words, shape)
    check_schedule(words, shape, len(plan.words))
    m_blocks = -(-total_q // shape.list_block_m)
    return Case(plan, shape, visits, read(words[len(plan.words) :], len(visits), m_blocks, shape.heads_kv))


def documents(lengths, kind: int) -> SliceTable:
    return SliceTable(masks.varlen([0, *np.cumsum(lengths).tolist()], kind).array)


def random_case(rng: np.random.Generator) -> Case:
    heads_kv, group = int(rng.integers(1, 20)), PARTS * int(rng.integers(1, 4))
    num_sms = int(rng.choice((8, 78, 132, 148, 300)))
    num_ctas, block_m = int(rng.integers(1, num_sms + 1)), int(rng.choice((64, 80)))
    shape = WorkTileShape(heads_kv, group, num_sms, num_ctas, list_block_m=block_m)
    total = int(rng.integers(1, 4000))
    if rng.random() < 0.3:
        other = int(rng.integers(1, 4000))
        return make(SliceTable(masks.random_slices(rng, total, other)), total, other, shape)
    edges = masks.random_cu_seqlens(rng, total, int(rng.integers(1, 12)))
    array = masks.varlen(edges, int(rng.integers(0, 4))).array
    return make(SliceTable(array[rng.random(len(array)) < 0.9]), total, total, shape)


def blocks_of(case: Case, w) -> Counter:
    """The blocks that a work tile visits, as often as its segments do."""
    return Counter(
        block
        for begin, end in case.visits[w["tile"]]
        for block in range(max(begin, w["m_begin"]), min(end, w["m_end"]))
    )


@pytest.mark.parametrize("seed", range(60))
def test_every_block_of_every_head_is_in_one_work_tile(seed):
    """And what the kernels count by is right: ``make`` checks it."""
    case = random_case(np.random.default_rng(seed))
    assert set(case.list.work_tiles["num_splits"].tolist()) <= {1, PARTS}, seed


@pytest.mark.parametrize("seed", range(40))
def test_rows_are_prepared_in_the_order_in_which_they_are_needed(seed):
    case = random_case(np.random.default_rng(2000 + seed))
    made, first = case.list, case.list.work_tiles[: case.shape.num_ctas]
    assert sorted(made.blocks.tolist()) == list(range(case.m_blocks)), seed
    assert (first["num_descending"] == schedule_abi.TRAVERSAL_WRAP).all(), seed
    assert (made.work_tiles["num_descending"][len(first) :] == 0).all(), seed
    at_once = set(made.blocks[: made.header.num_blocks_at_once].tolist())
    for w in first:
        visits = [(max(b, w["m_begin"]), min(e, w["m_end"])) for b, e in case.visits[w["tile"]]]
        begin, end = next(((b, e) for b, e in visits if b < e), (0, 0))
        if begin < end:  # descending first, if there is anything before the segment
            assert (end - 1 if begin else begin) in at_once, (seed, w)


@pytest.mark.parametrize("name", SPLIT_CASES)
def test_uneven_documents_are_split_and_end_no_later(name):
    lengths, kind, (heads, heads_kv), tiles, work_tiles = SPLIT_CASES[name]
    total = sum(lengths)
    shape = WorkTileShape(heads_kv, heads // heads_kv, 132, 132, list_block_m=64)
    case = make(documents(lengths, kind), total, total, shape)
    made = case.list
    assert (len(made.partials), len(made.work_tiles)) == (tiles * heads_kv, work_tiles * heads_kv)

    begin_and_end = 0.65  # steps of a whole group, as measured for four query heads
    listed = np.array([sum(blocks_of(case, w).values()) / w["num_splits"] for w in made.work_tiles]) + begin_and_end
    whole = np.array([sum(e - b for b, e in visits) for visits in case.visits], dtype=float) + begin_and_end
    assert end_of(listed, 132) <= end_of(-np.sort(-np.repeat(whole, heads_kv)), 132) + 1e-9


def test_fewer_ctas_change_no_split():
    """Results must not depend on what is left free: only in which order blocks are taken."""
    for lengths, kind, (heads, heads_kv), *_ in SPLIT_CASES.values():
        slices, total = documents(lengths, kind), sum(lengths)
        shape = WorkTileShape(heads_kv, heads // heads_kv, 132, 132, list_block_m=64)
        lists = [make(slices, total, total, shape._replace(num_ctas=n)) for n in (132, 112, 1)]
        kept = ["tile", "head_kv", "split", "num_splits", "m_begin", "m_end", "partial"]
        for other in lists[1:]:
            assert (other.list.work_tiles[kept] == lists[0].list.work_tiles[kept]).all()


def test_even_tiles_stay_whole_and_go_head_by_head():
    total, heads_kv = 700, 44  # the last tile has keys that do not exist: all its steps need masks, so it comes first
    shape = WorkTileShape(heads_kv, 4, 132, 132, list_block_m=64)
    case = make(SliceTable(masks.full(total).array), total, total, shape)
    pairs = [(int(w["head_kv"]), int(w["tile"])) for w in case.list.work_tiles]
    assert pairs[:heads_kv] == [(head, total // 128) for head in range(heads_kv)]
    assert pairs[heads_kv:] == [(head, tile) for head in range(heads_kv) for tile in range(total // 128)]
    assert not len(case.list.partials)


def test_wrong_sizes_are_refused():
    plan = TilePlan.of_table(masks.full(256), 256, 256, 128, 2, is_transposed=True)
    good = WorkTileShape(2, 4, 132, 132, list_block_m=64)
    assert len(with_schedule(plan.words, good)) > len(plan.words)
    for wrong in ({"heads_kv": 0}, {"group": 3}, {"group": 0}, {"num_sms": 0}, {"num_ctas": 0}):
        with pytest.raises(ContractError, match="kv head"):
            with_schedule(plan.words, good._replace(**wrong))
