# SPDX-License-Identifier: Apache-2.0
"""The lists of ``csrc/ffa/sm90/bwd_ways.cuh``, which row is which unit; and which ``bwd_ways_choice.cuh`` chooses.

It follows the CUDA code, but for what lanes of a warp share out, and does not show that the code keeps to it; that is
for ``tests/gpu/test_ffa_backward_split.py``, which asks for the same choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np

PARTS, LOOKED, UNIT_TIME, SLOT_TIME = 4, 8, 21, 1
SHORTEST, BLOCK_TIME, FEW_PARTS = 2, 4, 4
WHOLE, LONGEST_BY_HEADS, SHORTER_HALF, CUT_FILLED, MIDDLE_HALF, SECOND_QUARTER, MIDDLE = 0, 3, 7, 8, 9, 10, 11
KEYS = 128
WORTH = {64: 1.06, 80: 1.04}  # by queries of a block: so much longer must whole tiles take than halves might


class Tile(NamedTuple):
    """Blocks of queries [first, end), where its first document ends as a block or 0, and its time for all heads."""

    first: int
    end: int
    cut: int
    time: int


class Unit(NamedTuple):
    """``part`` of the heads, or side of a cut; ``slot`` from one, 0 for a whole tile."""

    tile: int
    head: int
    part: int
    slot: int
    time: int


@dataclass
class Problem:
    """``tiles`` with the longest first; how many blocks of ``block`` queries there are."""

    tiles: list[Tile]
    heads: int
    group: int
    blocks: int
    processors: int = 132
    block: int = 64

    @property
    def room(self) -> int:
        return (len(self.tiles) + 1) // 2

    @property
    def late(self) -> tuple[int, int]:
        """How many multiprocessors begin late, and when."""
        count = max(self.processors // 8, 1)
        return count, min(BLOCK_TIME * self.blocks * self.heads * self.group // count, 1 << 24)

    def cut_times(self, tile: Tile) -> tuple[int, int]:
        return tuple(9 * n * self.group for n in (tile.cut - tile.first, tile.end - tile.cut))


class UnitList:
    """Up to ``wanted`` of the longest tiles cut, tiles [start, start + count) split by heads, as there is room.

    Rows of whole tiles and sides of cuts come where their time puts them, parts by heads behind those that take longer.
    """

    def __init__(self, p: Problem, wanted: int, start: int, count: int) -> None:
        self.p, self.start, n = p, start, len(p.tiles)
        self.cut = [i for i in range(min(n, start, LOOKED)) if p.tiles[i].cut][: min(wanted, p.room)]
        self.count = min(count, n - start, p.room - len(self.cut))
        self.times = [time for i in self.cut for time in p.cut_times(p.tiles[i])]
        parts = range(start, start + self.count)
        self.whole = [i for i in range(n) if i not in self.cut and i not in parts]
        self.places = [
            sum(p.tiles[i].time >= mine for i in self.whole)
            + sum(t > mine or (t == mine and j < i) for j, t in enumerate(self.times))
            for i, mine in enumerate(self.times)
        ]
        rows = [*(p.tiles[i].time for i in self.whole), *self.times]
        self.ahead = sum(PARTS * time >= p.tiles[start].time for time in rows) if self.count else 0

    @property
    def splits(self) -> int:
        return len(self.cut) + self.count

    def __len__(self) -> int:
        return (len(self.p.tiles) + len(self.cut) + self.count * (PARTS - 1)) * self.p.heads

    def unit(self, number: int) -> Unit:
        heads, slots = self.p.heads, self.count * self.p.heads
        at = number - self.ahead * heads
        if 0 <= at < slots * PARTS:
            tile, slot = self.start + at % slots // heads, len(self.cut) * heads + at % slots + 1
            return Unit(tile, at % heads, at // slots, slot, self.p.tiles[tile].time // PARTS + UNIT_TIME)
        row, head = divmod(number if at < 0 else number - slots * PARTS, heads)
        if row in self.places:
            side = self.places.index(row)
            slot = side // 2 * heads + head + 1
            return Unit(self.cut[side // 2], head, side % 2, slot, self.times[side] + UNIT_TIME)
        tile = self.whole[row - sum(place < row for place in self.places)]
        return Unit(tile, head, 0, 0, self.p.tiles[tile].time + UNIT_TIME)

    def rows(self) -> list[Unit]:
        """All units as they are listed: whole tiles that take as long head by head."""
        rows: list[Unit | None] = [None] * len(self)
        for number in range(len(self)):
            unit, at = self.unit(number), number
            if not unit.slot:
                alike = [t for t in self.whole if self.p.tiles[t].time == self.p.tiles[unit.tile].time]
                before = alike.index(unit.tile)
                at += unit.head * len(alike) + before - (before * self.p.heads + unit.head)
            assert rows[at] is None, "two units in one row"
            rows[at] = unit
        return rows


def list_of(p: Problem, way: int) -> UnitList:
    n = len(p.tiles)
    if way < LONGEST_BY_HEADS:
        return UnitList(p, way, n, 0)
    if way < SHORTER_HALF:
        return UnitList(p, 0, 0, way - LONGEST_BY_HEADS + 1)
    if way == SHORTER_HALF:
        return UnitList(p, 0, n // 2, n - n // 2)
    if way == CUT_FILLED:
        return UnitList(p, 2, max(n - SHORTEST, 0), SHORTEST)
    cuts, start, count = {MIDDLE_HALF: (1, 7, 8), SECOND_QUARTER: (2, 4, 4), MIDDLE: (2, 6, 6)}[way]
    return UnitList(p, cuts, n * start // 16, n * count // 16)


def end_of(units: UnitList, late: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """When the last unit ends, parts added up, if as many multiprocessors begin late; and what all take."""
    times = [units.unit(i).time for i in range(len(units))]
    places = min(units.p.processors, len(times))
    at_once = max(places - late[0], 0)
    ends = times[:at_once] + [late[1]] * (places - at_once)
    last = max(times[:at_once], default=0)
    heapify(ends)
    for time in times[at_once:]:
        last = max(last, ends[0] + time)
        heapreplace(ends, ends[0] + time)
    return last + SLOT_TIME * units.splits * units.p.heads, sum(times)


def choose(p: Problem) -> UnitList:
    ends = [end_of(list_of(p, way)) for way in range(SHORTER_HALF)]
    whole, total = ends[0]
    shorter = max(1.08 * total / p.processors, p.tiles[0].time + UNIT_TIME)
    best, chosen = whole, WHOLE
    if whole > WORTH[p.block] * shorter and 1.03 * shorter < whole:
        best, chosen = 1.03 * shorter, SHORTER_HALF
    for way in range(1, SHORTER_HALF):
        end = (1.02 if way < LONGEST_BY_HEADS else 1.06 if chosen == SHORTER_HALF else 1.2) * ends[way][0]
        if end < best:
            best, chosen = end, way
    others = {MIDDLE_HALF: 1.0, SECOND_QUARTER: 1.01, MIDDLE: 1.01}
    if chosen < LONGEST_BY_HEADS:
        others = {CUT_FILLED: 1.02} if FEW_PARTS * SHORTEST * p.heads <= p.processors else {}
    best = end_of(list_of(p, chosen), p.late)[0]
    for way, factor in others.items():
        end = factor * end_of(list_of(p, way), p.late)[0]
        if end < best:
            best, chosen = end, way
    return list_of(p, chosen)


def documents(lengths: tuple[int, ...], is_causal: bool, heads: int, group: int, block: int = 64) -> Problem:
    """Packed documents, by the transposed plan: tiles of keys with the queries that see them."""
    starts = np.cumsum((0, *lengths))
    low = np.concatenate([np.arange(a, b) if is_causal else np.full(b - a, a) for a, b in zip(starts, starts[1:])])
    high = np.repeat(starts[1:], lengths)
    tiles = []
    for at in range(0, starts[-1], KEYS):
        lo, hi = low[at : at + KEYS], high[at : at + KEYS]
        first, end = int(lo.min()) // block, -(-int(hi.max()) // block)
        # A block needs no mask if all keys of the tile see all of it; keys that do not exist see nothing.
        plain = 0 if len(lo) < KEYS else max(int(hi.min()) // block - -(-int(lo.max()) // block), 0)
        cut = int(hi.min()) // block
        time = (8 * (end - first) + (end - first - plain)) * group
        tiles.append(Tile(first, end, cut if first < cut < end else 0, time))
    return Problem(sorted(tiles, key=lambda t: -t.time), heads, group, -(-int(starts[-1]) // block), block=block)
