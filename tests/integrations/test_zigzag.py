# SPDX-License-Identifier: Apache-2.0
"""The zigzag layout against the rule of the frameworks, and attention over it against a dense mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from magi_attention.api import attend
from magi_attention.common.slices import to_dense
from magi_attention.errors import ContractError
from magi_attention.integrations.zigzag import zigzag_plan
from magi_attention.testing.spawn import run_processes


@pytest.mark.parametrize("seed", range(50))
def test_the_layout_is_zigzag(seed):
    rng = np.random.default_rng(seed)
    cp_size = int(rng.integers(1, 5))
    lengths = 2 * cp_size * rng.integers(1, 8, int(rng.integers(1, 6)))
    bounds = tuple(np.concatenate([[0], lengths.cumsum()]).tolist())
    plan = zigzag_plan(bounds, cp_size)
    for rank in range(cp_size):
        rows = []
        for a, b in zip(bounds, bounds[1:]):
            parts = np.array_split(np.arange(a, b), 2 * cp_size)
            rows += [*parts[rank], *parts[-1 - rank]] if cp_size > 1 else list(range(a, b))
        assert plan.position_array(rank).tolist() == rows


def test_other_lengths_are_refused():
    with pytest.raises(ContractError, match="A document has 6 tokens"):
        zigzag_plan((0, 8, 14), 2)
    assert zigzag_plan((0, 8, 15), 1).total_tokens == 15


@pytest.mark.parametrize("seed", range(50))
def test_pads_are_in_no_slice(seed):
    rng = np.random.default_rng(seed)
    cp_size, is_causal = int(rng.integers(1, 4)), bool(rng.integers(2))
    sizes = 2 * cp_size * rng.integers(1, 6, int(rng.integers(1, 6)))
    lengths = rng.integers(0, sizes + 1)
    lengths[0] = sizes[0]
    bounds = tuple(np.concatenate([[0], sizes.cumsum()]).tolist())
    left, right = window = tuple(rng.integers(-1, 6, 2).tolist())
    plan = zigzag_plan(bounds, cp_size, is_causal, window, tuple(lengths.tolist()))
    row = np.arange(bounds[-1])
    document = np.repeat(np.arange(len(sizes)), sizes)
    offset = row - np.array(bounds)[document]
    is_real, back = offset < lengths[document], row[:, None] - row
    want = (document[:, None] == document) & is_real[:, None] & is_real
    want &= (back >= 0) if is_causal else (right == -1) | (back >= -right)
    want &= (left == -1) | (back <= left)
    assert np.array_equal(to_dense(plan.slices.array, bounds[-1], bounds[-1]), want), seed
    ends = np.array(bounds[:-1]) + lengths
    assert plan.cu_seqlens == tuple(np.unique([*bounds, *ends]).tolist())
    whole = zigzag_plan(bounds, cp_size, is_causal, window)
    assert all(np.array_equal(plan.position_array(r), whole.position_array(r)) for r in range(cp_size))


def test_odd_documents_are_refused():
    for bounds, lengths, words in (
        ((0, 8, 4), None, "bounds decreases from 8 to 4"),
        ((0, 0), None, "hold no token"),
        ((0, 8), (9,), "do not fit"),
        ((0, 8, 16), (8,), "do not fit"),
        ((0, 8), (-1,), "do not fit"),
    ):
        for cp_size in (1, 2):
            with pytest.raises(ContractError, match=words):
                zigzag_plan(bounds, cp_size, lengths=lengths)
    assert zigzag_plan((0, 8), 2, lengths=(0,)).total_tokens == 8


BOUNDS, WINDOW = (0, 24, 32, 64), (5, 0)


def attend_locally(rank: int, world: int, window: tuple[int, int] | None) -> torch.Tensor:
    """Rows of the output in their places, 0 elsewhere."""
    q, k, v = (torch.randn(64, 2, 8, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in range(3))
    plan = zigzag_plan(BOUNDS, world, True, window)
    rows = torch.from_numpy(plan.position_array(rank))
    out = torch.zeros(64, 2, 8, dtype=torch.float64)
    out[rows] = attend(q[rows], k[rows], v[rows], plan)[0]
    return out


@pytest.mark.parametrize("window", (None, WINDOW), ids=str)
def test_attention_over_ranks_is_that_of_one(window):
    want = attend_locally(0, 1, window)
    got = sum(run_processes(2, attend_locally, window, timeout_s=600))
    assert torch.allclose(got, want, atol=1e-12)
