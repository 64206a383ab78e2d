# SPDX-License-Identifier: Apache-2.0
"""Work lists of the backward (csrc/planner/schedule/work_list.cpp): every pair once, and what the kernels count by."""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest

from magi_attention.common.slices import SliceTable
from magi_attention.errors import ContractError
from magi_attention.kernels.ffa.schedule.simulate import starts_of
from magi_attention.kernels.ffa.schedule.work_list import ListShape, work_list
from magi_attention.native import abi
from magi_attention.native.tile_plan import TilePlan
from magi_attention.testing import masks
from magi_attention.testing.libraries import planner_or_skip
from magi_attention.testing.uneven import SPLIT_CASES

WHOLE = 2**31 - 1
PARTS = abi.LIST_SPLITS


@pytest.fixture(autouse=True)
def planner():
    planner_or_skip()


class List(NamedTuple):
    """Arrays of a work list: rows of ``abi.WorkTile``, ``abi.Partial``, ``abi.ListEntry``; and the others."""

    header: abi.WorkListHeader
    work_tiles: np.ndarray
    partials: np.ndarray
    left: np.ndarray
    blocks: np.ndarray
    tiles_of_block: np.ndarray
    entries: np.ndarray


def read(words: np.ndarray, tiles: int, m_blocks: int, heads_kv: int) -> List:
    header = abi.WorkListHeader.from_buffer_copy(words[:16].tobytes())
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
        rows("work_tiles", header.num_work_tiles, abi.WorkTile),
        rows("partials", header.num_partials, abi.Partial),
        rows("left", tiles * heads_kv * PARTS, None, tiles, heads_kv, PARTS),
        rows("blocks", m_blocks, None, m_blocks),
        rows("tiles_of_block", m_blocks * header.tile_words, None, m_blocks, header.tile_words),
        rows("entries", header.num_entries, abi.ListEntry),
    )


