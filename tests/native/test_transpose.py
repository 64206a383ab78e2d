# SPDX-License-Identifier: Apache-2.0
"""The transposed mask against dense boolean masks: the same pairs, each once, and plans of it that pass the walker."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_attention.common.disjoint import first_overlap
from magi_attention.common.slices import SliceTable, to_dense, trim
from magi_attention.errors import ContractError
from magi_attention.native.planner.tile_plan import TilePlan, transposed
from magi_attention.testing import masks

pytestmark = pytest.mark.usefixtures("planner")


def check(slices: np.ndarray, total_q: int, total_k: int, tile: int = 16, groups: int = 2) -> np.ndarray:
    """``slices`` are disjoint."""
    got = transposed(slices, total_q, total_k)
    want = to_dense(np.asarray(slices, dtype=np.int64).reshape(-1, 5), total_q, total_k).T
    counts = np.zeros((total_k, total_q), dtype=int)
    for row in got.astype(np.int64):
        counts += to_dense(row[None], total_k, total_q)
    assert np.array_equal(counts, want.astype(int)), "pairs missing, added or twice"
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
    with pytest.raises(ContractError, match="Slice 1 has type 4"):
        transposed(np.array([[0, 1, 0, 1, 0], [0, 1, 1, 2, 4]]), 9, 9)
