# SPDX-License-Identifier: Apache-2.0
"""One rank's part of a plan for attention in one launch: local keys and those of all stages in one coordinate space.

Keys in the kernel's coordinates: local ones from 0, then a gap that nobody sees, then the *box*, the memory into which
other ranks push their rows, from ``base`` on. Each owner has consecutive tiles of 128 rows of the box, the last one
padded with zeros. Ranks send to the next rank first, then the one after; owners lie in the box so that the first to
arrive comes last, because the forward kernel walks from the right.

Gradients of remote keys travel back the same way: every owner has a second box with tiles for each rank that got its
rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from magi_attention.common.intervals import Packing, intersect_intervals, merge_intervals, total_length
from magi_attention.common.slices import SliceTable
from magi_attention.meta.plan import Plan, local_slices

TILE = 128
_MAX_PIECE_ROWS = 32


@dataclass(frozen=True, eq=False)
class OneLaunchPart:
    """All arrays are int32 unless said otherwise; W ranks, T tiles in the box.

    ``slices``: local query rows, keys in the kernel's coordinates. ``owners`` (T,): rank of each tile. ``pieces`` (N,
    4): rows that this rank pushes: (rank, first local row or -1 for zeros, first row in its box, rows), in the order
    of sending; ``pieces_for`` (W,) how many for each rank. ``target_rows`` (T,): first row of each tile in its owner's
    box of gradients. ``places`` (W, local rows): row in this rank's box of gradients of what a rank adds to a local
    row, -1 if nothing; ``senders`` (W,) 1 for ranks that add anything. ``box_rows`` and ``grad_rows``: rows that the
    boxes of all ranks need.
    """

    rank: int
    world: int
    local_rows: int
    base: int
    rows: int
    slices: SliceTable
    owners: np.ndarray
    pieces: np.ndarray
    pieces_for: np.ndarray
    target_rows: np.ndarray
    places: np.ndarray
    senders: np.ndarray
    box_rows: int
    grad_rows: int

    @property
    def total_keys(self) -> int:
        """Keys in the kernel's coordinates, gap included."""
        return self.base + self.rows

    @property
    def rows_sent(self) -> int:
        return int(self.pieces[self.pieces[:, 1] >= 0, 3].sum())


class OneLaunchPlan:
    """What the parts of all ranks share: who needs which rows of whom, and where they lie in the boxes."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.world = plan, plan.cp_size
        self._hosts = [plan.host_ranges(rank) for rank in range(self.world)]

    @cached_property
    def needs(self) -> list[list[np.ndarray]]:
        """``needs[r][s]``: global key ranges of rank s that rank r reads."""
        empty = np.zeros((0, 2), dtype=np.int64)
        needs = []
        for stages in self.plan.stage_ranges:
            wanted = merge_intervals(np.concatenate([empty, *stages]))
            needs.append([intersect_intervals(wanted, host) for host in self._hosts])
        return needs

    @cached_property
    def counts(self) -> np.ndarray:
        """``counts[r, s]``: rows of rank s that rank r reads, int64."""
        return np.array([[total_length(ranges) for ranges in row] for row in self.needs], dtype=np.int64)

    @cached_property
    def box_starts(self) -> np.ndarray:
        """``box_starts[r, s]``: first row of the tiles of rank s in the box of rank r."""
        starts = np.zeros((self.world, self.world), dtype=np.int64)
        for r in range(self.world):
            at = 0
            for step in range(self.world - 1, 0, -1):
                s = (r - step) % self.world
                starts[r, s] = at
                at += padded(self.counts[r, s])
        return starts

    @cached_property
    def grad_starts(self) -> np.ndarray:
        """``grad_starts[s, r]``: first row of what rank r adds, in the box of gradients of rank s."""
        sizes = padded(self.counts.T)
        return np.cumsum(sizes, axis=1) - sizes

    def part(self, rank: int) -> OneLaunchPart:
        """The part of ``rank``."""
        host = Packing(self._hosts[rank])
        base = padded(host.length) + TILE
        owners, targets, slices = self._box(rank, base)
        pieces = self._pieces(rank, host)
        places = np.full((self.world, host.length), -1, dtype=np.int32)
        for r in range(self.world):
            rows = _rows_of(host, self.needs[r][rank])
            places[r, rows] = self.grad_starts[rank, r] + np.arange(len(rows))
        return OneLaunchPart(
            rank, self.world, host.length, base, int(padded(self.counts[rank]).sum()), slices, owners,
            pieces, np.bincount(pieces[:, 0], minlength=self.world).astype(np.int32), targets, places,
            (self.counts[:, rank] > 0).astype(np.int32), int(padded(self.counts).sum(axis=1).max()),
            int(padded(self.counts).sum(axis=0).max()),
        )  # fmt: skip

    def _box(self, rank: int, base: int) -> tuple[np.ndarray, np.ndarray, SliceTable]:
        """Owners and target rows of the tiles of a rank's box; its slices in the kernel's coordinates."""
        plan, world = self.plan, self.world
        mine, host = plan.slices_of(rank), Packing(self._hosts[rank])
        tables = [plan.rank(rank).host.array]
        num_tiles = int(padded(self.counts[rank]).sum()) // TILE
        owners, targets = np.zeros(num_tiles, dtype=np.int32), np.zeros(num_tiles, dtype=np.int32)
        for s in range(world):
            if not self.counts[rank, s]:
                continue
            start, size = self.box_starts[rank, s], padded(self.counts[rank, s])
            tiles = slice(start // TILE, (start + size) // TILE)
            owners[tiles] = s
            targets[tiles] = self.grad_starts[s, rank] + np.arange(0, size, TILE)
            shift = np.array([0, 0, base + start, base + start, 0])
            tables.append(local_slices(mine, host, Packing(self.needs[rank][s])) + shift)
        return owners, targets, SliceTable(np.concatenate(tables))

    def _pieces(self, rank: int, host: Packing) -> np.ndarray:
        found: list[tuple[int, int, int, int]] = []
        for step in range(1, self.world):
            r = (rank + step) % self.world
            at = int(self.box_starts[r, rank])
            for start, end in host.localize(self.needs[r][rank]).tolist():
                for row in range(start, end, _MAX_PIECE_ROWS):
                    size = min(_MAX_PIECE_ROWS, end - row)
                    found.append((r, row, at, size))
                    at += size
            pad = -self.counts[r, rank] % TILE
            if pad:
                found.append((r, -1, at, int(pad)))
        return np.array(found, dtype=np.int32).reshape(-1, 4)


def padded(rows):
    """Rounded up to whole tiles."""
    return -(-rows // TILE) * TILE


def _rows_of(host: Packing, ranges: np.ndarray) -> np.ndarray:
    """Local rows of global ranges, in order."""
    local = host.localize(ranges)
    return np.concatenate([np.arange(a, b) for a, b in local] or [np.zeros(0, dtype=np.int64)])
