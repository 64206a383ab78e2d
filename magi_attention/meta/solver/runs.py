# SPDX-License-Identifier: Apache-2.0
"""Chunks to ranks in few runs: no rank holds more than so many ranges of consecutive chunks.

There are two beginnings. In the first the sequence is cut into rounds, and a round into one run of equal length for
each rank. Each round goes to the ranks by area: its heaviest run to the rank with the least so far. The second is
``necklace.split``, for areas that differ by more than rounds make up for. Then the heaviest rank is relieved, by a swap
of two runs of equal length or by moves of borders between two or three ranks, until it is within 1% of the least area
that it can have or there is no such change. Areas are integers and ties go by number, so every rank that asks gets the
same answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from magi_attention.meta.solver.locality import TOLERATED, lower_bound
from magi_attention.meta.solver.necklace import split

Ints = NDArray[np.int64]
_MOST_CHANGES = 4  # for each rank


def few_runs(work: Ints, world: int, most: int) -> list[list[int]]:
    """Chunks of each rank, in at most ``most`` runs: ``len(work) // world`` each, and some one more where that leaves
    some. ``work`` (chunks,) are areas. The first beginning after which the heaviest rank is within 1% of the least area
    that it can have, or else that after which it is lightest."""
    limit, best = int(TOLERATED * lower_bound(work, world)), None
    for owner in _beginnings(work, world, most):
        runs = _Runs(work, world, owner)
        runs.relieve(limit)
        if best is None or runs.loads.max() < best.loads.max():
            best = runs
        if best.loads.max() <= limit:
            break
    assert best is not None
    return best.chunks()


def _beginnings(work: Ints, world: int, most: int) -> Iterator[Ints]:
    """(chunks,) ranks of chunks. Few rounds are enough for regular masks, and many take longest to relieve."""
    most_rounds = max(min(most, len(work) // world), 1)
    for rounds in range(1, most_rounds + 1):
        yield _in_rounds(work, world, rounds)
        if rounds == min(2, most_rounds) and (owner := split(work, world, most)) is not None:
            yield owner


def _in_rounds(work: Ints, world: int, rounds: int) -> Ints:
    size, extra = divmod(len(work), world)
    of_round = size // rounds + (np.arange(rounds) < size % rounds)
    lengths = np.repeat(of_round, world)
    lengths[len(lengths) - world :][:extra] += 1
    edges = np.concatenate([[0], np.cumsum(lengths)])
    of_run = np.diff(np.concatenate([[0], np.cumsum(work)])[edges])
    owner, loads = np.zeros(len(lengths), dtype=np.int64), np.zeros(world, dtype=np.int64)
    for runs, areas in zip(np.split(np.arange(len(lengths)), rounds), np.split(of_run, rounds)):
        heaviest, lightest = np.argsort(-areas, kind="stable"), np.argsort(loads, kind="stable")
        owner[runs[heaviest]] = lightest
        loads[lightest] += areas[heaviest]
    return np.repeat(owner, lengths)


class _Change(NamedTuple):
    """A swap of two ``runs``, or ``num_chunks`` that go over each of some borders. ``gives`` are pairs of a border,
    which is the number of the run behind it, and the rank that gives there. Each rank gets as many as it gives."""

    loads: dict[int, int]  # of ranks, afterwards
    runs: tuple[int, int] | None = None
    gives: tuple[tuple[int, int], ...] = ()
    num_chunks: int = 0


class _Runs:
    """Runs in the order of the sequence: run ``i`` is the chunks ``edges[i]`` to ``edges[i + 1]``, of ``owner[i]``."""

    def __init__(self, work: Ints, world: int, owner_of_chunk: Ints) -> None:
        begins = np.flatnonzero(np.diff(owner_of_chunk, prepend=-1))
        self.sums = np.concatenate([[0], np.cumsum(work)])
        self.edges, self.owner = np.append(begins, len(work)), owner_of_chunk[begins]
        self.loads = np.zeros(world, dtype=np.int64)
        np.add.at(self.loads, self.owner, self.areas)

    @property
    def areas(self) -> Ints:
        areas: Ints = np.diff(self.sums[self.edges])
        return areas

    def chunks(self) -> list[list[int]]:
        rank_of = np.repeat(self.owner, np.diff(self.edges))
        return [np.flatnonzero(rank_of == rank).tolist() for rank in range(len(self.loads))]

    def relieve(self, limit: int) -> None:
        """Changes runs until no rank is above ``limit`` or the heaviest one gets no lighter by a swap or a move."""
        for _ in range(_MOST_CHANGES * len(self.loads)):
            heavy = int(self.loads.argmax())
            if self.loads[heavy] <= limit:
                return
            best = self._best(heavy, (*self._swaps(heavy), *self._moves(heavy, self._pairs(heavy))))
            best = best or self._best(heavy, self._moves(heavy, self._threes(heavy)))
            if best is None:
                return
            self._apply(best)

    def _best(self, heavy: int, changes: Iterable[_Change]) -> _Change | None:
        """The change after which the heaviest of its ranks is lightest, if lighter than the heaviest one now."""
        best, least = None, int(self.loads[heavy])
        for change in changes:
            heaviest = max(change.loads.values())
            if heaviest < least:
                best, least = change, heaviest
        return best

    def _swaps(self, heavy: int) -> Iterator[_Change]:
        """The best swap of two runs of equal length, if one helps."""
        areas, lengths, mine = self.areas, np.diff(self.edges), np.flatnonzero(self.owner == heavy)
        gain = areas[mine][:, None] - areas
        less = np.minimum(gain, self.loads[heavy] - self.loads[self.owner] - gain)
        less[(lengths[mine][:, None] != lengths) | (self.owner == heavy)] = 0
        at, run = divmod(int(less.argmax()), len(areas))
        if less[at, run] <= 0:
            return
        other, moved = int(self.owner[run]), int(gain[at, run])
        loads = {other: int(self.loads[other]) + moved, heavy: int(self.loads[heavy]) - moved}
        yield _Change(loads, (int(mine[at]), run))

    def _borders(self, rank: int) -> Iterator[tuple[int, int]]:
        """Borders of a rank's runs, and the ranks on the other side."""
        left, right = self.owner[:-1], self.owner[1:]
        at = np.flatnonzero((left != right) & ((left == rank) | (right == rank)))
        yield from zip((at + 1).tolist(), (left + right - rank)[at].tolist())

    def _pairs(self, heavy: int) -> Iterator[tuple[tuple[int, int], ...]]:
        known = list(self._borders(heavy))
        for give, other in known:
            yield from (((give, heavy), (get, other)) for get, rank in known if rank == other and get != give)

    def _threes(self, heavy: int) -> Iterator[tuple[tuple[int, int], ...]]:
        """Over a third rank, which takes from the second one and gives to the heaviest."""
        known = list(self._borders(heavy))
        for give, second in known:
            for between, third in self._borders(second):
                ends = (get for get, rank in known if rank == third and third != heavy and get != give)
                yield from (((give, heavy), (between, second), (get, third)) for get in ends)

    def _moves(self, heavy: int, cycles: Iterable[tuple[tuple[int, int], ...]]) -> Iterator[_Change]:
        for gives in cycles:
            most, count = min(self._room(*give) for give in gives), 1
            while count <= most:
                moved = [self._area_at(border, giver, count) for border, giver in gives]
                loads = {
                    giver: int(self.loads[giver]) - out + got
                    for (_, giver), out, got in zip(gives, moved, moved[-1:] + moved[:-1])
                }
                yield _Change(loads, None, gives, count)
                count = max(count + 1, count * 5 // 4)

    def _room(self, border: int, giver: int) -> int:
        """Chunks that the run of ``giver`` at this border can give, at both of its ends, and stay."""
        run = border if self.owner[border] == giver else border - 1
        return int(self.edges[run + 1] - self.edges[run] - 1) // 2

    def _area_at(self, border: int, giver: int, count: int) -> int:
        """Area of the ``count`` chunks of ``giver`` at a border."""
        edge = self.edges[border]
        end = edge + (count if self.owner[border] == giver else -count)
        return abs(int(self.sums[end] - self.sums[edge]))

    def _apply(self, change: _Change) -> None:
        if change.runs is not None:
            give, get = change.runs
            self.owner[[give, get]] = self.owner[[get, give]]
        for border, giver in change.gives:
            self.edges[border] += change.num_chunks if self.owner[border] == giver else -change.num_chunks
        for rank, load in change.loads.items():
            self.loads[rank] = load
