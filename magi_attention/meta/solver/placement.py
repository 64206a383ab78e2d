# SPDX-License-Identifier: Apache-2.0
"""Which rank computes which pair of chunks, and what has to travel for it.

Any rank may compute what the queries of one chunk see of the keys of another. It needs these queries and keys, and is
sent those that it does not own, each chunk once for all of its pairs. ``Placement`` keeps count of that. The planner
library hands pairs on until no rank has too much, and then looks for ways to send less.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.intervals import merge_intervals, sum_by
from magi_attention.common.slices import K0, K1, Q0, Q1, areas
from magi_attention.meta.rank_plan import cut_by_windows
from magi_attention.native.planner.pairs import PairGraph

_MOST_STEPS = 32  # of balancing, for each rank
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Cells:
    """Pieces (N, 5) in global coordinates, each inside one query chunk and one key chunk, with these and its area."""

    pieces: Ints
    query_chunk: Ints
    key_chunk: Ints
    area: Ints

    @classmethod
    def cut(cls, pieces: Ints, query_chunk: Ints, bounds: Ints) -> Cells:
        """``pieces`` as ``split_by_chunk`` gives them; ``bounds`` (chunks, 2) of keys."""
        cut, of, key_chunk = cut_by_windows(pieces, bounds)
        return cls(cut, query_chunk[of], key_chunk, areas(cut))


@dataclass(frozen=True, eq=False)
class Side:
    """The queries of all pairs, or their keys: the chunk ``of`` (pairs,) each, and by chunk (chunks,) what it costs to
    send it to a rank, and who owns it."""

    of: Ints
    cost: Ints
    owner: Ints

    @property
    def at(self) -> Ints:
        """(pairs,): the rank that owns this side of each."""
        return self.owner[self.of]


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of a query chunk and a key chunk that see each other, each once, with their ``area`` (pairs,). ``of``
    (cells,): the pair that each cell is a part of."""

    queries: Side
    keys: Side
    area: Ints
    of: Ints

    @classmethod
    def of_cells(cls, cells: Cells, owners: tuple[Ints, Ints], costs: tuple[int, int]) -> Pairs:
        """``owners``: ranks of query chunks and of key chunks; ``costs``: of a row of each, which counts if a cell of
        its chunk has it."""
        pair, of = np.unique(cells.query_chunk * len(owners[1]) + cells.key_chunk, return_inverse=True)
        of = of.reshape(-1)
        rows_q = union_rows(cells.pieces[:, [Q0, Q1]], cells.query_chunk, len(owners[0]))
        rows_k = union_rows(cells.pieces[:, [K0, K1]], cells.key_chunk, len(owners[1]))
        queries = Side(pair // len(owners[1]), costs[0] * rows_q, owners[0])
        keys = Side(pair % len(owners[1]), costs[1] * rows_k, owners[1])
        return cls(queries, keys, sum_by(of, cells.area, len(pair)), of)


def union_rows(ranges: Ints, group: Ints, num_groups: int) -> Ints:
    """Rows in the union of the ranges of each group."""
    if not len(ranges):
        return np.zeros(num_groups, dtype=np.int64)
    stride = int(ranges.max()) + 2  # so ranges of two groups never touch
    union = merge_intervals(ranges + (group * stride)[:, None])
    return sum_by(union[:, 0] // stride, union[:, 1] - union[:, 0], num_groups)


class _Sent:
    """One side, with how many pairs of each rank use a chunk: ``users`` (chunks, ranks)."""

    def __init__(self, side: Side, world: int) -> None:
        self.of, self.users = side.of, np.zeros((len(side.cost), world), dtype=np.int64)
        self.price = side.cost[:, None] * (side.owner[:, None] != np.arange(world))  # of a chunk at a rank

    def add(self, pairs: Ints, ranks: Ints, by: int) -> None:
        flat = self.users.reshape(-1)  # why: numpy adds along one dimension several times as fast
        np.add.at(flat, self.of[pairs] * self.users.shape[1] + ranks, by)

    def cost(self) -> int:
        return int(self.price[self.users > 0].sum())

    def entering(self, chunks: Ints) -> Ints:
        """(chunks, ranks): what more has to be sent if a rank uses a chunk."""
        price: Ints = self.price[chunks] * (self.users[chunks] == 0)
        return price


class Placement:
    """Pairs at ranks. ``rank`` (pairs,): -1 for one that has none yet; ``loads`` (ranks,): areas; ``graph``: the pairs
    as the planner library takes them."""

    def __init__(self, pairs: Pairs, world: int, rank: Ints | None = None) -> None:
        self.area, self.world = pairs.area, world
        self._sides = _Sent(pairs.queries, world), _Sent(pairs.keys, world)
        self.rank = np.full(len(pairs.area), -1, dtype=np.int64)
        self.loads = np.zeros(world, dtype=np.int64)
        queries, keys = pairs.queries, pairs.keys
        self.graph = PairGraph(
            queries.of, keys.of, pairs.area, queries.cost, queries.owner, keys.cost, keys.owner, world
        )  # fmt: skip
        if rank is not None:
            self.move(np.arange(len(pairs.area)), rank)

    def move(self, pairs: Ints, to: Ints | int) -> None:
        """``pairs`` to a rank, or each to its own; -1 for none."""
        to = np.broadcast_to(to, len(pairs))
        for ranks, by in ((self.rank[pairs], -1), (to, 1)):
            at = ranks >= 0
            for side in self._sides:
                side.add(pairs[at], ranks[at], by)
            np.add.at(self.loads, ranks[at], by * self.area[pairs[at]])
        self.rank[pairs] = to

    @property
    def heaviest(self) -> int:
        return int(self.loads.max(initial=0))

    def cost(self) -> int:
        """The cost of all that has to be sent."""
        return sum(side.cost() for side in self._sides)

    def entering(self, pairs: Ints) -> Ints:
        """(pairs, ranks): what more has to be sent if a rank computes a pair."""
        first, second = self._sides
        return first.entering(first.of[pairs]) + second.entering(second.of[pairs])

    def balance(self, most: float) -> None:
        """Takes from the heaviest rank what costs least for its area, until none is above ``most`` or nothing helps.
        ``UnsupportedError`` without the planner library."""
        self._set(self.graph.balanced(self.rank, most, _MOST_STEPS * self.world))

    def improve(self, most: float) -> None:
        """Hands over what makes less travel, while no rank gets above ``most``, until nothing does.
        ``UnsupportedError`` without the planner library."""
        self._set(self.graph.improved(self.rank, most))

    def _set(self, rank: Ints) -> None:
        changed = np.flatnonzero(rank != self.rank)
        self.move(changed, rank[changed])
