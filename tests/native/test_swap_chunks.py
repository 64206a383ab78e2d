# SPDX-License-Identifier: Apache-2.0
"""Dispatch by the planner library gives what it gives without one: ranks may differ in whether they have it."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest

from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.meta.solver import locality
from magi_attention.meta.solver.locality import improve
from magi_attention.native.planner import swap_chunks

pytestmark = pytest.mark.usefixtures("planner")


def drawn(seed: int) -> tuple[list[list[int]], list[int], list[int], float]:
    """Parts of any size, areas, masks and what a chunk costs."""
    draw = random.Random(seed)
    world = draw.choice((2, 3, 4, 8, 16))
    count = draw.randint(world, 12 * world)
    chunks = draw.sample(range(count), count)
    ends = [0, *sorted(draw.sample(range(1, count), world - 1)), count]
    areas = [draw.randint(0, 10 ** draw.randint(1, 11)) for _ in range(count)]
    masks = [draw.getrandbits(count) & draw.getrandbits(count) for _ in range(count)]
    return [chunks[a:b] for a, b in zip(ends, ends[1:])], areas, masks, draw.choice((0.0, 1.0, 19200.0, 1e9))


def without_library(monkeypatch) -> None:
    def absent(*_):
        raise UnsupportedError("libmagi_planner.so is not built.")

    monkeypatch.setattr(locality, "swap_chunks", absent)


@pytest.mark.parametrize("batch", range(6))
def test_the_same_partition_and_energy_without_the_library(batch, monkeypatch, caplog):
    cases = [(drawn(seed), steps) for seed in range(8 * batch, 8 * batch + 8) for steps in (0, 1, 700)]
    with_it = [improve(*case, steps=steps) for case, steps in cases]
    without_library(monkeypatch)
    locality._say_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="magi_attention.meta"):
        for ((parts, *rest), steps), want in zip(cases, with_it):
            assert improve(parts, *rest, steps=steps) == want, (parts, rest, steps)
            assert [len(part) for part in want[1]] == [len(part) for part in parts]
            assert sorted(c for part in want[1] for c in part) == sorted(c for part in parts for c in part)
    assert [r.message for r in caplog.records if "is not built" in r.message] == [caplog.records[0].message]


def test_something_is_improved():
    better = 0
    for seed in range(10):
        parts, areas, masks, cost = drawn(seed)
        assert improve(parts, areas, masks, cost)[0] <= improve(parts, areas, masks, cost, steps=0)[0]
        better += improve(parts, areas, masks, cost)[0] < improve(parts, areas, masks, cost, steps=0)[0]
    assert better > 5


@pytest.mark.parametrize(
    "parts, proposal, sentence",
    [
        ([[0, 1], [2, 7]], (0, 0, 1, 0), "Chunk 7 is none of the 4"),
        ([[0, 1], [2, 3]], (0, 2, 1, 0), "Step 0 swaps place 2 of rank 0"),
        ([[0, 1], [2, 3]], (0, 0, 2, 0), "Step 0 swaps place 0 of rank 2"),
        ([[0, 1], [2, 3]], (1, 0, 1, 1), "chunks of rank 1 with itself"),
        ([[0, 1], [2, 3]], (-1, 0, 1, 1), "of rank -1"),
    ],
)
def test_what_there_is_not_is_refused(parts, proposal, sentence):
    with pytest.raises(ContractError, match=sentence):
        swap_chunks(parts, [1] * 4, [15] * 4, 1.0, 0.7, 2.0, np.array([proposal], dtype=np.int32), np.zeros(1))
