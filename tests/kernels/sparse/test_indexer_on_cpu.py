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
from magi_attention.kernels.indexer.topk import best_blocks, best_keys
from magi_attention.native.index.abi import FUNCTIONS
from magi_attention.testing.indexer import assert_best, assert_best_blocks, random_bounds

SOURCE = Path(__file__).with_name("indexer_on_cpu.cpp")
# dtype, queries, keys, heads, columns, best keys
CASES = {
    "64 heads": (torch.bfloat16, 11, 300, 64, 128, 40),
    "many keys": (torch.float16, 5, 1500, 64, 64, 200),
    "32 heads": (torch.bfloat16, 19, 260, 32, 64, 17),
    "3 heads, 24 columns": (torch.float16, 9, 140, 3, 24, 140),
    "40 heads, 72 columns": (torch.bfloat16, 6, 129, 40, 72, 1),
}
# the same with whether heads have weights, best blocks, keys of each, and the last blocks that come first
BLOCK_CASES = {
    "MSA": (torch.bfloat16, 37, 700, 4, 128, False, 3, 64, 1),
    "a head more than a tile of few": (torch.float16, 9, 300, 9, 64, False, 4, 16, 0),
    "64 heads": (torch.bfloat16, 6, 400, 64, 72, False, 2, 40, 2),
    "weights": (torch.bfloat16, 11, 900, 64, 128, True, 2, 128, 1),
    "blocks of 7": (torch.float16, 21, 260, 5, 24, True, 9, 7, 3),
    "blocks of 1": (torch.bfloat16, 35, 150, 1, 64, False, 20, 1, 4),
    "one block holds all": (torch.bfloat16, 5, 140, 2, 64, False, 1, 5000, 1),
    "more than there are": (torch.float16, 7, 200, 8, 40, False, 30, 16, 30),
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


def run_blocks(library, q, k, weights, bounds, *rest):
    return hopper.best_blocks(library, aligned(q), aligned(k), weights, bounds, *rest, 0)


def spoil_unseen(k, bounds):
    number = torch.arange(len(k))
    k[~((number >= bounds[:, :1]) & (number < bounds[:, 1:])).any(0)] = float("nan")


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
    spoil_unseen(k, bounds)
    assert_best(run(library, q, k, weights, bounds, count), q, k, weights, bounds, count)
    q, k = (torch.randint(-1, 2, x.shape, generator=gen).to(dtype) for x in (q, k))
    weights = torch.randint(-2, 3, weights.shape, generator=gen) / 2
    want = best_keys(q, k, weights, bounds, count, Blocks(64, 1024))
    assert torch.equal(run(library, q, k, weights, bounds, count), want)


@pytest.mark.parametrize("name", BLOCK_CASES)
@pytest.mark.parametrize("seed", range(2))
def test_the_best_blocks(library, name, seed, monkeypatch):
    dtype, queries, keys, heads, dim, has_weights, *rest = BLOCK_CASES[name]
    gen = torch.Generator().manual_seed(seed)
    bounds = random_bounds(gen, queries, keys)
    library.use(1 + seed, seed)
    if seed:  # scores of five queries
        places = (1 if has_weights else heads) * (-(-keys // rest[1] // 4) * 4)
        monkeypatch.setattr(hopper, "SCORES_BYTES", 4 * 5 * places)
    q, k = (torch.randn(s, generator=gen).to(dtype) for s in ((queries, heads, dim), (keys, dim)))
    weights = torch.randn(queries, heads, generator=gen) if has_weights else None
    spoil_unseen(k, bounds)
    assert_best_blocks(run_blocks(library, q, k, weights, bounds, *rest), q, k, weights, bounds, *rest)
    q, k = (torch.randint(-1, 2, x.shape, generator=gen).to(dtype) for x in (q, k))
    weights = torch.randint(-2, 3, weights.shape, generator=gen) / 2 if has_weights else None
    clamped = bounds.clamp(0, keys)
    want = best_blocks(q, k, weights, clamped, *rest, Blocks(64, 1024))
    assert torch.equal(run_blocks(library, q, k, weights, bounds, *rest), want)


@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_random_problems_of_blocks(library, has_weights, seed, monkeypatch):
    """Tensors hold small whole numbers, so that many blocks are equal and the reference is exact."""
    print(f"seed {seed}")
    gen = torch.Generator().manual_seed(100 + seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=gen))

    queries, keys, heads, dim = draw(1, 45), draw(1, 600), draw(1, 12), 8 * draw(1, 16)
    size, count = (16, 64, 128, draw(1, 90))[seed], draw(1, 12)
    local, bounds = draw(0, count), random_bounds(gen, queries, keys)
    q, k = (torch.randint(-1, 2, s, generator=gen).bfloat16() for s in ((queries, heads, dim), (keys, dim)))
    weights = torch.randint(-2, 3, (queries, heads), generator=gen) / 2 if has_weights else None
    want = best_blocks(q.double(), k.double(), weights, bounds.clamp(0, keys), count, size, local, Blocks(7, 50))
    monkeypatch.setattr(hopper, "SCORES_BYTES", 1 << draw(10, 20))
    library.use(draw(1, 4), seed)
    assert torch.equal(run_blocks(library, q, k, weights, bounds, count, size, local), want)


@pytest.mark.parametrize("has_weights", [False, True])
def test_keys_beside_those_of_a_query_do_not_count(library, has_weights):
    """Were one of them in a block, its NaN would bring the block in."""
    gen = torch.Generator().manual_seed(8)
    library.use(2, 8)
    for low, high in ((37, 161), (5, 250), (128, 256), (100, 101)):
        q, k = torch.ones(3, 5, 8, dtype=torch.float16), torch.rand(300, 8, generator=gen).half()
        k[low : low + 2] = k[max(high - 3, low) : high] = -1  # the last block has the worst keys
        bounds, weights = torch.tensor([[low, high]] * 3), torch.ones(3, 5) if has_weights else None
        spoil_unseen(k, bounds)
        for rest in ((2, 16, 0), (3, 9, 0), (1, 1, 0)):
            want = best_blocks(q, k, weights, bounds, *rest, Blocks(64, 1024))
            assert torch.equal(run_blocks(library, q, k, weights, bounds, *rest), want), (low, high, rest)


@pytest.mark.parametrize("has_weights", [False, True])
def test_nan_and_infinite_scores_of_blocks(library, has_weights):
    q, k = torch.ones(3, 5, 64, dtype=torch.bfloat16), torch.zeros(400, 64, dtype=torch.bfloat16)
    k[70], k[250], k[99], k[390], k[330:350] = float("nan"), float("inf"), 3, float("nan"), -float("inf")
    q[1] = -1
    weights, bounds = torch.ones(3, 5) if has_weights else None, torch.tensor([[0, 400], [3, 380], [230, 400]])
    library.use(2, 1)
    for rest in ((4, 16, 0), (4, 16, 2), (40, 16, 1), (1, 1, 0)):
        want = best_blocks(q, k, weights, bounds, *rest, Blocks(64, 1024))
        assert torch.equal(run_blocks(library, q, k, weights, bounds, *rest), want), rest


def test_nan_and_infinite_scores(library):
    q, k = torch.ones(4, 32, 64, dtype=torch.bfloat16), torch.zeros(300, 64, dtype=torch.bfloat16)
    k[7], k[250], k[99], k[100] = float("nan"), float("inf"), 3, -1
    weights = torch.ones(4, 32)
    weights[1] = -1
    bounds = torch.tensor([[0, 300]] * 4)
    library.use(2, 1)
    for heads in (32, 3, 10):  # fewer are padded in a tile
        want = best_keys(q[:, :heads], k, weights[:, :heads], bounds, 5, Blocks(64, 1024))
        assert torch.equal(run(library, q[:, :heads], k, weights[:, :heads], bounds, 5), want), heads


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
    whole = run_blocks(library, q[:, :3], k, None, bounds, 5, 16, 1)
    for begin, end in ((1, 13), (2, 3), (5, 12)):
        part = run_blocks(library, q[begin:end, :3], k, None, bounds[begin:end], 5, 16, 1)
        assert torch.equal(part, whole[begin:end])


def test_a_rank_without_tokens(library):
    q, k = torch.zeros(0, 64, 128, dtype=torch.bfloat16), torch.zeros(9, 128, dtype=torch.bfloat16)
    bounds = torch.zeros(0, 2, dtype=torch.int64)
    assert run(library, q, k, torch.zeros(0, 64), bounds, 3).shape == (0, 3)
    assert run_blocks(library, q, k, None, bounds, 3, 16, 0).shape == (0, 64, 3)


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
        for w, rest in ((None, (6, 64, 1)), (None, (1, 400, 0)), (weights[rows], (1, 8300, 0))):
            best = run_blocks(library, q[rows], k, w, bounds[rows], *rest)
            assert_best_blocks(best, q[rows], k, w, bounds[rows], *rest)


def test_a_block_that_reaches_over_work_items(library):
    """More keys than an item has, its best key in each of them in turn."""
    library.use(2, 9)
    q, k = torch.ones(3, 2, 8, dtype=torch.bfloat16), torch.zeros(18_000, 8, dtype=torch.bfloat16)
    bounds, rest = torch.tensor([[3, 18_000]] * 3), (1, 8600, 0)  # two blocks and a rest
    for key in (3, 8192, 8602, 8603, 17_203):
        k.zero_()
        k[key] = 1
        for weights in (None, torch.ones(3, 2)):
            best = run_blocks(library, q, k, weights, bounds, *rest)
            assert (best == (key - 3) // 8600).all(), key


def test_what_it_does_not_take(library):
    q, k = torch.zeros(2, 65, 64, dtype=torch.bfloat16), torch.zeros(9, 64, dtype=torch.bfloat16)
    with pytest.raises((AssertionError, UnsupportedError), match="give 1 to 64 heads"):
        run(library, q, k, torch.zeros(2, 65), torch.zeros(2, 2, dtype=torch.int64), 3)
    bounds = torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises((AssertionError, UnsupportedError), match="the last 4 of the 3 best ones"):
        run_blocks(library, q[:, :64], k, None, bounds, 3, 16, 4)
    assert hopper.library_for(q[:, :64], k, 3) is None, "on the CPU"
