# SPDX-License-Identifier: Apache-2.0
"""Masks as planners take them, transposed or with their FULL slices cut anew: against dense masks the same pairs, each
once; plans of them pass the walker, and tiles meet few slices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_attention.common.disjoint import first_overlap
from magi_attention.common.slices import SliceTable, to_dense, trim
from magi_attention.errors import ContractError
from magi_attention.native.planner.tile_plan import TilePlan, strips, transposed
from magi_attention.testing import masks

pytestmark = pytest.mark.usefixtures("planner")


def dense(rows: np.ndarray, total_q: int, total_k: int) -> np.ndarray:
    """How often each pair is allowed."""
    counts = np.zeros((total_q, total_k), dtype=int)
    for row in rows.astype(np.int64):
        counts += to_dense(row[None], total_q, total_k)
    return counts


def check(slices: np.ndarray, total_q: int, total_k: int, tile: int = 16, groups: int = 2) -> np.ndarray:
    """``slices`` are disjoint."""
    got = transposed(slices, total_q, total_k)
    want = to_dense(np.asarray(slices, dtype=np.int64).reshape(-1, 5), total_q, total_k).T
    assert np.array_equal(dense(got, total_k, total_q), want.astype(int)), "pairs missing, added or twice"
    assert len(got) <= 3 * len(slices) and first_overlap(trim(got.astype(np.int64))) is None
    TilePlan.build(got, total_k, total_q, tile, groups).check(got)
    return got


@settings(max_examples=300, deadline=None, print_blob=True)
@given(
    rows=st.integers(0, 40), keys=st.integers(0, 40), kind=st.integers(0, 3), q0=st.integers(0, 9), k0=st.integers(0, 9)
)
def test_one_slice(rows, keys, kind, q0, k0):
    got = check(np.array([[q0, q0 + rows, k0, k0 + keys, kind]]), q0 + rows + 3, k0 + keys + 3)
    if kind == 0 and rows and keys:
        assert got.tolist() == [[k0, k0 + keys, q0, q0 + rows, 0]]


@settings(max_examples=150, deadline=None, print_blob=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    total_q=st.integers(1, 150),
    total_k=st.integers(1, 150),
    count=st.integers(1, 40),
    tile=st.sampled_from([(8, 2), (16, 2), (64, 2), (128, 2), (12, 3), (1, 1)]),
)
def test_random_masks(seed, total_q, total_k, count, tile):
    slices = masks.random_slices(np.random.default_rng(seed), total_q, total_k, max_slices=count)
    got = check(slices, total_q, total_k, *tile)
    back = transposed(got, total_k, total_q).astype(np.int64)
    assert np.array_equal(to_dense(back, total_q, total_k), to_dense(slices, total_q, total_k))


@pytest.mark.parametrize("total", [16, 100, 129])
def test_families(total):
    for slices in masks.mask_families(total).values():
        check(slices.array, total, total, 128)


def test_slices_that_allow_nothing_leave_nothing():
    rows = np.array([[5, 5, 0, 9, 0], [3, 9, 4, 4, 1], [0, 9, 3, 5, 3], [2, 2, 2, 2, 2]])
    assert transposed(rows, 20, 20).shape == (0, 5)
    assert transposed(SliceTable([]), 0, 0).shape == (0, 5)


def test_wrong_slices_are_sentences():
    with pytest.raises(ContractError, match=r"Slice 0 has k range \[0, 9\) with 8 rows of k"):
        transposed(masks.causal(9), 9, 8)
    for call in (lambda rows: transposed(rows, 9, 9), lambda rows: strips(rows_of(rows), 16)):
        with pytest.raises(ContractError, match="Slice 1 has type 4"):
            call(np.array([[0, 1, 0, 1, 0], [0, 1, 1, 2, 4]]))


# ---- strips ----------------------------------------------------------------------------------------------------------
def rows_of(slices) -> np.ndarray:
    return np.asarray(slices, dtype=np.int32).reshape(-1, 5)


def meetings(rows: np.ndarray, tile: int) -> int:
    """How often a slice meets a tile of that many rows."""
    some = rows[rows[:, 1] > rows[:, 0]]
    return int(((some[:, 1] - 1) // tile - some[:, 0] // tile + 1).sum())


def block_causal(total: int, block: int) -> np.ndarray:
    """Each block of queries sees all up to its end."""
    ends = [min(a + block, total) for a in range(0, total, block)]
    return rows_of([[a, b, 0, b, 0] for a, b in zip(range(0, total, block), ends)])


@settings(max_examples=150, deadline=None, print_blob=True)
@given(
    seed=st.integers(0, 2**32 - 1), total_q=st.integers(1, 150), total_k=st.integers(1, 150), count=st.integers(1, 60),
    tile=st.sampled_from([1, 8, 16, 128]), only_full=st.booleans(),
)  # fmt: skip
def test_strips_of_random_masks(seed, total_q, total_k, count, tile, only_full):
    types = (0,) if only_full else (0, 1, 2, 3)
    slices = masks.random_slices(np.random.default_rng(seed), total_q, total_k, max_slices=count, types=types)
    for rows, sizes in (
        (rows_of(slices), (total_q, total_k)), (transposed(slices, total_q, total_k), (total_k, total_q)),
    ):  # fmt: skip
        got = strips(rows, tile)
        assert len(got) <= 3 * len(rows) and first_overlap(trim(got.astype(np.int64))) is None
        assert np.array_equal(dense(got, *sizes), dense(rows, *sizes)), "pairs missing, added or twice"
        plain = trim(rows.astype(np.int64))
        if len(rows) > 1 and not np.array_equal(got, plain):
            assert 2 * meetings(got, tile) <= meetings(plain, tile), "cut for nothing"
        TilePlan.build(got, *sizes, max(tile, 2), 2).check(rows)


@pytest.mark.parametrize("total, block", [(5000, 7), (20_000, 100), (131_072, 1560), (2**20, 1560)])
def test_tiles_of_keys_meet_few_slices_of_a_block_causal_mask(total, block):
    """Every block is a strip of keys that all later queries see; before a tile of keys met all later blocks."""
    rows = transposed(block_causal(total, block), total, total)
    got = strips(rows, 128)
    assert sorted(got.tolist()) == [[a, min(a + block, total), a, total, 0] for a in range(0, total, block)]
    assert meetings(got, 128) <= total // 128 + 2 * len(got) < meetings(rows, 128) / 4


@pytest.mark.parametrize("total, block", [(5000, 7), (20_000, 100), (32_768, 1560)])
def test_the_plan_stays_as_it_is(total, block):
    rows = transposed(block_causal(total, block), total, total)
    want = TilePlan.build(rows, total, total, 128, 2)
    assert np.array_equal(TilePlan.build(strips(rows, 128), total, total, 128, 2).words, want.words)


def test_masks_that_gain_nothing_stay():
    documents = [[a, a + 100, a, a + 100, 0] for a in range(0, 3000, 100)]
    causal = [[0, 500, 0, 500, 1], [500, 900, 500, 900, 3]]
    for slices in (documents, causal, [[0, 5, 0, 9, 0]], []):
        assert np.array_equal(strips(rows_of(slices), 128), rows_of(slices))


def test_slices_that_share_pairs_stay():
    """Whoever gives them gets what they say, a pair that is counted twice, with strips or without."""
    for shared in ([10, 300, 4, 9, 0], [0, 400, 0, 5, 0]):
        slices = rows_of([*([0, 400, 5 * i, 5 * i + 5, 0] for i in range(30)), shared])
        assert np.array_equal(strips(slices, 16), slices)


def test_columns_come_and_go():
    """A run of columns that loses its middle goes on as two, and is one again when that comes back."""
    slices = rows_of([[0, 900, 0, 10, 0], [0, 300, 10, 20, 0], [600, 900, 10, 20, 0], [0, 900, 20, 30, 0]])
    want = [[0, 300, 0, 30, 0], [300, 600, 0, 10, 0], [300, 600, 20, 30, 0], [600, 900, 0, 30, 0]]
    more = rows_of([[0, 900, 30 + i, 31 + i, 0] for i in range(40)])  # so that cutting anew pays
    got = strips(np.concatenate([slices, more]), 16)
    assert sorted(got.tolist()) == [[a, b, c, 70 if d == 30 else d, 0] for a, b, c, d, _ in want]


def test_a_plan_of_a_table_is_held_for_the_next():
    table = SliceTable(block_causal(3000, 100).astype(np.int64))
    first = TilePlan.of_table(table, 3000, 3000, 128, 2, is_transposed=True, is_kept=True)
    assert TilePlan.of_table(table, 3000, 3000, 128, 2, is_transposed=True, is_kept=True) is first
    assert TilePlan.of_table(table, 3000, 3000, 128, 2) is not first
    assert TilePlan.of_table(table, 3000, 3000, 128, 2, is_transposed=True) is first  # and taken away
    again = TilePlan.of_table(table, 3000, 3000, 128, 2, is_transposed=True)
    assert again is not first and np.array_equal(again.words, first.words)
    first.check(transposed(table, 3000, 3000))
