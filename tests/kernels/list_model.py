# SPDX-License-Identifier: Apache-2.0
"""The lists of ``csrc/ffa/sm90/bwd_ways.cuh``, which row is which unit; and which is chosen by ``bwd_list.cuh``.

It follows the CUDA code, but for what lanes of a warp share out, and does not show that the code keeps to it; that is
for ``tests/gpu/test_ffa_backward_split.py``, which asks for the same choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np

PARTS, LOOKED, UNIT_TIME, SLOT_TIME = 4, 8, 21, 1
CUT, SHORTEST, BLOCK_TIME = 2, 2, 4
BLOCK, KEYS = 64, 128


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
    """``tiles`` with the longest first; how many ``blocks`` of queries there are."""

    tiles: list[Tile]
    heads: int
    group: int
    blocks: int
    processors: int = 132

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


class HeadsList:
    def __init__(self, p: Problem, start: int, count: int) -> None:
        self.p, self.start, self.count = p, start, count if count <= p.room else 0
        behind = p.tiles[start + count :] if self.count else []
        self.ahead = start + sum(PARTS * t.time >= p.tiles[start].time for t in behind)

    def __len__(self) -> int:
        return (len(self.p.tiles) + self.count * (PARTS - 1)) * self.p.heads

    def unit(self, number: int) -> Unit:
        heads, slots = self.p.heads, self.count * self.p.heads
        at = number - self.ahead * heads
        if 0 <= at < slots * PARTS:
            tile = self.start + at % slots // heads
            return Unit(tile, at % heads, at // slots, at % slots + 1, self.p.tiles[tile].time // PARTS + UNIT_TIME)
        rank = (number if at < 0 else number - slots * PARTS) // heads
        tile = rank if rank < self.start else rank + self.count
        return Unit(tile, number % heads, 0, 0, self.p.tiles[tile].time + UNIT_TIME)


class CutsList:
    """``wanted`` of the longest tiles cut; the ``shortest`` split by heads, behind all others."""

    def __init__(self, p: Problem, wanted: int, shortest: int = 0) -> None:
        self.p = p
        has_room = len(p.tiles) - shortest >= LOOKED and wanted + shortest <= p.room
        self.shortest = shortest if has_room else 0
        self.start = len(p.tiles) - self.shortest
        looked = range(min(LOOKED, len(p.tiles)))
        self.cut = [i for i in looked if p.tiles[i].cut][: min(wanted, p.room)]
        self.count = len(self.cut) + self.shortest
        self.times = [time for i in self.cut for time in p.cut_times(p.tiles[i])]
        whole = [t.time for i, t in enumerate(p.tiles[: self.start]) if i not in self.cut]
        self.places = [
            sum(w >= mine for w in whole) + sum(t > mine or (t == mine and j < i) for j, t in enumerate(self.times))
            for i, mine in enumerate(self.times)
        ]

    def __len__(self) -> int:
        return (len(self.p.tiles) + len(self.cut) + self.shortest * (PARTS - 1)) * self.p.heads

    def unit(self, number: int) -> Unit:
        mine, head = divmod(number, self.p.heads)
        at, slots = number - (self.start + len(self.cut)) * self.p.heads, self.shortest * self.p.heads
        if at >= 0:
            tile, slot = self.start + at % slots // self.p.heads, len(self.cut) * self.p.heads + at % slots + 1
            return Unit(tile, head, at // slots, slot, self.p.tiles[tile].time // PARTS + UNIT_TIME)
        if mine in self.places:
            part = self.places.index(mine)
            slot = part // 2 * self.p.heads + head + 1
            return Unit(self.cut[part // 2], head, part % 2, slot, self.times[part] + UNIT_TIME)
        tile = mine - sum(place < mine for place in self.places)
        for cut in self.cut:  # in rising order
            tile += tile >= cut
        return Unit(tile, head, 0, 0, self.p.tiles[tile].time + UNIT_TIME)


def end_of(units: HeadsList | CutsList, late: tuple[int, int] = (0, 0)) -> tuple[int, int]:
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
    return last + SLOT_TIME * units.count * units.p.heads, sum(times)


def choose(p: Problem) -> HeadsList | CutsList:
    ways = [CutsList(p, 0), CutsList(p, 1), CutsList(p, 2), *(HeadsList(p, 0, n) for n in (1, 2, 3, 4))]
    ends = [end_of(way) for way in ways]
    whole, total = ends[0]
    shorter = max(1.08 * total / p.processors, p.tiles[0].time + UNIT_TIME)
    best, chosen = whole, 0
    if whole > 1.06 * shorter and 1.03 * shorter < whole:
        best, chosen = 1.03 * shorter, len(ways)
    for i in range(1, len(ways)):
        end = (1.02 if i < 3 else 1.06 if chosen == len(ways) else 1.2) * ends[i][0]
        if end < best:
            best, chosen = end, i
    if chosen < 3:
        filled = CutsList(p, CUT, SHORTEST)
        return filled if 1.02 * end_of(filled, p.late)[0] < end_of(ways[chosen], p.late)[0] else ways[chosen]
    n = len(p.tiles)
    return ways[chosen] if chosen < len(ways) else HeadsList(p, n // 2, n - n // 2)


def documents(lengths: tuple[int, ...], is_causal: bool, heads: int, group: int) -> Problem:
    """Packed documents, by the transposed plan: tiles of keys with the queries that see them."""
    starts = np.cumsum((0, *lengths))
    low = np.concatenate([np.arange(a, b) if is_causal else np.full(b - a, a) for a, b in zip(starts, starts[1:])])
    high = np.repeat(starts[1:], lengths)
    tiles = []
    for at in range(0, starts[-1], KEYS):
        lo, hi = low[at : at + KEYS], high[at : at + KEYS]
        first, end = int(lo.min()) // BLOCK, -(-int(hi.max()) // BLOCK)
        # A block needs no mask if all keys of the tile see all of it; keys that do not exist see nothing.
        plain = 0 if len(lo) < KEYS else max(int(hi.min()) // BLOCK - -(-int(lo.max()) // BLOCK), 0)
        cut = int(hi.min()) // BLOCK
        time = (8 * (end - first) + (end - first - plain)) * group
        tiles.append(Tile(first, end, cut if first < cut < end else 0, time))
    return Problem(sorted(tiles, key=lambda t: -t.time), heads, group, -(-int(starts[-1]) // BLOCK))
