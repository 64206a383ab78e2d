# SPDX-License-Identifier: Apache-2.0
"""Lists of blocks and endpoints against the dense mask."""

from __future__ import annotations

import re

import numpy as np
import pytest

from magi_attention.common.slices import to_dense, trim
from magi_attention.errors import ContractError
from magi_attention.kernels.fa4 import blocks
from magi_attention.kernels.fa4.blocks import BlockSize, mask_blocks
from magi_attention.testing.masks import random_slices


def check(seed: int) -> None:
    rng = np.random.default_rng(seed)
    total_q, total_k = (int(n) for n in rng.integers(1, 300, 2))
    slices = random_slices(rng, total_q, total_k, max_slices=int(rng.integers(1, 20)))
    size = BlockSize(*(int(n) for n in rng.choice([16, 32, 48, 64], 2)))
    note = f"seed {seed}: {total_q} x {total_k} in {size}, slices {slices.tolist()}"
    made, dense = mask_blocks(trim(slices), total_q, total_k, size), to_dense(slices, total_q, total_k)

    by_row = (made.endpoints[:, :total_q, None] <= np.arange(total_k)).sum(0) % 2 == 1
    assert np.array_equal(by_row, dense), note
    length = len(made.endpoints)
    assert length in (2, 4) or (length > 4 and length & (length + 1) == 0), note
    assert (np.diff(made.endpoints, axis=0) >= 0).all(), note  # bisection needs that

    shape = (-(-total_q // size.queries), -(-total_k // size.keys))
    padded = np.pad(dense, [(0, n * s - have) for n, s, have in zip(shape, size, dense.shape)])
    real = np.pad(np.ones_like(dense), [(0, n * s - have) for n, s, have in zip(shape, size, dense.shape)])
    seen, there = (x.reshape(shape[0], size[0], shape[1], size[1]).sum((1, 3)) for x in (padded, real))
    kinds = (seen > 0) & (seen < there), (seen == there)
    for lists, want in zip(made[:4], (*kinds, *(kind.T for kind in kinds))):
        got = np.zeros(want.shape, dtype=int)
        for row, count in enumerate(lists.counts):
            assert (np.diff(lists.indices[row, :count]) > 0).all(), note
            np.add.at(got[row], lists.indices[row, :count], 1)
        assert np.array_equal(got, want), note


@pytest.mark.parametrize("first", range(0, 2000, 250))
def test_random_masks(first):
    for seed in range(first, first + 250):
        check(seed)


def test_blocks_are_counted_in_parts(monkeypatch):
    monkeypatch.setattr(blocks, "_CELLS", 7)
    for seed in range(50):
        check(seed)


def test_a_mask_without_pairs():
    made = mask_blocks(np.zeros((0, 5), dtype=np.int64), 100, 50, BlockSize(64, 32))
    assert not any(lists.counts.any() for lists in made[:4]) and (made.endpoints == blocks.NEVER).all()


def test_slices_that_overlap_are_refused():
    """Intervals hold a key once, and the CUDA kernels count a pair of two slices twice."""
    total, found = 40, 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        slices = random_slices(rng, total, total, max_slices=6)
        extra = np.append(np.sort(rng.integers(0, total + 1, (2, 2)), axis=1), rng.integers(4))[None]
        slices = trim(np.concatenate([slices, extra]))
        counts = sum(to_dense(row[None], total, total).astype(int) for row in slices)
        if not len(slices) or counts.max() <= 1:
            mask_blocks(slices, total, total, BlockSize(16, 16))
            continue
        found += 1
        words = r"overlap: query \d+ has key \d+ twice, .*cut one of the two"
        with pytest.raises(ContractError, match=words) as caught:
            mask_blocks(slices, total, total, BlockSize(16, 16))
        query, key = map(int, re.search(r"query (\d+) has key (\d+)", str(caught.value)).groups())
        assert counts[query, key] > 1, f"seed {seed}"
    assert found > 20
