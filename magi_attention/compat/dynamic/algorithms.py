# SPDX-License-Identifier: Apache-2.0
"""Algorithms that say which rank computes which rectangle of a mask, where queries may travel as well as keys.

The names and ``solve`` are the published ones; what is behind them is written from their descriptions. All of them are
deterministic, solve on each rank alike without a collective, and need no library of linear programs.
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
from magi_attention.compat.dynamic.limits import MOST_LOAD, Spread, least_limit, spread_by_flow, spread_by_sweeps
from magi_attention.compat.values.rectangles import AttnRectangles
from magi_attention.errors import ContractError
from magi_attention.meta.solver.placement import Ints, Placement
from magi_attention.meta.solver.query_moves import place


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
    below ``MOST_LOAD``. Then ever smaller random shares of the best are placed anew."""

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
        return lambda found: (max(found.heaviest - MOST_LOAD * grid.mean, 0), found.cost())

    @staticmethod
    def _greedy(grid: Grid, rank: Ints, order: Ints) -> Placement:
        found = Placement(grid.pairs, grid.world, rank)
        for pair in order.reshape(-1, 1):
            load = found.loads + grid.pairs.area[pair]
            # First whether it has room, then what it adds, then its load.
            is_over = np.maximum(load - MOST_LOAD * grid.mean, 0)
            found.move(pair, int(np.lexsort((load, found.entering(pair)[0], is_over))[0]))
        return found


class _LeastLimit(_GridAlgorithm):
    """The least limit of what a rank receives; ``_spread`` places pairs under a limit (``limits.py``)."""

    _spread: ClassVar[Spread]

    def _ranks(self, grid: Grid, groups: int) -> Ints:
        return least_limit(grid, self._spread)


class SNFDynamicAttnAlgorithm(_LeastLimit):
    """Ranks choose rows under the limit, then pairs flow to ranks that have both rows, by augmenting paths."""

    _type = DynamicAttnAlgType.SIMPLEX_NETWORK_FLOW
    _spread = staticmethod(spread_by_flow)


class FastSNFDynamicAttnAlgorithm(SNFDynamicAttnAlgorithm):
    """The same: cells are listed sparsely in both."""

    _type = DynamicAttnAlgType.FAST_SIMPLEX_NETWORK_FLOW


class BinaryGreedyDynamicAttnAlgorithm(_LeastLimit):
    """Pairs are placed greedily and in five sweeps."""

    _type = DynamicAttnAlgType.BINARY_GREEDY
    _spread = staticmethod(spread_by_sweeps)


class BinaryGreedyParallelDynamicAttnAlgorithm(BinaryGreedyDynamicAttnAlgorithm):
    """The same, and neither threads nor a broadcast: every rank finds it."""

    _type = DynamicAttnAlgType.BINARY_GREEDY_PARALLEL


class QueryMovesDynamicAttnAlgorithm(_GridAlgorithm):
    """Not a published one: what plans with ``query_moves`` use, grids of ranks and a vertex cover, and with them what
    GRG and BinaryGreedy find, all balanced to ``MOST_LOAD`` and improved (``meta/solver/query_moves.py``). Needs the
    planner library."""

    _type = DynamicAttnAlgType.QUERY_MOVES

    def _ranks(self, grid: Grid, groups: int) -> Ints:
        more = [other._ranks(grid, groups) for other in (GRGDynamicAttnAlgorithm(), BinaryGreedyDynamicAttnAlgorithm())]
        found, _ = place(grid.pairs, grid.world, MOST_LOAD * grid.mean, np.inf, groups, more)
        assert found is not None, "any load is allowed"
        return found.rank


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
