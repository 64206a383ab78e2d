# SPDX-License-Identifier: Apache-2.0
"""Chunks to ranks in few runs: no rank holds more than so many ranges of consecutive chunks.

The sequence is cut into rounds, and a round into one run of equal length for each rank. Each round goes to the ranks by
area: its heaviest run to the rank with the least so far. Then the heaviest rank is relieved, by a swap of two runs of
equal length or by a move of the borders of two runs, until it is within 1% of the least area that it can have or there
is no such move. Areas are integers and ties go by number, so every rank that asks gets the same answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from magi_attention.meta.chunking import owners
from magi_attention.meta.solver.locality import TOLERATED, lower_bound

Ints = NDArray[np.int64]
_MOST_CHANGES = 4  # for each rank


def most_runs(partitions: Sequence[Sequence[int]], num_chunks: int) -> int:
    """Runs of consecutive chunks that the rank with the most of them holds."""
    owner = owners(partitions, num_chunks)
    begins = np.flatnonzero(np.diff(owner, prepend=-1))
    return int(np.bincount(owner[begins]).max())


def few_runs(work: Ints, world: int, most: int) -> list[list[int]]:
    """Chunks of each rank, in at most ``most`` runs: ``len(work) // world`` each, and some one more where that leaves
    some. ``work`` (chunks,) are areas. The rounds are the fewest with which the heaviest rank is within 1% of the least
    area that it can have, or else those, ``most`` at most, with which it is lightest."""
    limit, best = int(TOLERATED * lower_bound(work, world)), None
    for rounds in range(1, max(min(most, len(work) // world), 1) + 1):
        runs = _Runs(work, world, rounds)
        runs.relieve(limit)
        if best is None or runs.loads.max() < best.loads.max():
            best = runs
        if best.loads.max() <= limit:
            break
    assert best is not None
    return best.chunks()


class _Change(NamedTuple):
    """What another rank takes from the heaviest one: in a swap the runs ``give`` and ``get``, else ``count`` chunks at
    the border ``give`` against as many at the border ``get``. A border is the number of the run behind it."""

    gain: int  # area that the heaviest rank loses
    other: int
    give: int
    get: int
    count: int = 0


class _Runs:
    """Runs in the order of the sequence: run ``i`` is the chunks ``edges[i]`` to ``edges[i + 1]``, of ``owner[i]``."""

    def __init__(self, work: Ints, world: int, rounds: int) -> None:
        self.sums = np.concatenate([[0], np.cumsum(work)])
        size, extra = divmod(len(work), world)
        of_round = size // rounds + (np.arange(rounds) < size % rounds)
        lengths = np.repeat(of_round, world)
        lengths[len(lengths) - world :][:extra] += 1
        self.edges = np.concatenate([[0], np.cumsum(lengths)])
        self.owner, self.loads = np.zeros(len(lengths), dtype=np.int64), np.zeros(world, dtype=np.int64)
        for runs, areas in zip(np.split(np.arange(len(lengths)), rounds), np.split(self.areas, rounds)):
            heaviest, lightest = np.argsort(-areas, kind="stable"), np.argsort(self.loads, kind="stable")
            self.owner[runs[heaviest]] = lightest
            self.loads[lightest] += areas[heaviest]

    @property
    def areas(self) -> Ints:
        return np.diff(self.sums[self.edges])

    def chunks(self) -> list[list[int]]:
        rank_of = np.repeat(self.owner, np.diff(self.edges))
        return [np.flatnonzero(rank_of == rank).tolist() for rank in range(len(self.loads))]

    def relieve(self, limit: int) -> None:
        """Changes runs until no rank is above ``limit`` or the heaviest one gets no lighter by a swap or a move."""
        for _ in range(_MOST_CHANGES * len(self.loads)):
            heavy = int(self.loads.argmax())
            if self.loads[heavy] <= limit:
                return
            best, most = None, 0
            for change in (*self._best_swap(heavy), *self._moves(heavy)):
                less = self._less(heavy, change.gain, self.loads[change.other])
                if less > most:
                    best, most = change, int(less)
            if best is None:
                return
            self._apply(heavy, best)

    def _less(self, heavy: int, gain: Ints, load: Ints) -> Ints:
        """By how much the heavier one of two ranks afterwards is below the heaviest one now."""
        return np.minimum(gain, self.loads[heavy] - load - gain)

    def _best_swap(self, heavy: int) -> Iterator[_Change]:
        areas, lengths, mine = self.areas, np.diff(self.edges), np.flatnonzero(self.owner == heavy)
        gain = areas[mine][:, None] - areas
        less = self._less(heavy, gain, self.loads[self.owner])
        less[(lengths[mine][:, None] != lengths) | (self.owner == heavy)] = 0
        at, run = divmod(int(less.argmax()), len(areas))
        yield _Change(int(gain[at, run]), int(self.owner[run]), int(mine[at]), run)

    def _moves(self, heavy: int) -> Iterator[_Change]:
        left, right = self.owner[:-1], self.owner[1:]
        at = np.flatnonzero((left != right) & ((left == heavy) | (right == heavy)))
        others = (left + right - heavy)[at]
        for other in np.unique(others).tolist():
            borders = (at[others == other] + 1).tolist()
            for give in borders:
                for get in borders:
                    if give != get:
                        yield from self._moves_at(heavy, other, give, get)

    def _moves_at(self, heavy: int, other: int, give: int, get: int) -> Iterator[_Change]:
        for count in range(1, min(self._room(give, heavy), self._room(get, other)) + 1):
            gain = self._area_at(give, heavy, count) - self._area_at(get, other, count)
            yield _Change(gain, other, give, get, count)

    def _room(self, border: int, giver: int) -> int:
        """Chunks that the run of ``giver`` at this border can give, at both of its ends, and stay."""
        run = border if self.owner[border] == giver else border - 1
        return int(self.edges[run + 1] - self.edges[run] - 1) // 2

    def _area_at(self, border: int, giver: int, count: int) -> int:
        """Area of the ``count`` chunks of ``giver`` at a border."""
        edge = self.edges[border]
        end = edge + (count if self.owner[border] == giver else -count)
        return abs(int(self.sums[end] - self.sums[edge]))

    def _apply(self, heavy: int, change: _Change) -> None:
        gain, other, give, get, count = change
        if not count:
            self.owner[[give, get]] = other, heavy
        else:
            self.edges[give] += count if self.owner[give] == heavy else -count
            self.edges[get] += count if self.owner[get] == other else -count
        self.loads[heavy] -= gain
        self.loads[other] += gain


__all__ = ["few_runs", "most_runs"]
