# SPDX-License-Identifier: Apache-2.0
"""Lists of units of short documents: each has every tile once, for all heads, whichever tiles are split."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from list_model import MIDDLE, PARTS, Problem, Tile, Unit, UnitList, choose, documents, list_of

from magi_attention.testing.libraries import csrc_or_skip


def test_the_constants_are_those_of_the_kernel():
    folder = csrc_or_skip() / "ffa" / "sm90"
    config, *lists = ((folder / name).read_text() for name in ("bwd_config.h", "bwd_ways_choice.cuh", "bwd_ways.cuh"))
    text = "".join(lists)
    assert f"kSplitParts = {PARTS};" in config
    for line in (
        "kStepTime = 8, kMaskedStepTime = 9;", "kUnitTime = 21;", "kSlotTime = 1;", "kLooked = 8;",
        "kShortest = 2;", "kBlockTime = 4, kLongTime = 1 << 24;", "kFewParts = 4;",
        "kWhole = 0, kLongestByHeads = 3, kShorterHalf = 7,",
        "kCutFilled = 8, kMiddleHalf = 9, kSecondQuarter = 10, kMiddle = 11 }",
        "n * (way == kMiddleHalf ? 7 : way == kSecondQuarter ? 4 : 6) / 16;",
        "n * (way == kMiddleHalf ? 8 : way == kSecondQuarter ? 4 : 6) / 16;",
        "(i < kLongestByHeads ? 1.02f : way == kShorterHalf ? 1.06f : 1.2f)",
        "kWorth = kQueries == kQueryBlock ? 1.06f : 1.04f;",
        "(tried(i) == kCutFilled ? 1.02f : tried(i) == kMiddleHalf ? 1.f : 1.01f)",
    ):  # fmt: skip
        assert line in text, line
    assert "return processors < 8 ? 1 : processors / 8;" in config


def random_problem(rng: np.random.Generator) -> Problem:
    heads = int(rng.integers(1, 45))
    tiles = []
    for _ in range(int(rng.integers(1, 395 // heads + 1))):
        first, count = int(rng.integers(0, 30)), int(rng.integers(0, 40))
        cut = first + int(rng.integers(1, count)) if count > 1 and rng.random() < 0.4 else 0
        tiles.append(Tile(first, first + count, cut, int(rng.integers(8, 10)) * count * 4))
    return Problem(sorted(tiles, key=lambda t: -t.time), heads, 4, int(rng.integers(1, 70)))


def check(found: UnitList) -> None:
    """Every tile and kv head once, whole or in all its parts; parts of a slot are of the same; no slot is left out."""
    p, units = found.p, [found.unit(i) for i in range(len(found))]
    wanted = Counter((tile, head) for tile in range(len(p.tiles)) for head in range(p.heads))
    assert Counter((u.tile, u.head) for u in units if not u.slot or u.part == 0) == wanted
    split: dict[int, set] = {}
    for u in units:
        if u.slot:
            split.setdefault(u.slot, set()).add((u.tile, u.head, u.part))
    assert sorted(split) == list(range(1, found.splits * p.heads + 1))
    for of_slot in split.values():
        ((tile, _),) = {(tile, head) for tile, head, _ in of_slot}
        assert sorted(part for *_, part in of_slot) == list(range(2 if tile in found.cut else PARTS))
    check_order(found, units)


def check_order(found: UnitList, units: list[Unit]) -> None:
    """The longest first, but for parts; of those that take as long all tiles of a head, and then those of the next."""
    rows = found.rows()
    assert Counter(rows) == Counter(units)
    assert [u.time for u in rows] == [u.time for u in units]  # so what was simulated holds for what is listed
    times = [u.time for u in rows if not u.slot or u.tile in found.cut]
    assert times == sorted(times, reverse=True)
    whole = [u for u in rows if not u.slot]
    assert whole == sorted(whole, key=lambda u: (-u.time, u.head, u.tile))


def test_every_list_has_every_tile_once():
    for seed in range(150):
        print("seed", seed)
        p = random_problem(np.random.default_rng(seed))
        for way in range(MIDDLE + 1):
            check(list_of(p, way))
        check(choose(p))


# As in tests/gpu/test_ffa_backward_split.py, where the kernel is asked, and two of benchmarks/masks.py, where it was.
@pytest.mark.parametrize(
    "lengths, is_causal, heads, group, tiles, units",
    [
        ((789, 92, 725, 268, 174), False, 16, 4, 1, 17),
        ((37, 841, 96, 1074), False, 16, 4, 4, 24),
        ((810, 338, 32, 640, 35, 193), False, 16, 4, 2, 18),
        ((309, 2539, 291, 149, 808), True, 8, 4, 3, 41),
        ((1543, 172, 333), False, 16, 4, 8, 40),
        ((950, 477, 20, 32, 514, 55), False, 16, 4, 8, 38),
        ((474, 471, 30, 155, 413, 505), False, 16, 4, 6, 30),
        ((184, 47, 16, 1245, 556), False, 16, 4, 8, 36),
        ((323, 1011, 1604, 1158), False, 8, 8, 2, 34),
        ((309, 2539, 291, 149, 808), True, 8, 8, 4, 44),
        ((700,), False, 44, 4, 0, 6),
    ],
    ids=str,
)
def test_what_is_split(lengths, is_causal, heads, group, tiles, units):
    found = choose(documents(lengths, is_causal, heads, group))
    assert (found.splits, len(found)) == (tiles, units * heads)


def test_wide_steps_make_lists_of_the_same_kind():
    """Blocks of 80 queries are cut elsewhere, and halves taken sooner; every tile is there once all the same."""
    found = choose(documents((3503, 249, 344), False, 8, 8, block=80))
    check(found)
    assert (found.splits, len(found)) == (16, 80 * 8)  # the shorter half by heads: 3% more than the longest way to go
    for seed in range(40):
        print("seed", seed)
        rng = np.random.default_rng(seed)
        lengths = tuple(rng.integers(1, 1500, size=int(rng.integers(1, 7))).tolist())
        for block in (64, 80):
            problem = documents(lengths, bool(seed % 2), 8, 8, block)
            assert problem.blocks == -(-sum(lengths) // block)
            check(choose(problem))
