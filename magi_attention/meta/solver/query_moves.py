# SPDX-License-Identifier: Apache-2.0
"""Which rank computes which pairs, where queries and outputs may travel as well as keys and values.

Three kinds of choice are tried:

* Ranks as a grid of rows and columns: a rank computes what queries of ranks in its row see of keys of ranks in its
  column. It is sent queries of its row alone, and keys of its column alone: for full attention over 16 ranks, a fifth
  of each. One column is the choice in which only keys move, one row that in which only queries do.
* With head groups, teams of ranks, one for each few of the groups, each a grid. Teams of one rank are the all-to-all
  over heads of DeepSpeed-Ulysses (arXiv 2309.14509), larger ones the hybrid USP (arXiv 2405.07719).
* The cheapest one in which a pair is computed by the owner of its queries or of its keys. Then of two chunks that meet,
  one has to travel, and serves all pairs that it has at that rank. So it is a weighted vertex cover of a bipartite
  graph, which a maximum flow finds exactly.

Those that send least are balanced and improved (``placement.py``), and the cheapest is taken.

A row of keys costs ``KEY_COST`` for each kv head: k and v to the forward and again to the backward, dk and dv back. A
row of queries costs ``QUERY_COST`` for each query head: q and out, then q, dout and dq.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from magi_attention.common.intervals import sum_by
from magi_attention.common.slices import K0, K1, Q0, Q1, merge
from magi_attention.meta.solver.placement import Cells, Ints, Pairs, Placement, union_rows
from magi_attention.native.planner.pairs import vertex_cover

KEY_COST, QUERY_COST = 6, 5
_TRIED, _ALL_TRIED = 3, 5000  # of the choices to begin with; pairs, up to which all are


@dataclass(frozen=True, eq=False)
class Moves:
    """``rank_of_cell`` computes it; ``loads`` (ranks,): areas. ``cost`` and ``cost_of_keys``: of this choice, and where
    only keys move, in rows times heads times ``KEY_COST`` or ``QUERY_COST``. ``cheapest``: cost and heaviest load of
    the cheapest choice before it was balanced."""

    rank_of_cell: Ints
    loads: Ints
    cost: int
    cost_of_keys: int
    cheapest: tuple[int, int]

    def assigned(self, cells: Cells, owner: Ints) -> tuple[Ints, ...]:
        """The slices of each rank, in global coordinates; none has queries of that rank and of another."""
        is_own = owner[cells.query_chunk] == self.rank_of_cell
        found = []
        for rank in range(len(self.loads)):
            mine = self.rank_of_cell == rank
            found.append(np.concatenate([merge(cells.pieces[mine & is_own]), merge(cells.pieces[mine & ~is_own])]))
        return tuple(found)

    def chunk_loads(self, cells: Cells, owner: Ints) -> Ints:
        """Area by the chunk that keeps it at its rank: that of the queries, or of the keys where queries move."""
        chunk = np.where(self.rank_of_cell == owner[cells.query_chunk], cells.query_chunk, cells.key_chunk)
        return sum_by(chunk, cells.area, len(owner))


def choose_moves(
    cells: Cells, owner: Ints, world: int, heads: tuple[int, int], most_load: float, groups: int = 1
) -> Moves:
    """``owner`` (chunks,): ranks; ``heads``: query and kv heads; ``most_load``: area that a rank may have if moves give
    it more than it had, at most; ``groups``: of heads, as ``place`` takes them. Pure: every rank finds the same.
    ``UnsupportedError`` without the planner library."""
    costs = QUERY_COST * heads[0], KEY_COST * heads[1]
    pairs = Pairs.of_cells(cells, (owner, owner), costs)
    keys_alone = owner[cells.query_chunk]
    loads = sum_by(keys_alone, cells.area, world)
    found, cheapest = place(pairs, world, most_load, max(most_load, int(loads.max(initial=0))), groups)
    rank_of_cell = keys_alone if found is None else found.rank[pairs.of]
    costs_of = [_cost(cells, owner, world, costs, ranks) for ranks in (rank_of_cell, keys_alone)]
    if costs_of[0] >= costs_of[1]:
        rank_of_cell, costs_of[0] = keys_alone, costs_of[1]
    return Moves(rank_of_cell, sum_by(rank_of_cell, cells.area, world), costs_of[0], costs_of[1], cheapest)


def _cost(cells: Cells, owner: Ints, world: int, costs: tuple[int, int], rank_of_cell: Ints) -> int:
    """The cost of the rows that travel, row by row; ``Pairs`` count all rows of a chunk that somebody needs."""
    total = 0
    for cost, chunk, ends in zip(costs, (cells.query_chunk, cells.key_chunk), ((Q0, Q1), (K0, K1))):
        is_sent = owner[chunk] != rank_of_cell
        total += cost * int(union_rows(cells.pieces[is_sent][:, ends], rank_of_cell[is_sent], world).sum())
    return total


def place(
    pairs: Pairs, world: int, aim: float, most: float, groups: int = 1, more: Sequence[Ints] = ()
) -> tuple[Placement | None, tuple[int, int]]:
    """The cheapest placement found in which no rank has more area than ``aim``, or where that cannot be reached than
    ``most``, None if there was none; and cost and heaviest load of the cheapest before it was balanced. ``groups``: as
    many equal parts of the chunks, one behind the other, are the head groups of a sequence. ``more``: choices (pairs,)
    to begin with as well."""
    starts = [Placement(pairs, world, rank) for rank in (*_grids(pairs, world, groups), _cover(pairs, world))]
    starts = sorted(starts, key=Placement.cost)[: _TRIED if len(pairs.area) > _ALL_TRIED else None]
    cheapest = starts[0].cost(), starts[0].heaviest
    starts += [Placement(pairs, world, rank) for rank in more]
    for placement in starts:
        placement.balance(aim)
        placement.improve(max(aim, placement.heaviest))
    balanced = [placement for placement in starts if placement.heaviest <= most]
    return min(balanced, key=lambda found: (found.heaviest > aim, found.cost()), default=None), cheapest


def _grids(pairs: Pairs, world: int, groups: int) -> Iterator[Ints]:
    """The rank of each pair, for each way to make teams of ranks and a grid of each."""
    group = pairs.queries.of * groups // max(len(pairs.queries.owner), 1)
    for teams in _divisors(gcd(world, groups)):
        size = world // teams
        first = group * teams // groups * size
        for columns in _divisors(size):
            row, column = pairs.queries.at % size // columns, pairs.keys.at % columns
            yield first + row * columns + column


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _cover(pairs: Pairs, world: int) -> Ints:
    """The rank of each pair, by a vertex cover: vertices are a chunk of queries at the owner of keys, and a chunk of
    keys at the owner of queries."""
    queries, keys = pairs.queries, pairs.keys
    rank, is_remote = queries.at, queries.at != keys.at
    query, query_of = np.unique((queries.of * world + keys.at)[is_remote], return_inverse=True)
    key, key_of = np.unique((keys.of * world + queries.at)[is_remote], return_inverse=True)
    query_of, key_of = query_of.reshape(-1), key_of.reshape(-1)
    moves_query, moves_key = vertex_cover(queries.cost[query // world], keys.cost[key // world], query_of, key_of)
    rank[is_remote] = np.where(moves_query[query_of] & ~moves_key[key_of], keys.at[is_remote], rank[is_remote])
    return rank
