# SPDX-License-Identifier: Apache-2.0
"""The masks that other tests use are what they claim to be."""

import numpy as np
import pytest

from magi_attention.common import disjoint, slices
from magi_attention.testing import masks


@pytest.mark.parametrize("seed", range(60))
def test_random_slices_are_disjoint_and_inside(seed):
    rng = np.random.default_rng(seed)
    tq, tk = (int(x) for x in rng.integers(1, 60, size=2))
    s = masks.random_slices(rng, tq, tk, max_slices=12)
    assert s.shape == (len(s), 5) and s.dtype == np.int64 and len(s) <= 12
    assert disjoint.first_overlap(s) is None
    assert (s[:, 0] >= 0).all() and (s[:, 1] <= tq).all() and (s[:, 2] >= 0).all() and (s[:, 3] <= tk).all()
    assert slices.areas(s).sum() == slices.to_dense(s, tq, tk).sum()


def test_random_slices_reach_the_hard_cases():
    rng = np.random.default_rng(0)
    seen = {"types": set(), "unsorted": 0, "tall": 0, "empty_row": 0, "crossing": 0, "repeat_q": 0}
    for _ in range(200):
        s = masks.random_slices(rng, 40, 40)
        seen["types"] |= set(s[:, 4].tolist())
        seen["unsorted"] += bool((np.diff(s[:, 0]) < 0).any())
        seen["tall"] += bool((((s[:, 1] - s[:, 0]) > (s[:, 3] - s[:, 2])) & (s[:, 4] > 0)).any())
        seen["empty_row"] += bool((~slices.to_dense(s, 40, 40).any(1)).any())
        full = s.copy()
        full[:, 4] = 0
        seen["crossing"] += disjoint.first_overlap(full) is not None
        seen["repeat_q"] += len(set(map(tuple, s[:, :2].tolist()))) < len(s)
    assert seen.pop("types") == {0, 1, 2, 3}
    assert all(count > 10 for count in seen.values()), seen


def test_random_slices_honour_types_and_degenerate_sizes():
    rng = np.random.default_rng(1)
    for _ in range(50):
        assert set(masks.random_slices(rng, 30, 20, types=(0,))[:, 4].tolist()) <= {0}
    assert masks.random_slices(rng, 0, 5).shape == (0, 5)
    assert masks.random_slices(rng, 1, 1, max_slices=4).shape[1] == 5


@pytest.mark.parametrize("total", [16, 17, 64, 101, 128])
def test_families(total):
    i, j = np.arange(total)[:, None], np.arange(total)[None]
    w, g = max(total // 8, 1), max(total // 16, 1)
    families = masks.mask_families(total)
    dense = {name: slices.to_dense(t.array, total, total) for name, t in families.items()}
    for name, table in families.items():
        assert disjoint.first_overlap(table.array) is None, name
        assert table.area == dense[name].sum(), name
    assert dense["full"].all()
    assert (dense["causal"] == (j <= i)).all()
    assert (dense["sliding_window_causal"] == ((j <= i) & (j >= i - w))).all()
    assert (dense["sliding_window"] == (abs(i - j) <= w)).all()
    assert (dense["inv_causal"] == (j >= i)).all()
    assert (dense["diagonal"] == (j == i)).all()
    p = total // 3
    assert (dense["prefix_causal"] == ((j <= i) | ((i < p) & (j < p)))).all()
    assert (dense["global_and_window"] == ((j <= i) & ((j < g) | (j > i - w)))).all()
    assert not dense["empty"].any() and not dense["holes"].any(1).all()


def test_random_cu_seqlens():
    rng = np.random.default_rng(0)
    for total in (1, 2, 50):
        cu = masks.random_cu_seqlens(rng, total, 6)
        assert cu[0] == 0 and cu[-1] == total and (np.diff(cu) > 0).all()
