# SPDX-License-Identifier: Apache-2.0
"""What semaphore targets rest on, compiled for the CPU: when work tiles are expected to start, against a heap; in which
order they traverse their blocks, against the model; and what the last kernel takes up."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from semaphore_model import (
    BLOCKS_APART,
    END_HALVES,
    MOST_KEPT,
    OF_DIM,
    TICKS,
    Schedule,
    Segment,
    begins_apart,
    descending,
    expected_starts,
    mode_of,
    simulated_starts,
)

from magi_attention.testing.libraries import compiled_or_skip, csrc_or_skip

SOURCE = Path(__file__).with_name("semaphores_on_cpu.cpp")
ASCENDING, WRAP, DESCENDING = range(3)  # Traversal
BY_HEAD, TIMED, IN_WAVES, ALL_DESCENDING, LATER_TARGETS, APART = (1 << n for n in range(6))
NOT_SET = -7


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
def test_work_tiles_traverse_as_in_the_model(library, traversal):
    """Each block once, and each has the place in the traversal that semaphore targets count with; descending from
    any block on."""
    for first, count in ((0, 1), (0, 7), (3, 1), (3, 2), (5, 40), (90, 33), (1000, 64)):
        blocks, places = (np.full(count, NOT_SET, dtype=np.int32) for _ in range(2))
        for shift in (0, 1, 3, count - 1, count, 2 * count + 1, 700) if traversal == DESCENDING else (0,):
            assert library.traverse(first, first + count, traversal, shift, at(blocks), at(places)) == count, shift
            descending_blocks = {ASCENDING: 0, WRAP: min(first, count), DESCENDING: count}[traversal]
            assert blocks.tolist() == descending(Segment(first, first + count, False), descending_blocks, shift), shift
            assert places.tolist() == list(range(count)), shift


def test_work_tiles_begin_apart_as_in_the_model(library):
    costs, wave = [60, 60, 60, 60, 60, 50, 60, 40], 3

    def shifts(flags: int) -> list[int]:
        order = np.array([flags, *costs], dtype=np.int32)
        return [library.shift_of(at(order), order_idx, wave) for order_idx in range(len(costs))]

    assert shifts(TIMED | ALL_DESCENDING) == [0] * len(costs)
    follow = [0, 1, 2, 0, 1, 0, 0, 0]  # as the first three; the sixth and the last are not as long as what they follow
    assert shifts(TIMED | ALL_DESCENDING | APART) == [BLOCKS_APART * n for n in follow]


def test_which_traversal(library):
    assert [library.traversal_of(TIMED, late) for late in (0, 1)] == [WRAP, ASCENDING]
    assert [library.traversal_of(TIMED | LATER_TARGETS, late) for late in (0, 1)] == [WRAP, ASCENDING]
    assert [library.traversal_of(IN_WAVES | BY_HEAD, late) for late in (0, 1)] == [ASCENDING] * 2
    assert [library.traversal_of(flags | ALL_DESCENDING, 1) for flags in (TIMED, IN_WAVES)] == [DESCENDING] * 2
    assert library.traversal_of(0, 0) == DESCENDING, "by tile"


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


@pytest.mark.parametrize("seed", range(4))
def test_the_order_is_that_of_the_model(library, seed):
    """In semaphore order: flags of random sizes, and the starts that follow from them."""
    rng, met = np.random.default_rng(seed), set()
    for _ in range(200):
        kinds, heads, l2_groups = (int(rng.choice(n)) for n in ((1, 2, 4, 8, 16, 40), (1, 2, 4, 5, 8), (1, 1, 3)))
        tiles, ctas = int(rng.choice((1, 30, 64, 1100))), int(rng.choice((132, 78, 8)))
        if l2_groups > 1 and tiles * kinds < ctas:
            continue
        bands, twice = int(rng.choice((0, 0, 1, tiles // 2, tiles))), rng.random() < 0.1
        end, dims = int(rng.integers(1, 9)), int(rng.choice((1, 2, 4)))
        segments = [[Segment(0, end, order_idx < bands)] * (2 if twice else 1) for order_idx in range(tiles)]
        heads_q, total_q = kinds * l2_groups * heads, int(rng.choice((80, 4096, 20000)))
        traversed = 8 * 64 * dims * heads_q * total_q / MOST_KEPT
        schedule = Schedule(
            ctas, kinds, heads, l2_groups=l2_groups, last_kinds=kinds, traversed=traversed, **OF_DIM[64 * dims]
        )
        tables = 2 if l2_groups > 1 and tiles <= schedule.most_timed else 1
        total, wave = kinds * l2_groups, schedule.wave
        words = (total_q, tiles, heads_q, total, heads, kinds, kinds, wave, ctas, tables, dims, 0)
        sizes = np.array(words, dtype=np.int32)
        model = np.full(4, NOT_SET, dtype=np.int32)
        segments_of_all = (bands * (1 + twice), (tiles - bands) * (1 + twice))
        flags = library.flags_of(at(sizes), *segments_of_all, int(twice), at(model))
        by_head, mode = mode_of(segments, schedule)
        is_one_way = schedule.is_one_way and not by_head and mode != "tiles"
        has_second = len(expected_starts(segments, mode, by_head, schedule)) == 2
        expected = {BY_HEAD: by_head, TIMED: mode == "timed", IN_WAVES: mode == "waves", ALL_DESCENDING: is_one_way}
        expected |= {LATER_TARGETS: has_second, APART: begins_apart(segments, mode, schedule)}
        assert flags == sum(flag for flag, is_set in expected.items() if is_set), (sizes, bands, twice)
        halves = 0 if by_head or is_one_way else schedule.late_halves
        has_end = not (by_head or is_one_way) or expected[APART]
        ticks = [TICKS * n // (2 * heads) for n in (halves, END_HALVES if has_end else 0)]
        assert model.tolist() == [*ticks, heads if by_head else 1, has_second], (sizes, bands, twice)
        met.add(flags)
    assert len(met) >= 7, met


def test_no_more_begins_apart_than_was_timed(library):
    """64 MB of Q, dO and dq: 16 heads of 4K at head dim 128; half of that with two heads in a work tile of head dim
    64."""

    def found(total: int, heads: tuple[int, int], dims: int, bands: int = 0) -> int:
        q, kv = heads
        sizes = np.array([total, 33, q, kv, q // kv, kv, kv, 8, 132, 1, dims, 0], dtype=np.int32)
        return library.flags_of(at(sizes), bands, 33 - bands, 0, at(np.zeros(4, dtype=np.int32)))

    apart, together = TIMED | ALL_DESCENDING | APART, TIMED | ALL_DESCENDING
    assert [found(n, (16, 16), 2) for n in (4096, 4097)] == [apart, together]
    assert [found(n, (16, 8), 1) for n in (4096, 4097)] == [apart, together]
    assert found(1000, (16, 8), 2) == TIMED, "two heads of head dim 128 run in both directions, with so few tiles"
    assert found(1000, (16, 16), 2, bands=1) == together, "bands are apart anyway"


def test_few_heads_descend_however_few_tiles(library):
    """If L2 keeps what they traverse: up to four of head dim 64, one of 128, none of 256."""

    def is_one_way(heads: int, dims: int, total: int = 1000) -> bool:
        sizes = np.array([total, 8, 32 * heads, 32, heads, 32, 32, 4, 132, 1, dims, 0], dtype=np.int32)
        return bool(library.flags_of(at(sizes), 0, 8, 0, at(np.zeros(4, dtype=np.int32))) & ALL_DESCENDING)

    assert [heads for heads in (1, 2, 4, 5) if is_one_way(heads, 1)] == [1, 2, 4]
    assert [[heads for heads in (1, 2) if is_one_way(heads, dims)] for dims in (2, 4)] == [[1], []]
    assert is_one_way(4, 1, 1024) and not is_one_way(4, 1, 1025)


def test_the_first_writer_takes_bands_head_by_head(library):
    """Also where one head is all: ascending, as it was timed; in semaphore order such bands have expected times."""
    for first_writer, flags in ((1, BY_HEAD | IN_WAVES), (0, TIMED | ALL_DESCENDING)):
        sizes = np.array([4096, 32, 16, 16, 1, 16, 16, 8, 132, 1, 2, first_writer], dtype=np.int32)
        assert library.flags_of(at(sizes), 17, 16, 0, at(np.zeros(4, dtype=np.int32))) == flags
