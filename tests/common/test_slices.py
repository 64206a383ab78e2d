# SPDX-License-Identifier: Apache-2.0
"""Slice algebra against brute force: every size up to 6 x 9, windows at its edges and some others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_attention.common.intervals import (
    Packing,
    as_intervals,
    intersect_intervals,
    merge_intervals,
    split_at,
    subtract_intervals,
    total_length,
)
from magi_attention.common.slices import (
    SliceTable,
    areas,
    cut_k,
    cut_q,
    merge,
    pairs_before,
    row_bounds,
    to_dense,
    trim,
)
from magi_attention.errors import ContractError, RangeError
from magi_attention.testing.masks import random_slices

ROWS = {
    (5, 2, 1): "00 00 00 10 11",
    (5, 2, 2): "11 01 00 00 00",
    (5, 2, 3): "00 00 00 00 00",
    (2, 5, 1): "11110 11111",
    (2, 5, 2): "11111 01111",
    (2, 5, 3): "11110 01111",
}


@pytest.mark.parametrize(("shape", "rows"), ROWS.items())
def test_rows_of_each_type(shape, rows) -> None:
    sq, sk, kind = shape
    dense = to_dense(np.array([[0, sq, 0, sk, kind]]), sq, sk)
    assert " ".join("".join(str(int(x)) for x in row) for row in dense) == rows


def some_windows(rng: np.random.Generator, edges: list[int]) -> list[tuple[int, int]]:
    """[a, b) within [4, 16): all between edges, and a dozen drawn."""
    drawn = np.sort(rng.integers(4, 16, (12, 2)), axis=1).tolist()
    return [*((a, b) for a in edges for b in edges if a <= b), *map(tuple, drawn)]


@pytest.mark.parametrize("kind", range(4))
def test_cuts_areas_and_trimming_for_all_small_sizes(kind) -> None:
    rng = np.random.default_rng(kind)
    for sq in range(1, 7):
        for sk in range(1, 10):
            whole = np.array([[3, 3 + sq, 5, 5 + sk, kind]])
            dense = to_dense(whole, 11, 16)
            trimmed = trim(whole)
            assert np.array_equal(to_dense(trimmed, 11, 16), dense)
            assert areas(whole).sum() == areas(trimmed).sum() == dense.sum()
            for a, b in some_windows(rng, [4, 5, 6, 4 + sk, 5 + sk, 15]):
                window = np.zeros_like(dense)
                window[:, a:b] = dense[:, a:b]
                pieces, _ = cut_k(trimmed, a, b)
                assert np.array_equal(to_dense(pieces, 11, 16), window), (sq, sk, a, b)
                assert areas(pieces).sum() == window.sum() and len(pieces) <= 3
                lengths = np.diff(pieces[:, [0, 1]]), np.diff(pieces[:, [2, 3]])
                assert ((lengths[0] <= lengths[1])[:, 0] | (pieces[:, 4] == 0)).all()
            for a, b in some_windows(rng, [4, 7, 8, 6 + sq, 7 + sq, 15]):
                window = np.zeros_like(dense)
                window[a - 4 : b - 4] = dense[a - 4 : b - 4]
                pieces, _ = cut_q(trimmed, a - 4, b - 4)
                assert np.array_equal(to_dense(pieces, 11, 16), window), (sq, sk, a, b)
                assert areas(pieces).sum() == window.sum()


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_merging_keeps_every_pair_once(seed) -> None:
    rng = np.random.default_rng(seed)
    slices = trim(random_slices(rng, 24, 24, max_slices=6))
    pieces = [slices]
    for cut in rng.integers(0, 24, 4):
        pieces = [x for p in pieces for x in (cut_k(p, 0, cut)[0], cut_k(p, cut, 24)[0])]
        row = rng.integers(0, 24)
        pieces = [x for p in pieces for x in (cut_q(p, 0, row)[0], cut_q(p, row, 24)[0])]
    shredded = np.concatenate(pieces)
    merged = merge(shredded)
    assert len(merged) <= len(shredded)
    assert np.array_equal(to_dense(merged, 24, 24), to_dense(slices, 24, 24))
    assert areas(merged).sum() == areas(slices).sum()
    assert len(merge(merged)) == len(merged)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**9), shift=st.sampled_from([0, 2**33, 2**58]))
def test_pairs_before_a_key(seed, shift) -> None:
    """Positions whose squares are beyond 64 bits change nothing."""
    rng = np.random.default_rng(seed)
    slices = trim(random_slices(rng, 20, 30, max_slices=8))
    counts = to_dense(slices, 20, 30).sum(axis=0)
    keys = rng.integers(0, 31, (5, 2))
    found = pairs_before(slices + np.array([0, 0, shift, shift, 0]), keys + shift)
    assert found.tolist() == [[int(counts[:key].sum()) for key in row] for row in keys]


def test_pairs_before_a_key_of_a_long_sequence() -> None:
    total = 3_037_000_499  # the longest causal mask that can be counted
    found = pairs_before(np.array([[0, total, 0, total, 1]]), np.array([0, 1, total]))
    assert found.tolist() == [0, total, total * (total + 1) // 2]


def test_merging_examples() -> None:
    full_causal = np.array([[0, 4, 0, 6, 0], [0, 4, 6, 10, 1]])
    assert merge(full_causal).tolist() == [[0, 4, 0, 10, 1]]
    inv_causal = np.array([[0, 4, 0, 4, 2], [0, 4, 4, 8, 1]])
    assert merge(inv_causal).tolist() == [[0, 4, 0, 8, 3]]
    too_short = np.array([[0, 4, 0, 6, 0], [0, 4, 6, 8, 1]])  # its first rows see nothing of the right piece
    assert len(merge(too_short)) == 2


def test_row_bounds_match_dense() -> None:
    for row in ([2, 6, 1, 9, 3], [0, 5, 0, 2, 1], [0, 5, 3, 5, 2], [1, 4, 0, 3, 0]):
        start, end = row_bounds(row)
        dense = to_dense(np.array([row]), 10, 10)[row[0] : row[1]]
        assert (dense.sum(1) == end - start).all()


def test_tables_are_values() -> None:
    first = SliceTable.from_ranges([[0, 4], [4, 8]], [[0, 4], [0, 8]], ["causal", "full"])
    second = SliceTable.from_ranges([(0, 4), (4, 8)], [(0, 4), (0, 8)], [1, 0])
    assert first == second and hash(first) == hash(second)
    assert first.area == 10 + 32
    with pytest.raises(ValueError):
        first.array[0, 0] = 7
    assert first.tensors("cpu")[2].tolist() == [1, 0]


def test_bad_tables_say_what_to_do() -> None:
    with pytest.raises(ContractError, match="'causal'"):
        SliceTable.from_ranges([[0, 1]], [[0, 1]], ["casual"])
    with pytest.raises(AssertionError, match="2 q ranges, 1 k ranges"):
        SliceTable.from_ranges([[0, 1], [1, 2]], [[0, 1]], "full")
    with pytest.raises(RangeError, match="start <= end"):
        SliceTable.from_ranges([[3, 1]], [[0, 1]], "full")


intervals = st.lists(st.tuples(st.integers(0, 25), st.integers(0, 6)), max_size=6).map(
    lambda pairs: as_intervals([(a, a + n) for a, n in pairs])
)


def points(ranges) -> set[int]:
    return {x for start, end in ranges.tolist() for x in range(start, end)}


@settings(max_examples=400, deadline=None)
@given(a=intervals, b=intervals, cuts=st.lists(st.integers(0, 32), max_size=5))
def test_interval_algebra(a, b, cuts) -> None:
    merged = merge_intervals(a)
    assert points(merged) == points(a) and (merged[1:, 0] > merged[:-1, 1]).all()
    assert points(intersect_intervals(a, b)) == points(a) & points(b)
    assert points(subtract_intervals(a, b)) == points(a) - points(b)
    cut = split_at(a, np.array(cuts, dtype=np.int64))
    assert points(cut) == points(a) and total_length(cut) == len(points(a))
    packing = Packing(a)
    assert packing.positions().tolist() == sorted(points(a))
    local = packing.localize(cut)
    assert [packing.positions()[s:e].tolist() for s, e in local.tolist()] == [
        list(range(s, e)) for s, e in cut.tolist()
    ]
    assert points(packing.globalize(local)) == points(a)


@pytest.mark.parametrize("seed", range(60))
def test_even_rows_see_the_same_keys(seed):
    rng = np.random.default_rng(seed)
    total_q, total_k = (int(n) for n in rng.integers(1, 30, 2))
    slices = random_slices(rng, total_q, total_k, max_slices=2)
    if seed % 2:
        slices = np.array([[0, rng.integers(total_q + 1), 0, total_k, rng.integers(2)]])
    even = SliceTable(slices).even_rows
    rows = to_dense(slices, total_q, total_k)
    assert (rows[:even] == rows[:1]).all(), f"{seed=}"
    assert even == len(rows) or seed % 2 == 0 or slices[0, 4] or slices[0, 1] < total_q, f"{seed=}"
