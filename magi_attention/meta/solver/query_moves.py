# SPDX-License-Identifier: Apache-2.0
"""Which rank computes which pairs, where queries and outputs may travel as well as keys and values.

A *cell* is what the queries of one chunk see of the keys of another. If two ranks own the chunks, one of them computes
the cell: the owner of the queries, who fetches the keys, or the owner of the keys, who is sent the queries and sends
the output back. So of the two, the rows of keys at one rank and the rows of queries at the other, one has to be paid
for, and each serves all cells of its chunk with that rank. The cheapest choice is a weighted vertex cover of the
bipartite graph of cells, which a maximum flow finds exactly. Then queries go back to their owners, those that cost the
least first, where a rank would have more work than it had without moves.

A row of keys costs ``KEY_COST`` for each kv head: k and v to the forward and again to the backward, dk and dv back. A
row of queries costs ``QUERY_COST`` for each query head: q and out, then q, dout and dq.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.intervals import merge_intervals
from magi_attention.common.slices import K0, K1, Q0, Q1, areas, merge
from magi_attention.meta.chunking import sum_by
from magi_attention.meta.rank_plan import cut_by_windows
from magi_attention.native.planner import vertex_cover

KEY_COST, QUERY_COST = 6, 5
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
        """``pieces`` as ``split_by_chunk`` gives them; ``bounds`` (chunks, 2)."""
        cut, of, key_chunk = cut_by_windows(pieces, bounds)
        return cls(cut, query_chunk[of], key_chunk, areas(cut))


@dataclass(frozen=True, eq=False)
class Moves:
    """``rank_of_cell`` computes it; ``cost`` and ``cost_of_keys``: of this choice, and where only keys move, in rows
    times heads times ``KEY_COST`` or ``QUERY_COST``; ``loads`` (ranks,): areas."""

    rank_of_cell: Ints
    cost: int
    cost_of_keys: int
    loads: Ints

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


def choose_moves(cells: Cells, owner: Ints, world: int, heads: tuple[int, int], most_load: float) -> Moves:
    """``owner`` (chunks,): ranks; ``heads``: query and kv heads; ``most_load``: area that a rank may have if moves give
    it more than it had, at most. Pure: every rank finds the same. ``UnsupportedError`` without the planner library."""
    at_queries, at_keys = owner[cells.query_chunk], owner[cells.key_chunk]
    is_remote = at_queries != at_keys
    # Vertices: a chunk of queries at the rank of keys, and a chunk of keys at the rank of queries.
    query_vertex, query_of = _vertices(cells.query_chunk, at_keys, world, is_remote)
    key_vertex, key_of = _vertices(cells.key_chunk, at_queries, world, is_remote)
    query_cost = QUERY_COST * heads[0] * _rows(cells.pieces[is_remote][:, [Q0, Q1]], query_of, len(query_vertex))
    key_cost = KEY_COST * heads[1] * _rows(cells.pieces[is_remote][:, [K0, K1]], key_of, len(key_vertex))
    edge, edge_of = np.unique(query_of * len(key_vertex) + key_of, return_inverse=True)
    query_of, key_of = edge // max(len(key_vertex), 1), edge % max(len(key_vertex), 1)
    moves_query, moves_key = vertex_cover(query_cost, key_cost, query_of, key_of)
    state = _State(
        query_of, key_of, query_cost, key_cost, key_vertex[key_of] % world, query_vertex[query_of] % world,
        sum_by(edge_of.reshape(-1), cells.area[is_remote], len(edge)), moves_query[query_of] & ~moves_key[key_of],
        sum_by(at_queries[~is_remote], cells.area[~is_remote], world),
    )  # fmt: skip
    state.balance(max(most_load, float(sum_by(at_queries, cells.area, world).max(initial=0))))
    rank_of_cell = at_queries.copy()
    rank_of_cell[is_remote] = np.where(state.at_keys[edge_of.reshape(-1)], at_keys[is_remote], at_queries[is_remote])
    return Moves(rank_of_cell, state.cost(), int(key_cost.sum()), sum_by(rank_of_cell, cells.area, world))


def _vertices(chunk: Ints, rank: Ints, world: int, is_remote: Bools) -> tuple[Ints, Ints]:
    """The pairs of chunk and rank, and which each remote cell has."""
    found, index = np.unique(chunk[is_remote] * world + rank[is_remote], return_inverse=True)
    return found, index.reshape(-1)


def _rows(ranges: Ints, group: Ints, num_groups: int) -> Ints:
    """Rows in the union of the ranges of each group."""
    if not len(ranges):
        return np.zeros(num_groups, dtype=np.int64)
    stride = int(ranges.max()) + 2  # so ranges of two groups never touch
    union = merge_intervals(ranges + (group * stride)[:, None])
    return sum_by(union[:, 0] // stride, union[:, 1] - union[:, 0], num_groups)


class _State:
    """Edges, each the cells of one query chunk and one key chunk of two ranks: who computes them, ``at_keys`` or else
    the owner of the queries; and what the ranks have to do."""

    def __init__(
        self, query_of: Ints, key_of: Ints, query_cost: Ints, key_cost: Ints, query_rank: Ints, key_rank: Ints,
        area: Ints, at_keys: Bools, local: Ints,
    ) -> None:  # fmt: skip
        self.query_of, self.key_of, self.query_cost, self.key_cost = query_of, key_of, query_cost, key_cost
        self.query_rank, self.key_rank, self.area, self.at_keys, self.local = query_rank, key_rank, area, at_keys, local

    def _loads(self) -> Ints:
        rank = np.where(self.at_keys, self.key_rank, self.query_rank)
        return self.local + sum_by(rank, self.area, len(self.local))

    def _users(self) -> tuple[Ints, Ints]:
        """Edges for which each query vertex, and each key vertex, has to move."""
        queries = np.bincount(self.query_of[self.at_keys], minlength=len(self.query_cost))
        keys = np.bincount(self.key_of[~self.at_keys], minlength=len(self.key_cost))
        return queries, keys

    def cost(self) -> int:
        queries, keys = self._users()
        return int(self.query_cost[queries > 0].sum() + self.key_cost[keys > 0].sum())

    def balance(self, most: float) -> None:
        """Makes the heaviest rank lighter until none is above ``most``: sends chunks of queries back to their owners,
        or its own queries to other keys, that first which costs the least for the area. If it cannot, or if that costs
        all that was saved, no query moves."""
        loads = self._loads()
        for _ in range(_MOST_STEPS * len(loads)):
            rank = int(loads.argmax())
            if loads[rank] <= most:
                break
            offers = self._offers(rank, loads, to_keys=False), self._offers(rank, loads, to_keys=True)
            (price, back), (other_price, away) = offers
            if min(price, other_price) == np.inf:
                break
            edges = back if price <= other_price else away
            self.at_keys[edges] = not self.at_keys[edges[0]]
            loads = self._loads()
        if loads.max(initial=0) > most or self.cost() >= self.key_cost.sum():
            self.at_keys[:] = False

    def _offers(self, rank: int, loads: Ints, to_keys: bool) -> tuple[float, Ints]:
        """``rank`` could hand over the edges of a query vertex, to the owners of the keys or of the queries. Finds the
        vertex that costs least for each pair, and returns this price, inf for none, and its edges."""
        giver, taker = (self.query_rank, self.key_rank) if to_keys else (self.key_rank, self.query_rank)
        edges = np.flatnonzero((self.at_keys != to_keys) & (giver == rank))
        vertices, of = np.unique(self.query_of[edges], return_inverse=True)
        of, (queries, keys) = of.reshape(-1), self._users()
        area, key = sum_by(of, self.area[edges], len(vertices)), self.key_of[edges]
        if to_keys:
            saved = sum_by(of, self.key_cost[key] * (keys[key] == 1), len(vertices))
            cost = self.query_cost[vertices] * (queries[vertices] == 0) - saved
        else:
            cost = sum_by(of, self.key_cost[key] * (keys[key] == 0), len(vertices)) - self.query_cost[vertices]
        to = np.zeros(len(vertices), dtype=np.int64)
        to[of] = taker[edges]
        # The heavier of the two has less than before, so this ends.
        fits = (area > 0) & (loads[to] + area < loads[rank])
        if not fits.any():
            return np.inf, edges[:0]
        best = int(np.argmin(np.where(fits, cost / np.maximum(area, 1), np.inf)))
        return float(cost[best] / area[best]), edges[of == best]


__all__ = ["KEY_COST", "QUERY_COST", "Cells", "Moves", "choose_moves"]
