# SPDX-License-Identifier: Apache-2.0
"""One rank's part of a plan for attention in one launch over nodes: what ``fused_layout`` is for one NVLink domain.

Remote keys have the same coordinates, but their tiles have no owner: they are rows of ``OUT`` of a cast over nodes,
which come by whatever link, and only behind the last row zeros fill a tile. All gradients of remote keys go to one
place on this rank, from where the reduce of the same transfers takes them. Signals are the groups of ``OUT``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.intervals import Packing, ramps
from magi_attention.common.two_level.nodes import Nodes
from magi_attention.common.two_level.routes import Routes, Rows
from magi_attention.common.two_level.transfers import TransferPlan, plan_routes
from magi_attention.meta.one_launch.fused_layout import (
    TILE,
    RankLayout,
    base_of,
    group_of_tile,
    kernel_slices,
    padded,
    remote_keys,
)
from magi_attention.meta.one_launch.row_runs import RowRuns
from magi_attention.meta.plan import Plan


@dataclass(frozen=True, eq=False)
class RankNodeLayout(RankLayout):
    """``received``: rows of ``OUT`` that come from other ranks; those behind them, up to ``rows``, nobody sends."""

    received: int


class NodeLayout:
    """What the parts of all ranks share: where rows go, in blocks of ``block_rows`` at most."""

    def __init__(self, plan: Plan, nodes: Nodes, block_rows: int) -> None:
        self.plan, self.nodes, self.block_rows = plan, nodes, block_rows

    @cached_property
    def runs(self) -> list[RowRuns]:
        """The remote keys of each rank; sources are global rows."""
        found = []
        for rank in range(self.plan.cp_size):
            cut = remote_keys(self.plan, rank)
            rows = cut[:, 1] - cut[:, 0]
            found.append(RowRuns(self.plan.owner_of(cut[:, 0]), cut[:, 0], np.cumsum(rows) - rows, rows))
        return found

    @cached_property
    def transfers(self) -> TransferPlan:
        """The cast and the reduce of all ranks."""
        hosts = [Packing(self.plan.host_ranges(rank)) for rank in range(self.plan.cp_size)]
        pairs = [[self._rows_of(runs, s, host) for s, host in enumerate(hosts)] for runs in self.runs]
        needed = [[of_reader[s][0] for of_reader in pairs] for s in range(len(hosts))]
        placed = [[places for _, places in of_reader] for of_reader in pairs]
        tiles = [self._num_tiles(rank) for rank in range(len(hosts))]
        ends = [TILE * (1 + np.flatnonzero(np.diff(group_of_tile(n), append=-1))) for n in tiles]
        outputs = [TILE * n for n in tiles]
        routes = Routes([host.length for host in hosts], outputs, needed, placed, ends)
        return plan_routes(routes, self.nodes, self.block_rows)

    def part(self, rank: int) -> RankNodeLayout:
        """The part of ``rank``."""
        runs, tiles = self.runs[rank], self._num_tiles(rank)
        local_rows, received = Packing(self.plan.host_ranges(rank)).length, int(runs.rows.sum())
        base, groups = base_of(local_rows), group_of_tile(tiles)
        rows = np.bincount(groups, minlength=1 + int(groups.max(initial=-1)))
        return RankNodeLayout(
            local_rows, base, TILE * tiles, kernel_slices(self.plan, rank, base, runs), groups.astype(np.int32),
            np.zeros(tiles, np.int32), TILE * np.arange(tiles, dtype=np.int32), self._src_rows(rank, local_rows),
            np.zeros(1, np.int32), TILE * np.cumsum(rows), received,
        )  # fmt: skip

    def _num_tiles(self, rank: int) -> int:
        tiles: int = padded(int(self.runs[rank].rows.sum())) // TILE
        return tiles

    def _rows_of(self, runs: RowRuns, source: int, host: Packing) -> tuple[Rows, Rows]:
        """The local rows of ``source`` that a rank reads, and where in its output they lie."""
        mine = runs.of(np.flatnonzero(runs.owner == source))
        ranges = np.stack([mine.source, mine.source + mine.rows], axis=1)
        return ramps(host.localize(ranges)[:, 0], mine.rows), ramps(mine.at, mine.rows)

    def _src_rows(self, rank: int, local_rows: int) -> NDArray[np.int32]:
        """Where in GRADS what a rank adds to each local row lies; that of its node, for a carrier."""
        part = self.transfers.ranks[rank]
        src_rows, first = np.full((len(part.returns), local_rows), -1, np.int32), 0
        for sender, rows in enumerate(part.returns):
            if sender != rank:
                src_rows[sender, rows] = np.arange(first, first + rows.size)
                first += rows.size
        return src_rows
