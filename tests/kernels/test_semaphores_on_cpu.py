# SPDX-License-Identifier: Apache-2.0
"""What semaphore targets rest on, compiled for the CPU: when work tiles are expected to start, against a heap; the
order in which they traverse their blocks; and what the last kernel takes up."""

from __future__ import annotations

import ctypes
import heapq
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from magi_attention.testing.libraries import compiled_or_skip, csrc_or_skip

SOURCE = Path(__file__).with_name("semaphores_on_cpu.cpp")
ASCENDING, WRAP, DESCENDING = range(3)  # Traversal
NOT_SET = -7
TICKS = 32  # of expected time: one block


@pytest.fixture(scope="module")
def library(compile_folder):
    flags = ("-O1", "-pthread", "-Wno-unknown-pragmas")
    folders = [csrc_or_skip(), csrc_or_skip() / "include"]
    return compiled_or_skip(compile_folder / "semaphores", [SOURCE], folders, *flags)


def at(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.fixture(scope="module")
def starts_of(library):
    def call(sizes: tuple[int, ...], costs: np.ndarray, count: int) -> np.ndarray:
        words, found = np.array(sizes, dtype=np.int32), np.full(count, NOT_SET, dtype=np.int32)
        costs = np.ascontiguousarray(costs, dtype=np.int32)
        library.starts_of(at(words), at(costs), at(found))
        return found

    return call


def simulated_starts(
    costs: Sequence[int], kinds: int, ctas: int, late: int, ends_after: int, scale: int = 1, l2_groups: int = 1,
    split: tuple[int, int, int] = (0, 0, 1),
) -> list[int]:  # fmt: skip
    """When each work tile begins, of ``kinds`` for each tile: in the order of the list at the CTA that ends first.

    Work tiles of the tiles from ``split[0]`` to before ``split[1]`` are ``split[2]`` parts each, and there is a start
    for each part of all work tiles.
    """
    ends: list[int] = []
    starts = []
    for _, order_idx, _ in product(range(l2_groups), range(len(costs)), range(kinds)):
        parts = split[2] if split[0] <= order_idx < split[1] else 1
        for _ in range(parts):
            start = heapq.heappop(ends) if len(ends) == ctas else order_idx * late
            heapq.heappush(ends, start + TICKS * int(costs[order_idx]) // parts + ends_after)
            starts += [start * scale] * (split[2] // parts)
    return starts


@pytest.mark.parametrize("seed", range(12))
def test_work_tiles_start_as_by_a_heap(starts_of, seed):
    rng = np.random.default_rng(seed)
    for _ in range(4):
        tiles, per_tile = int(rng.integers(1, 70)), int(rng.choice((1, 2, 3, 8, 16, 32)))
        num_ctas = int(rng.choice((1, 2, 31, 32, 33, 78, 132, 256)))
        late, ends_after, scale = (int(rng.choice((0, n))) for n in (20, 80, 1))
        costs = np.sort(rng.integers(0, rng.choice((2, 64, 4000)), tiles))[::-1]
        l2_groups = 2 if tiles * per_tile >= num_ctas and rng.random() < 0.5 else 1
        split = (0, 0, 1)
        if l2_groups == 1 and rng.random() < 0.6:
            split = (*sorted(rng.integers(0, tiles + 1, 2).tolist()), int(rng.choice((2, 4, 8))))
        kinds = per_tile * split[2]
        sizes = (tiles, kinds, *split, num_ctas, late, ends_after, max(scale, 1), l2_groups == 2)
        expected = simulated_starts(costs, per_tile, num_ctas, late, ends_after, max(scale, 1), l2_groups, split)
        np.testing.assert_array_equal(starts_of(sizes, costs, len(expected)), expected, err_msg=f"{seed=} {sizes}")


def test_empty_tiles_and_a_scale(starts_of):
    """Work tiles that take no time start one after the other at the same time. Head by head, times are multiplied."""
    costs = np.array([3, 3, 0, 0, 0])
    expected = simulated_starts(costs, 2, 3, 0, 0, 4, 1)
    assert expected[-1] == 3 * TICKS * 4 and 0 in expected
    np.testing.assert_array_equal(starts_of((5, 2, 0, 0, 1, 3, 0, 0, 4, 0), costs, 10), expected)


@pytest.mark.parametrize("traversal", (ASCENDING, WRAP, DESCENDING), ids=("ascending", "wrap", "descending"))
def test_each_block_is_traversed_once(library, traversal):
    """And has the place in the traversal that semaphore targets count with; descending from any block on, and round."""
    for first, count in ((0, 1), (0, 7), (3, 1), (3, 2), (5, 40), (90, 33), (1000, 64)):
        blocks, places = (np.full(count, NOT_SET, dtype=np.int32) for _ in range(2))
        for shift in (0, 1, 3, count - 1, count, 2 * count + 1, 700) if traversal == DESCENDING else (0,):
            assert library.traverse(first, first + count, traversal, shift, at(blocks), at(places)) == count, shift
            assert sorted(blocks.tolist()) == list(range(first, first + count)), shift
            assert places.tolist() == list(range(count)), shift
            if traversal == DESCENDING:
                assert blocks[0] == first + count - 1 - shift % count
                assert set(np.diff(blocks).tolist()) <= {-1, count - 1}
            else:
                back = min(first, count) if traversal == WRAP else 0
                assert (np.diff(blocks[:back]) == -1).all() and (np.diff(blocks[back:]) == 1).all()


def test_the_last_kernel_takes_up_all(library):
    """Each 64 columns of each head of each block once, one L2 group after the other, and in each by block; then
    nothing."""
    cases = (7, 2, 40, 16, 2), (3, 1, 120, 44, 1), (1, 1, 1, 1, 4), (5, 8, 4, 4, 2)
    for blocks, group, heads_kv, heads_per_l2_group, dims in cases:
        heads = group * heads_kv
        wanted = [
            (order_idx, head, d)
            for first in range(0, heads, heads_per_l2_group * group)
            for order_idx in range(blocks)
            for head in range(first, min(first + heads_per_l2_group * group, heads))
            for d in range(dims)
        ]
        sizes = np.array([blocks, heads, heads_kv, heads_per_l2_group, dims], dtype=np.int32)
        found = np.full((len(wanted) + 5000, 3), NOT_SET, dtype=np.int32)
        library.items_of(at(sizes), len(found), at(found))
        assert found[: len(wanted)].tolist() == [list(x) for x in wanted]
        assert (found[len(wanted) :, 0] == -1).all(), "a smaller last L2 group ends where its heads do"