class Case(NamedTuple):
    plan: TilePlan
    shape: ListShape
    visits: list[list[tuple[int, int]]]  # of each tile: blocks of each segment
    list: List

    @property
    def m_blocks(self) -> int:
        return -(-self.plan.header.total_k // self.shape.block_m)


def make(slices: SliceTable, total_q: int, total_k: int, shape: ListShape) -> Case:
    plan = TilePlan.of_table(slices, total_q, total_k, 128, 2, is_transposed=True)
    m = shape.block_m
    visits = [
        [(int(r[0]) // m, -(-int(r[1]) // m)) for r in plan.records[begin : begin + count]]
        for begin, count in plan.tiles[:, 2:4].tolist()
    ]
    words = work_list(plan, shape)
    return Case(plan, shape, visits, read(words, len(visits), -(-total_q // m), shape.heads_kv))


def documents(lengths, kind: int) -> SliceTable:
    return SliceTable(masks.varlen([0, *np.cumsum(lengths).tolist()], kind).array)


def random_case(rng: np.random.Generator) -> Case:
    heads_kv, group = int(rng.integers(1, 20)), PARTS * int(rng.integers(1, 4))
    num_sms = int(rng.choice((8, 78, 132, 148, 300)))
    shape = ListShape(heads_kv, group, num_sms, int(rng.integers(1, num_sms + 1)), int(rng.choice((64, 80))))
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
    case = random_case(np.random.default_rng(seed))
    found: dict[tuple[int, int, int], Counter] = {}
    for w in case.list.work_tiles:
        assert w["num_splits"] in (1, PARTS) and 0 <= w["split"] < w["num_splits"], (seed, w)
        each = PARTS // w["num_splits"]
        for part in range(w["split"] * each, (w["split"] + 1) * each):
            found.setdefault((w["tile"], w["head_kv"], part), Counter()).update(blocks_of(case, w))
    for tile, visits in enumerate(case.visits):
        want = Counter(block for begin, end in visits for block in range(begin, end))
        for head in range(case.shape.heads_kv):
            for part in range(PARTS):
                assert found.pop((tile, head, part)) == want, (seed, tile, head, part)
    assert not found, seed


@pytest.mark.parametrize("seed", range(60))
def test_what_kernels_count_by(seed):
    case = random_case(np.random.default_rng(1000 + seed))
    made, (tiles, heads) = case.list, (len(case.visits), case.shape.heads_kv)
    left = np.zeros((tiles, heads, PARTS), dtype=np.int32)
    of_partial: dict[int, list] = {}
    for w in made.work_tiles:
        each = PARTS // w["num_splits"]
        left[w["tile"], w["head_kv"], w["split"] * each : (w["split"] + 1) * each] += 1
        is_whole = w["num_splits"] == 1 and (w["m_begin"], w["m_end"]) == (0, WHOLE)
        assert (w["partial"] < 0) == is_whole, (seed, w)
        if not is_whole:
            of_partial.setdefault(w["partial"], []).append(w)
    assert (made.left == left).all(), seed
    assert sorted(of_partial) == list(range(len(made.partials))), seed
    assert len(made.partials) <= (tiles + 1) // 2 * heads, "the workspace has room for half of the tiles"
    for i, partial in enumerate(made.partials):
        parts = of_partial[i]
        assert {(w["tile"], w["head_kv"]) for w in parts} == {(partial["tile"], partial["head_kv"])}, seed
        assert len(parts) == partial["num_splits"], seed
    dense = np.zeros((case.m_blocks, tiles), dtype=bool)
    for tile, visits in enumerate(case.visits):
        for begin, end in visits:
            dense[begin:end, tile] = True
    bits = np.unpackbits(made.tiles_of_block.copy().view(np.uint8), axis=1, bitorder="little")[:, :tiles]
    assert (bits.astype(bool) == dense).all(), seed
    want = {(b, p) for b in range(case.m_blocks) for p in range(heads * PARTS)}
    want |= {(~i, share) for i in range(len(made.partials)) for share in range(PARTS)}
    entries = [(int(e["block"]), int(e["part"])) for e in made.entries]
    assert len(entries) == len(want) and set(entries) == want, seed


@pytest.mark.parametrize("seed", range(40))
def test_rows_are_prepared_in_the_order_in_which_they_are_needed(seed):
    case = random_case(np.random.default_rng(2000 + seed))
    made, first = case.list, case.list.work_tiles[: case.shape.num_ctas]
    assert sorted(made.blocks.tolist()) == list(range(case.m_blocks)), seed
    assert (first["num_descending"] == abi.TRAVERSAL_WRAP).all(), seed
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
    case = make(documents(lengths, kind), total, total, ListShape(heads_kv, heads // heads_kv, 132, 132, 64))
    made = case.list
    assert (len(made.partials), len(made.work_tiles)) == (tiles * heads_kv, work_tiles * heads_kv)

    def end(times: np.ndarray) -> float:
        return float((starts_of(times, 132) + times).max())

    begin_and_end = 0.65  # steps of a whole group, as measured for four query heads
    listed = np.array([sum(blocks_of(case, w).values()) / w["num_splits"] for w in made.work_tiles]) + begin_and_end
    whole = np.array([sum(e - b for b, e in visits) for visits in case.visits], dtype=float) + begin_and_end
    assert end(listed) <= end(-np.sort(-np.repeat(whole, heads_kv))) + 1e-9


def test_fewer_ctas_change_no_split():
    """Results must not depend on what is left free: only in which order blocks are taken."""
    for lengths, kind, (heads, heads_kv), *_ in SPLIT_CASES.values():
        slices, total = documents(lengths, kind), sum(lengths)
        lists = [make(slices, total, total, ListShape(heads_kv, heads // heads_kv, 132, n, 64)) for n in (132, 112, 1)]
        kept = ["tile", "head_kv", "split", "num_splits", "m_begin", "m_end", "partial"]
        for other in lists[1:]:
            assert (other.list.work_tiles[kept] == lists[0].list.work_tiles[kept]).all()


def test_even_tiles_stay_whole_and_go_head_by_head():
    total, heads_kv = 700, 44  # the last tile has keys that do not exist: all its steps need masks, so it comes first
    case = make(SliceTable(masks.full(total).array), total, total, ListShape(heads_kv, 4, 132, 132, 64))
    pairs = [(int(w["head_kv"]), int(w["tile"])) for w in case.list.work_tiles]
    assert pairs[:heads_kv] == [(head, total // 128) for head in range(heads_kv)]
    assert pairs[heads_kv:] == [(head, tile) for head in range(heads_kv) for tile in range(total // 128)]
    assert not len(case.list.partials)


def test_wrong_sizes_are_refused():
    plan = TilePlan.of_table(masks.full(256), 256, 256, 128, 2, is_transposed=True)
    good = ListShape(2, 4, 132, 132, 64)
    assert len(work_list(plan, good))
    for wrong in ({"heads_kv": 0}, {"group": 3}, {"group": 0}, {"num_sms": 0}, {"num_ctas": 0}, {"block_m": 0}):
        with pytest.raises(ContractError, match="kv head"):
            work_list(plan, good._replace(**wrong))
