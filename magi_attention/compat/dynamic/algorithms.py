# SPDX-License-Identifier: Apache-2.0
"""Algorithms that say which rank computes which rectangle of a mask, where queries may travel as well as keys.

The names and ``solve`` are the published ones; what is behind them is written from their descriptions. All of them are
deterministic and solve on each rank alike without a collective. Those of a search need the planner library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from magi_attention.common.enum import DynamicAttnAlgType
from magi_attention.common.ranges import AttnRanges
from magi_attention.common.scalars import as_int
from magi_attention.compat.dynamic.grid import Grid
from magi_attention.compat.values.rectangles import AttnRectangles
from magi_attention.errors import ContractError
from magi_attention.meta.solver.placement import Ints, Placement
from magi_attention.meta.solver.query_moves import place

_MOST_LOAD = 1.10  # of a rank, over the mean


@dataclass(frozen=True)
class DynamicAttnAlgorithm(ABC):
    """Base of all; one of your own defines ``type`` and ``solve``."""

    @property
    @abstractmethod
    def type(self) -> DynamicAttnAlgType:
        """Which algorithm it is."""

    @abstractmethod
    def solve(
        self,
        rects: AttnRectangles,
        host_ranges_q: list[AttnRanges],
        host_ranges_k: list[AttnRanges],
        num_heads_q: int,
        num_heads_kv: int,
        num_heads_group: int,
        bucket_per_rank: list[AttnRectangles],
    ) -> None:
        """Fills ``bucket_per_rank[r]`` with the rectangles that rank r computes, each pair of ``rects`` once.

        ``host_ranges_*[r]`` are the rows that rank r holds. A row of queries costs ``num_heads_q``, a row of keys
        ``num_heads_kv``. With ``num_heads_group`` above 1 the rows are that many head groups of one sequence, one
        behind the other.
        """


@dataclass(frozen=True)
class _GridAlgorithm(DynamicAttnAlgorithm):
    """``debug_print``: one line for each solution, with what travels and the heaviest rank over the mean."""

    _type: ClassVar[DynamicAttnAlgType]
    debug_print: bool = False

    @property
    def type(self) -> DynamicAttnAlgType:
        """Which algorithm it is."""
        return self._type

    def solve(
        self,
        rects: AttnRectangles,
        host_ranges_q: list[AttnRanges],
        host_ranges_k: list[AttnRanges],
        num_heads_q: int,
        num_heads_kv: int,
        num_heads_group: int,
        bucket_per_rank: list[AttnRectangles],
    ) -> None:
        """As of the base. ``ContractError``: host ranges overlap or leave out a pair of the mask, or the lists have
        not one entry for each rank."""
        if len(bucket_per_rank) != len(host_ranges_q):
            raise ContractError(f"{len(bucket_per_rank)} buckets for {len(host_ranges_q)} ranks; give one each.")
        groups = as_int(num_heads_group, "num_heads_group", at_least=1)
        heads = as_int(num_heads_q, "num_heads_q", at_least=1), as_int(num_heads_kv, "num_heads_kv", at_least=1)
        grid = Grid.cut(rects, host_ranges_q, host_ranges_k, heads)
        rank = self._ranks(grid, groups)
        grid.fill(rank, bucket_per_rank)
        if self.debug_print:
            found = Placement(grid.pairs, grid.world, rank)
            over = found.heaviest / grid.mean if grid.mean else 1.0
            print(f"{type(self).__name__}: {found.cost():,} rows times heads travel, the heaviest rank has {over:.3f}.")

    @abstractmethod
    def _ranks(self, grid: Grid, groups: int) -> Ints:
        """(pairs,): the rank of each pair of host ranges."""


class NCQDynamicAttnAlgorithm(_GridAlgorithm):
    """Queries and outputs never move: the owner of the queries computes them, as without this solver."""

    _type = DynamicAttnAlgType.NON_COMMUNICATION_QO

    def _ranks(self, grid: Grid, groups: int) -> Ints:
        return grid.pairs.queries.at


class GRGDynamicAttnAlgorithm(_GridAlgorithm):
    """Greedy, from random orders (seed 42): each pair goes where it adds least to what travels, among ranks that stay
    below 1.1 of the mean. Then ever smaller random shares of the best are placed anew."""

    _type = DynamicAttnAlgType.GREEDY_RANDOM_GRID

    def _ranks(self, grid: Grid, groups: int) -> Ints:
        rng, count = np.random.default_rng(42), len(grid.pairs.area)
        empty = np.full(count, -1, dtype=np.int64)
        tries = int(np.clip(10_000 // max(count, 1), 2, 32))
        best = min((self._greedy(grid, empty, rng.permutation(count)) for _ in range(tries)), key=self._badness(grid))
        for share in np.linspace(0.5, 0.05, tries):
            again = rng.permutation(count)[: max(int(share * count), 1)]
            rank = best.rank.copy()
            rank[again] = -1
            best = min(best, self._greedy(grid, rank, again), key=self._badness(grid))
        return best.rank

    @staticmethod
    def _badness(grid: Grid):
        return lambda found: (max(found.heaviest - _MOST_LOAD * grid.mean, 0), found.cost())

    @staticmethod
    def _greedy(grid: Grid, rank: Ints, order: Ints) -> Placement:
        found = Placement(grid.pairs, grid.world, rank)
        for pair in order.reshape(-1, 1):
            load = found.loads + grid.pairs.area[pair]
            # First whether it has room, then what it adds, then its load.
            is_over = np.maximum(load - _MOST_LOAD * grid.mean, 0)
            found.move(pair, int(np.lexsort((load, found.entering(pair)[0], is_over))[0]))
        return found


class QueryMovesDynamicAttnAlgorithm(_GridAlgorithm):
    """Not a published one: what plans with ``query_moves`` use, grids of ranks and a vertex cover, and with them what
    GRG finds, all balanced to 1.1 of the mean and improved (``meta/solver/query_moves.py``). Needs the planner
    library."""

    _type = DynamicAttnAlgType.QUERY_MOVES

    def _ranks(self, grid: Grid, groups: int) -> Ints:
        more = [GRGDynamicAttnAlgorithm()._ranks(grid, groups)]
        found, _ = place(grid.pairs, grid.world, _MOST_LOAD * grid.mean, np.inf, groups, more)
        assert found is not None, "any load is allowed"
        return found.rank


class SNFDynamicAttnAlgorithm(QueryMovesDynamicAttnAlgorithm):
    """Finds what ``QueryMovesDynamicAttnAlgorithm`` finds."""

    _type = DynamicAttnAlgType.SIMPLEX_NETWORK_FLOW


class FastSNFDynamicAttnAlgorithm(SNFDynamicAttnAlgorithm):
    """The same."""

    _type = DynamicAttnAlgType.FAST_SIMPLEX_NETWORK_FLOW


class BinaryGreedyDynamicAttnAlgorithm(QueryMovesDynamicAttnAlgorithm):
    """Finds what ``QueryMovesDynamicAttnAlgorithm`` finds."""

    _type = DynamicAttnAlgType.BINARY_GREEDY


class BinaryGreedyParallelDynamicAttnAlgorithm(BinaryGreedyDynamicAttnAlgorithm):
    """The same, with neither threads nor a broadcast."""

    _type = DynamicAttnAlgType.BINARY_GREEDY_PARALLEL


__all__ = [
    "BinaryGreedyDynamicAttnAlgorithm",
    "BinaryGreedyParallelDynamicAttnAlgorithm",
    "DynamicAttnAlgorithm",
    "FastSNFDynamicAttnAlgorithm",
    "GRGDynamicAttnAlgorithm",
    "NCQDynamicAttnAlgorithm",
    "QueryMovesDynamicAttnAlgorithm",
    "SNFDynamicAttnAlgorithm",
]
