# SPDX-License-Identifier: Apache-2.0
"""Which fragments pass states to which, as tables: for one exchange of summaries, and for a chain of steps.

Fragments that pass a state on, one to the next, are a run: the first begins a document or holds the beginning of one,
the last holds its end, and those between lie within the document. A fragment may end one run and begin another.
Gradients go through the same runs from their ends, which is the same problem with the sequence reversed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from magi_attention.meta.fragments import Fragments
from magi_attention.meta.recurrent.tables import Ints, Wanted


@dataclass(frozen=True, eq=False)
class Line:
    """All fragments in the order in which states pass, ``(F,)`` each: the rank, the number in that rank, and does a
    state come in, go out, and go through?"""

    rank: Ints
    number: Ints
    takes: NDArray[np.bool_]
    gives: NDArray[np.bool_]
    carries: NDArray[np.bool_]

    @classmethod
    def of(cls, fragments: Fragments, is_reverse: bool) -> Line:
        rank, number = fragments.order.T
        masks = [np.concatenate([f(r) for r in range(len(fragments.ranges))]) for f in
                 (fragments.takes, fragments.gives, fragments.carries)]  # fmt: skip
        first = np.cumsum([0, *map(len, fragments.ranges)])
        takes, gives, carries = (mask[first[rank] + number] for mask in masks)
        if is_reverse:
            rank, number, takes, gives, carries = (x[::-1] for x in (rank, number, gives, takes, carries))
        return cls(rank, number, takes, gives, carries)

    @property
    def world(self) -> int:
        return int(self.rank.max()) + 1

    @property
    def first_of(self) -> Ints:
        """``(F,)``: where the run begins whose state comes into a fragment, that is the last giver before it that
        carries nothing."""
        begins = np.where(self.gives & ~self.carries, np.arange(len(self.rank)), -1)
        before: Ints = np.concatenate([[-1], np.maximum.accumulate(begins)[:-1]])
        return before

    @property
    def steps(self) -> int:
        """Passes of the longest run."""
        depth = np.arange(len(self.rank)) - self.first_of
        return int(depth[self.takes].max(initial=0))


@dataclass(frozen=True, eq=False)
class Gathered:
    """What a rank needs to find all states that come to it: ``needed`` fragments, and step by step which rows of these
    go through, which of them end at one of its own, and there. ``steps[k]`` is ``(rows, ends, numbers)``: the summaries
    of step k, of the runs that are as long, longest first; of these which give the state to own fragments, and their
    numbers."""

    needed: Wanted
    steps: tuple[tuple[Ints, Ints, Ints], ...]

    @classmethod
    def of(cls, line: Line, rank: int) -> Gathered:
        mine = np.flatnonzero(line.takes & (line.rank == rank))
        begin = line.first_of[mine]
        last: dict[int, int] = {}  # the giver to the last own fragment of each run
        for first, taker in zip(begin.tolist(), mine.tolist()):
            last[first] = taker - 1
        runs = sorted(last.items(), key=lambda run: (run[0] - run[1], run[0]))
        needed = np.concatenate([np.arange(0), *(np.arange(a, b + 1) for a, b in runs)])
        offset = np.cumsum([0, *(b + 1 - a for a, b in runs)])
        steps = []
        for k in range(max((b + 1 - a for a, b in runs), default=0)):
            at = np.array([a + k for a, b in runs if a + k <= b])
            rows = offset[: len(at)] + k
            ends = np.flatnonzero(line.rank[at + 1] == rank)
            steps.append((rows, ends, line.number[at[ends] + 1]))
        return cls(Wanted(line.rank[needed], line.number[needed]), tuple(steps))


@dataclass(frozen=True, eq=False)
class ChainStep:
    """One pass of all runs that are as long: what each rank gets, and for which of its fragments."""

    wanted: tuple[Wanted, ...]
    takers: tuple[Ints, ...]


def chain(line: Line) -> tuple[ChainStep, ...]:
    """The passes of all runs, one behind the other."""
    depth, takers = np.arange(len(line.rank)) - line.first_of, np.flatnonzero(line.takes)
    steps = []
    for k in range(1, line.steps + 1):
        at = takers[depth[takers] == k]
        of_rank = [at[line.rank[at] == rank] for rank in range(line.world)]
        wanted = tuple(Wanted(line.rank[x - 1], line.number[x - 1]) for x in of_rank)
        steps.append(ChainStep(wanted, tuple(line.number[x] for x in of_rank)))
    return tuple(steps)
