# SPDX-License-Identifier: Apache-2.0
"""The walker of tile plans finds every kind of broken plan; test_tile_plan.py shows it accept good ones."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from magi_attention.common.slices import CAUSAL, FULL, to_dense
from magi_attention.testing import masks

sys.path.insert(0, str(Path(__file__).parent))
import tile_lib as lib  # noqa: E402


# What no change of a single word makes.
def corrupt_swap_rows(rng, view):
    record, r = random_interval(rng, view)
    pairs = view.pairs(record)
    other = np.flatnonzero((pairs != pairs[r]).any(axis=1))
    if not len(other):
        return False
    s = rng.choice(other)
    pairs[[r, s]] = pairs[[s, r]]


def corrupt_order_swap(rng, view):
    if len(view.order) < 2:
        return False
    a, b = rng.choice(len(view.order), size=2, replace=False)
    view.order[[a, b]] = view.order[[b, a]]


def corrupt_layer_begin(rng, view):
    """One tile walks the record of another one, where the two differ."""
    used = np.flatnonzero(view.tiles["num_segments"] == 1)
    a, b = rng.choice(used, size=2) if len(used) else (0, 0)
    begin = view.tiles["segment_begin"]
    same = np.array_equal(view.pairs(begin[a]), view.pairs(begin[b])) if len(used) else True
    if same:
        return False
    begin[[a, b]] = begin[[b, a]]


CORRUPTIONS = {name: value for name, value in globals().items() if name.startswith("corrupt_")}


def random_interval(rng, view) -> tuple[int, int]:
    record = int(rng.integers(len(view.records)))
    pairs = view.pairs(record)
    return record, int(rng.choice(np.flatnonzero(pairs[:, 0] < pairs[:, 1])))


@pytest.mark.parametrize("name", sorted(CORRUPTIONS))
def test_walker_finds(name):
    tried = 0
    for seed in range(300):
        rng, slices, total_q, total_k = lib.random_case(seed)
        tile_tokens, groups = lib.SHAPES[int(rng.integers(len(lib.SHAPES)))]
        plan = lib.make_plan(slices, total_q, total_k, tile_tokens, groups)
        before, view = plan.copy(), lib.View(plan)
        if not len(view.records) or CORRUPTIONS[name](rng, view) is False:
            continue
        assert not np.array_equal(before, plan), f"seed {seed}"
        status, sentence = lib.check_plan(slices, plan)
        assert status == lib.INVALID_ARGUMENT and sentence.endswith("."), f"seed {seed}: {name} went unseen"
        tried += 1
    assert tried >= 30, f"only {tried} plans could be corrupted"


def is_idle(view, at: int, by: int) -> bool:
    """Whether the word is no part of the plan, or is of an empty range that stays empty, or of a shape that may suit,
    too: a small plan may have more keys, and longer tiles."""
    h = view.header[0]
    if at < 28:
        return at < 16 and lib.HEADER.names[at] in ("total_k", "tile_tokens", "num_groups")
    if h["words_tiles"] <= at < h["words_tiles"] + 8 * h["num_tiles"]:
        tile, word = divmod(at - int(h["words_tiles"]), 8)
        return word == 2 and view.tiles["num_segments"][tile] == 0
    if at < h["words_records"]:
        return not h["words_order"] <= at < h["words_order"] + h["num_tiles"]
    word = (at - int(h["words_records"])) % int(h["segment_words"])
    if not (8 <= word < 20 or 32 <= word):
        return False
    if word < 20 and ((word - 8) % 4, by) in ((0, -1), (1, 1), (2, 1), (3, -1)):
        return True  # more is visited, or less is called full: slower, and right
    was = view.plan[at - word % 2 :][:2].astype(np.int64)
    now = was + np.eye(2, dtype=np.int64)[word % 2] * by
    return word >= 32 + 2 * view.tile_tokens or (was[0] >= was[1] and max(now[0], 0) >= now[1])


def test_walker_finds_any_word_that_is_off_by_one():
    tried = 0
    for seed in range(40):
        rng, slices, total_q, total_k = lib.random_case(seed, most_tokens=60, most_slices=8)
        shape = lib.SHAPES[int(rng.integers(len(lib.SHAPES)))]
        plan = lib.make_plan(slices, total_q, total_k, *shape)
        view = lib.View(plan)
        changes = [(at, by) for at in range(len(plan)) for by in (-1, 1) if not is_idle(view, at, by)]
        for at, by in changes:
            plan[at] += by
            status, sentence = lib.check_plan(slices, plan)
            plan[at] -= by
            note = f"seed {seed}: word {at} of {shape} by {by}"
            assert status == lib.INVALID_ARGUMENT and sentence.endswith("."), note
        tried += len(changes)
    assert tried > 10_000


def test_walker_survives_random_words():
    """Whatever a word says, the walker stays inside the buffer; and most changes are faults."""
    caught = 0
    for seed in range(600):
        rng, slices, total_q, total_k = lib.random_case(seed, most_tokens=100)
        plan = lib.make_plan(slices, total_q, total_k, 8, 2)
        fixed = plan.size - 8 * len(lib.View(plan).records)
        at = int(rng.integers(16 if seed % 2 else fixed))
        plan[at] = rng.choice([-(2**31), 2**31 - 1, -1, 0, 1, 4, 100, plan.size, int(plan[at]) + 4])
        caught += lib.check_plan(slices, plan)[0] != lib.OK
    assert caught > 300


@pytest.mark.parametrize("seed", range(20))
def test_walker_wants_the_plan_of_these_slices(seed):
    rng, slices, total_q, total_k = lib.random_case(seed, most_tokens=60, most_slices=6)
    other = masks.random_slices(rng, total_q, total_k, max_slices=6)
    same = np.array_equal(to_dense(slices, total_q, total_k), to_dense(other, total_q, total_k))
    status, _ = lib.check_plan(other, lib.make_plan(slices, total_q, total_k, 8, 1))
    assert (status == lib.OK) == same


@pytest.mark.parametrize("name", ["total_q", "total_k", "tile_tokens", "num_groups"])
@pytest.mark.parametrize("change", [-1, 1])
def test_walker_finds_another_shape(name, change):
    plan = lib.make_plan(masks.causal(47), 47, 47, 17, 2)
    lib.View(plan).header[name] += change
    assert lib.check_plan(masks.causal(47), plan)[0] == lib.INVALID_ARGUMENT


def test_walker_finds_a_shared_record():
    """Two tiles with equal intervals and one record for both: pairs are right, but a record is left over."""
    plan = lib.make_plan(masks.full(32), 32, 32, 16, 1)
    lib.View(plan).tiles["segment_begin"][1] = 0
    assert lib.check_plan(masks.full(32), plan)[1].startswith("Tile 1 uses record 0, which another tile uses")


def test_walker_names_the_pair():
    slices = np.array([[0, 10, 0, 10, CAUSAL]])
    plan = lib.make_plan(slices, 10, 10, 16, 1)
    lib.View(plan).pairs(0)[4, 1] -= 1
    assert lib.check_plan(slices, plan)[1].startswith("Query 4 must see key 4 (slice 0)")
    plan = lib.make_plan(slices, 10, 10, 16, 1)
    lib.View(plan).pairs(0)[4, 1] += 1
    assert lib.check_plan(slices, plan)[1].startswith("Query 4 must not see key 5")
    twice = np.array([[0, 10, 0, 10, FULL], [9, 12, 9, 10, FULL]])
    plan = lib.make_plan(twice, 12, 10, 16, 1)
    assert lib.check_plan(twice, plan)[1].startswith("Slices 0 and 1 both allow query 9 and key 9")
    assert "in segments 0 and 1 of tile 0" in lib.check_plan(twice[:1], plan)[1]
