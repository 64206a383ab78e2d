# SPDX-License-Identifier: Apache-2.0
"""Scores and top-k of the indexer, the Hopper kernels compiled for the CPU, against the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hopper_library import aligned
from index_on_cpu import IndexLibraryOnCpu

from magi_attention.errors import UnsupportedError
from magi_attention.kernels.indexer import Blocks, hopper
from magi_attention.kernels.indexer.topk import best_keys
from magi_attention.native.index.abi import FUNCTIONS
from magi_attention.testing.indexer import assert_best, random_bounds

SOURCE = Path(__file__).with_name("indexer_on_cpu.cpp")
# dtype, queries, keys, heads, columns, best keys
CASES = {
    "64 heads": (torch.bfloat16, 11, 300, 64, 128, 40),
    "many keys": (torch.float16, 5, 1500, 64, 64, 200),
    "32 heads": (torch.bfloat16, 19, 260, 32, 64, 17),
    "3 heads, 24 columns": (torch.float16, 9, 140, 3, 24, 140),
    "40 heads, 72 columns": (torch.bfloat16, 6, 129, 40, 72, 1),
}


@pytest.fixture(scope="module")
def library(compile_folder) -> IndexLibraryOnCpu:
    class Library(IndexLibraryOnCpu):
        def _bind(self) -> None:
            name = "magi_ffa_indexer_topk"
            self._library[name].restype, self._library[name].argtypes = FUNCTIONS[name]

    return Library(compile_folder / "indexer", SOURCE, ())


def run(library, q, k, weights, bounds, count):
    return hopper.best_keys(library, aligned(q), aligned(k), weights, bounds, count, 0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(2))
def test_the_best_keys(library, name, seed, monkeypatch):
    """Random scores, and whole numbers, of which many are equal; all queries at once and some at a time."""
    dtype, queries, keys, heads, dim, count = CASES[name]
    gen = torch.Generator().manual_seed(seed)
    bounds = random_bounds(gen, queries, keys)
    library.use(1 + seed, seed)
    if seed:
        monkeypatch.setattr(hopper, "SCORES_BYTES", 4 * 3 * (-(-keys // 128) * 128))
    q, k = (torch.randn(s, generator=gen).to(dtype) for s in ((queries, heads, dim), (keys, dim)))
    weights = torch.randn(queries, heads, generator=gen)
    k[(torch.arange(keys) < bounds[:, 0].min()) | (torch.arange(keys) >= bounds[:, 1].max())] = float("nan")
    assert_best(run(library, q, k, weights, bounds, count), q, k, weights, bounds, count)
    q, k = (torch.randint(-1, 2, x.shape, generator=gen).to(dtype) for x in (q, k))
    weights = torch.randint(-2, 3, weights.shape, generator=gen) / 2
    want = best_keys(q, k, weights, bounds, count, Blocks(64, 1024))
    assert torch.equal(run(library, q, k, weights, bounds, count), want)


def test_nan_and_infinite_scores(library):
    q, k = torch.ones(4, 32, 64, dtype=torch.bfloat16), torch.zeros(300, 64, dtype=torch.bfloat16)
    k[7], k[250], k[99], k[100] = float("nan"), float("inf"), 3, -1
    weights = torch.ones(4, 32)
    weights[1] = -1
    bounds = torch.tensor([[0, 300]] * 4)
    want = best_keys(q, k, weights, bounds, 5, Blocks(64, 1024))
    library.use(2, 1)
    assert torch.equal(run(library, q, k, weights, bounds, 5), want)


def test_a_query_gets_the_same_keys_wherever_it_is(library):
    """In a tile, and among keys that other queries bring in: its scores have the same bits."""
    gen = torch.Generator().manual_seed(3)
    q, k = torch.randn(13, 64, 128, generator=gen).bfloat16(), torch.randn(400, 128, generator=gen).bfloat16()
    weights, bounds = torch.randn(13, 64, generator=gen), random_bounds(gen, 13, 400)
    library.use(2, 3)
    whole = run(library, q, k, weights, bounds, 60)
    for begin, end in ((1, 13), (2, 3), (5, 12)):
        part = run(library, q[begin:end], k, weights[begin:end], bounds[begin:end], 60)
        assert torch.equal(part, whole[begin:end])


def test_a_rank_without_tokens(library):
    q, k = torch.zeros(0, 64, 128, dtype=torch.bfloat16), torch.zeros(9, 128, dtype=torch.bfloat16)
    bounds = torch.zeros(0, 2, dtype=torch.int64)
    assert run(library, q, k, torch.zeros(0, 64), bounds, 3).shape == (0, 3)


def test_queries_of_a_tile_that_see_keys_far_apart(library):
    """Whose blocks are in several spans, and some spans have none."""
    gen = torch.Generator().manual_seed(4)
    keys, bounds = 17_000, torch.tensor([[8000, 8500], [8150, 8400], [8300, 8301], [16_300, 16_900], [0, 100], [7, 7]])
    q, k = torch.randn(6, 2, 16, generator=gen).half(), torch.randn(keys, 16, generator=gen).half()
    weights = torch.randn(6, 2, generator=gen)
    for rows in (slice(0, 3), slice(3, 4), slice(4, 6)):
        library.use(3, 5)
        best = run(library, q[rows], k, weights[rows], bounds[rows], 90)
        assert_best(best, q[rows], k, weights[rows], bounds[rows], 90)


def test_what_it_does_not_take(library):
    q, k = torch.zeros(2, 65, 64, dtype=torch.bfloat16), torch.zeros(9, 64, dtype=torch.bfloat16)
    with pytest.raises((AssertionError, UnsupportedError), match="give 1 to 64 heads"):
        run(library, q, k, torch.zeros(2, 65), torch.zeros(2, 2, dtype=torch.int64), 3)
    assert hopper.library_for(q[:, :64], k, 3) is None, "on the CPU"
