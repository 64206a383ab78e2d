# SPDX-License-Identifier: Apache-2.0
"""What turns rest on, compiled for the CPU: when units are expected to start, against a heap; and in which order they
walk their blocks, against the model."""

from __future__ import annotations

import ctypes
import heapq
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from turns_model import BLOCKS_APART, Layer, walk

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("turns_on_cpu.cpp")
TICKS = 32  # kTicks
FORWARDS, EARLY, BACKWARDS = range(3)  # Way
BY_HEAD, TIMED, IN_WAVES, ALL_BACKWARDS, LATER_TURNS, APART = (1 << n for n in range(6))
NOT_SET = -7


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to compile csrc/ffa/sm90/bwd_starts.cuh for the CPU")
    path = tmp_path_factory.mktemp("turns") / "turns.so"
    command = [compiler, "-O1", "-std=c++17", "-fPIC", "-shared", "-pthread", "-Wall", "-Wno-unknown-pragmas"]
    done = subprocess.run(
        [*command, "-I", ROOT / "csrc", SOURCE, "-o", path], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(path))


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


def by_heap(costs, per_tile: int, places: int, late: int, ends_after: int, scale: int, sections: int) -> list[int]:
    """In the order of the list each unit begins at the place that is free first."""
    ends: list[int] = []
    starts = []
    for unit in range(sections * len(costs) * per_tile):
        rank = unit // per_tile % len(costs)
        start = heapq.heappop(ends) if len(ends) == places else rank * late
        heapq.heappush(ends, start + TICKS * int(costs[rank]) + ends_after)
        starts.append(start * scale)
    return starts


@pytest.mark.parametrize("seed", range(12))
def test_units_start_as_by_a_heap(starts_of, seed):
    rng = np.random.default_rng(seed)
    for _ in range(4):
        tiles, per_tile = int(rng.integers(1, 70)), int(rng.choice((1, 2, 3, 8, 16, 32)))
        places = int(rng.choice((1, 2, 31, 32, 33, 78, 132, 256)))
        late, ends_after, scale = (int(rng.choice((0, n))) for n in (20, 80, 1))
        costs = np.sort(rng.integers(0, rng.choice((2, 64, 4000)), tiles))[::-1]
        sections = 2 if tiles * per_tile >= places and rng.random() < 0.5 else 1
        sizes = (tiles, per_tile, places, late, ends_after, max(scale, 1), sections == 2)
        expected = by_heap(costs, per_tile, places, late, ends_after, max(scale, 1), sections)
        np.testing.assert_array_equal(starts_of(sizes, costs, len(expected)), expected, err_msg=f"{seed=} {sizes}")


def test_empty_tiles_and_a_scale(starts_of):
    """Units that take no time start one after the other at the same time, and by head times count for each."""
    costs = np.array([3, 3, 0, 0, 0])
    expected = by_heap(costs, 2, 3, 0, 0, 4, 1)
    assert expected[-1] == 3 * TICKS * 4 and 0 in expected
    np.testing.assert_array_equal(starts_of((5, 2, 3, 0, 0, 4, 0), costs, 10), expected)


@pytest.mark.parametrize("way", (FORWARDS, EARLY, BACKWARDS), ids=("forwards", "early", "backwards"))
def test_units_walk_as_the_model_does(library, way):
    """Each block once, and each has the place in the walk that turns count with; backwards from any block on."""
    for first, count in ((0, 1), (0, 7), (3, 1), (3, 2), (5, 40), (90, 33), (1000, 64)):
        blocks, places = (np.full(count, NOT_SET, dtype=np.int32) for _ in range(2))
        for shift in (0, 1, 3, count - 1, count, 2 * count + 1, 700) if way == BACKWARDS else (0,):
            assert library.walk_of(first, first + count, way, shift, at(blocks), at(places)) == count, shift
            backwards = {FORWARDS: 0, EARLY: min(first, count), BACKWARDS: count}[way]
            assert blocks.tolist() == walk(Layer(first, first + count, False), backwards, shift), shift
            assert places.tolist() == list(range(count)), shift


def test_units_begin_apart_as_in_the_model(library):
    costs, wave = [60, 60, 60, 60, 60, 50, 60, 40], 3
    shifts = lambda flags: [  # noqa: E731
        library.shift_of(at(np.array([flags, *costs], dtype=np.int32)), rank, wave) for rank in range(len(costs))
    ]
    assert shifts(TIMED | ALL_BACKWARDS) == [0] * len(costs)
    follow = [0, 1, 2, 0, 1, 0, 0, 0]  # as the first three; the sixth and the last are not as long as what they follow
    assert shifts(TIMED | ALL_BACKWARDS | APART) == [BLOCKS_APART * n for n in follow]


def test_which_way(library):
    assert [library.way_of(TIMED, late) for late in (0, 1)] == [EARLY, FORWARDS]
    assert [library.way_of(TIMED | LATER_TURNS, late) for late in (0, 1)] == [EARLY, FORWARDS]
    assert [library.way_of(IN_WAVES | BY_HEAD, late) for late in (0, 1)] == [FORWARDS] * 2
    assert [library.way_of(flags | ALL_BACKWARDS, 1) for flags in (TIMED, IN_WAVES)] == [BACKWARDS] * 2
    assert library.way_of(0, 0) == BACKWARDS, "by rank"
