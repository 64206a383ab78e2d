# SPDX-License-Identifier: Apache-2.0
"""The raster against the dense mask."""

from __future__ import annotations

import numpy as np
import pytest

from magi_attention.common.slices import to_dense
from magi_attention.tools.report.raster import coverage


def random_slices(rng: np.random.Generator, count: int, total: int) -> np.ndarray:
    """Slices in disjoint bands of queries, so that they cannot overlap."""
    bounds = np.sort(rng.choice(np.arange(1, total), count - 1, replace=False))
    bounds = np.concatenate([[0], bounds, [total]])
    k = np.sort(rng.integers(0, total + 1, (count, 2)), axis=1)
    return np.column_stack([bounds[:-1], bounds[1:], k, rng.integers(0, 4, count)])


@pytest.mark.parametrize("seed", range(30))
def test_one_cell_per_pair_is_the_dense_mask(seed):
    slices = random_slices(np.random.default_rng(seed), 6, 60)
    image, rows = coverage(slices, 60, 60, size=60, samples=1)
    np.testing.assert_allclose(image, to_dense(slices, 60, 60), atol=1e-12)
    assert rows.tolist() == list(range(60))


@pytest.mark.parametrize("seed", range(30))
def test_cells_hold_the_share_of_allowed_pairs(seed):
    slices = random_slices(np.random.default_rng(seed), 7, 96)
    image, rows = coverage(slices, 96, 96, size=24, samples=4)
    expected = to_dense(slices, 96, 96).reshape(24, 4, 24, 4).mean(axis=(1, 3))
    np.testing.assert_allclose(image, expected, atol=1e-12)
    assert (rows // 4 == np.arange(24)).all()


def test_no_slices():
    image, _ = coverage(np.zeros((0, 5), dtype=np.int64), 1000, 1000, size=16)
    assert image.shape == (16, 16) and not image.any()
