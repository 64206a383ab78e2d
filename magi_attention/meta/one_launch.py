# SPDX-License-Identifier: Apache-2.0
"""One rank's part of a plan for attention in one launch: local keys and those of all stages in one coordinate space.

Keys in the kernel's coordinates: local ones from 0, then a gap that nobody sees, then from ``base`` on the *box*, the
memory into which other ranks push their rows, in the order of the sequence, beginning behind the longest run of the
rank's own rows: so ranks that all read everything do not all want the rows of one rank first. The box is made of tiles
of 128 rows with one owner each; where the owner changes, the last tile is padded with zeros. Tiles form groups, and all
ranks send the last group first, because the forward kernel walks from the right; within a group they serve all readers
at the same time. What one rank sends one reader of one group is a *slot*; slots of a box are numbered group by group.

Gradients of remote keys travel back the same way: every owner has a second box with tiles for each rank that got its
rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from magi_attention.common.intervals import Packing, merge_intervals, split_at
from magi_attention.common.slices import SliceTable, merge
from magi_attention.meta.plan import Plan, local_slices

TILE = 128
MAX_GROUPS = 6  # to 8 (MAGI_BOX_GROUPS): with 3 a causal forward waits longer, more than 5 win nothing
_GROUP_TILES = 4  # smaller groups are not worth a slot
_MAX_PIECE_ROWS = 32


@dataclass(frozen=True, eq=False)
class OneLaunchPart:
    """All arrays are int32 but ``slot_rows``; W ranks, T tiles and R slots in this rank's box.

    ``slices``: local query rows, keys in the kernel's coordinates. ``arrivals`` (T,): slot of each tile, ``owners``
    (T,) its rank. ``pieces`` (N, 4): rows that this rank pushes, in the order of sending: (own slot, first local row
    or -1 for zeros, first row in the box there, rows); ``slots`` (S, 4): (rank, slot in its box, pieces, 0) of each
    own slot. ``target_rows`` (T,): first row of each tile in its owner's box of gradients. ``places`` (W, local rows):
    row in this rank's box of gradients of what a rank adds to a local row, -1 if nothing; ``senders`` (W,) 1 for ranks
    that add anything. ``box_rows`` and ``grad_rows``: rows that the boxes of all ranks need. ``slot_rows`` (R,):
    rows that its sender has sent to all, or this rank has received, when a slot of the box is complete, whichever is
    more: how late it is.
    """

    rank: int
    world: int
    local_rows: int
    base: int
    rows: int
    slices: SliceTable
    arrivals: np.ndarray
    owners: np.ndarray
    pieces: np.ndarray
    slots: np.ndarray
    target_rows: np.ndarray
    places: np.ndarray
    senders: np.ndarray
    box_rows: int
    grad_rows: int
    slot_rows: np.ndarray

    @property
    def rank_of_slot(self) -> dict[int, int]:
        """Whose rows each slot of this rank's box brings."""
        return dict(zip(self.arrivals.tolist(), self.owners.tolist()))

    @property
    def total_keys(self) -> int:
        """Keys in the kernel's coordinates, gap included."""
        return self.base + self.rows


@dataclass(frozen=True)
class _Run:
    """Consecutive tiles of one owner: the global key ranges in them, and their first row in the box."""

    owner: int
    start: int
    keys: Packing

    @property
    def rows(self) -> int:
        return self.keys.length


@dataclass(eq=False)
class _Box:
    """The box of one rank."""

    runs: list[_Run]
    owners: np.ndarray  # of each tile
    arrivals: np.ndarray
    num_slots: int
    slot_of: dict[tuple[int, int], int] = field(default_factory=dict)  # (group, owner) -> slot


class OneLaunchPlan:
    """What the parts of all ranks share: where the rows of whom lie in the boxes."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.world = plan, plan.cp_size

    @cached_property
    def boxes(self) -> list[_Box]:
        """Of all ranks."""
        return [self._box(rank) for rank in range(self.world)]

    @cached_property
    def grad_starts(self) -> np.ndarray:
        """``[s, r]``: first row of what rank r adds, in the box of gradients of rank s; the last column is its size."""
        tiles = np.array([np.bincount(box.owners, minlength=self.world) for box in self.boxes], dtype=np.int64).T
        return TILE * np.concatenate([np.zeros((self.world, 1), dtype=np.int64), np.cumsum(tiles, axis=1)], axis=1)

    def part(self, rank: int) -> OneLaunchPart:
        """The part of ``rank``."""
        host, box = Packing(self.plan.host_ranges(rank)), self.boxes[rank]
        base = padded(host.length) + TILE
        pieces, slots = self._pieces(rank, host)
        targets = _target_rows(box.owners, self.grad_starts[:, rank])
        places = np.full((self.world, host.length), -1, dtype=np.int32)
        for r, other in enumerate(self.boxes):
            to = _target_rows(other.owners, self.grad_starts[:, r])
            for run in other.runs:
                if run.owner == rank:
                    in_box = run.start + np.arange(run.rows)
                    places[r, _rows_of(host, run.keys.ranges)] = to[in_box // TILE] + in_box % TILE
        return OneLaunchPart(
            rank, self.world, host.length, base, TILE * len(box.owners), self._slices(rank, host, base), box.arrivals,
            box.owners, pieces, slots, targets, places, (places >= 0).any(axis=1).astype(np.int32),
            TILE * max(len(b.owners) for b in self.boxes), int(self.grad_starts[:, -1].max()),
            self._slot_rows(rank),
        )  # fmt: skip

    def _box(self, rank: int) -> _Box:
        plan = self.plan
        wanted = merge_intervals(np.concatenate([np.zeros((0, 2), dtype=np.int64), *plan.stage_ranges[rank]]))
        cut = _rotated(split_at(wanted, plan.chunk_ranges[:, 0]), plan.host_ranges(rank))
        owner = plan.owner_of(cut[:, 0]) if len(cut) else np.zeros(0, dtype=np.int64)
        edges = np.flatnonzero((np.diff(owner) != 0) | (np.diff(cut[:, 0]) < 0)) + 1
        runs, at = [], 0
        for ranges in np.split(cut, edges) if len(cut) else []:
            runs.append(_Run(int(plan.owner_of(ranges[:1, 0])[0]), at, Packing(ranges)))
            at += padded(runs[-1].rows)
        owners = np.array([run.owner for run in runs for _ in range(padded(run.rows) // TILE)], dtype=np.int32)
        return self._with_arrivals(rank, runs, owners)

    def _with_arrivals(self, rank: int, runs: list[_Run], owners: np.ndarray) -> _Box:
        groups = group_of_tile(len(owners))
        box = _Box(runs, owners, np.zeros(len(owners), dtype=np.int32), 0)
        for group in range(MAX_GROUPS):
            for step in range(1, self.world):
                owner = (rank - step) % self.world
                tiles = (groups == group) & (owners == owner)
                if tiles.any():
                    box.arrivals[tiles] = box.slot_of[group, owner] = box.num_slots
                    box.num_slots += 1
        return box

    def _slices(self, rank: int, host: Packing, base: int) -> SliceTable:
        """The rank's slices in the kernel's coordinates; neighbours in the box become one."""
        mine = self.plan.slices_of(rank)
        remote = [
            local_slices(mine, host, run.keys) + np.array([0, 0, base + run.start, base + run.start, 0])
            for run in self.boxes[rank].runs
        ]
        local = self.plan.rank(rank).host.array
        return SliceTable(np.concatenate([local, merge(np.concatenate(remote))]) if remote else local)

    def _pieces(self, rank: int, host: Packing) -> tuple[np.ndarray, np.ndarray]:
        pieces: list[tuple[int, int, int, int]] = []
        slots: list[tuple[int, int, int, int]] = []
        for group in range(MAX_GROUPS):
            queues = []
            for r, slot in self._readers(rank, group):
                mine = self._of_group(r, rank, group, host)
                queues.append([(len(slots), *piece) for piece in mine])
                slots.append((r, slot, len(mine), 0))
            pieces += _interleaved(queues)
        return _table(pieces), _table(slots)

    def _readers(self, rank: int, group: int) -> list[tuple[int, int]]:
        """(reader, slot in its box) of what ``rank`` sends of one group."""
        others = [(rank + step) % self.world for step in range(1, self.world)]
        found = ((r, self.boxes[r].slot_of.get((group, rank))) for r in others)
        return [(r, slot) for r, slot in found if slot is not None]

    @cached_property
    def _sent_rows(self) -> list[np.ndarray]:
        """For each box (R,) rows that the sender of a slot has sent when that is complete, to all ranks."""
        sent = [np.zeros(box.num_slots, dtype=np.int64) for box in self.boxes]
        for rank in range(self.world):
            rows = 0
            for group in range(MAX_GROUPS):
                readers = self._readers(rank, group)
                rows += sum(TILE * int((self.boxes[r].arrivals == slot).sum()) for r, slot in readers)
                for r, slot in readers:  # they end together
                    sent[r][slot] = rows
        return sent

    def _slot_rows(self, rank: int) -> np.ndarray:
        box = self.boxes[rank]
        received = TILE * np.cumsum(np.bincount(box.arrivals, minlength=box.num_slots))
        return np.maximum.accumulate(np.maximum(received, self._sent_rows[rank]))

    def _of_group(self, to: int, rank: int, group: int, host: Packing) -> list[tuple[int, int, int]]:
        """What ``rank`` sends of one group: (first local row or -1, first row in the box of ``to``, rows)."""
        box, found = self.boxes[to], []
        tiles = np.flatnonzero(group_of_tile(len(box.owners)) == group) * TILE
        low, high = int(tiles[0]), int(tiles[-1]) + TILE
        for run in box.runs:
            first, last = max(low, run.start), min(high, run.start + padded(run.rows))
            if run.owner != rank or first >= last:
                continue
            local = _rows_of(host, run.keys.ranges)[first - run.start : last - run.start]
            breaks = np.flatnonzero(np.diff(local) != 1) + 1
            at = first
            for rows in np.split(local, breaks) if len(local) else []:
                for i in range(0, len(rows), _MAX_PIECE_ROWS):
                    size = min(_MAX_PIECE_ROWS, len(rows) - i)
                    found.append((int(rows[i]), at, size))
                    at += size
            if at < last:
                found.append((-1, at, last - at))
        return found


def group_of_tile(num_tiles: int) -> np.ndarray:
    """(num_tiles,): the last tiles are in group 0, which is sent first."""
    groups = int(np.clip(num_tiles // _GROUP_TILES, 1, MAX_GROUPS))
    return groups - 1 - np.arange(num_tiles) * groups // max(num_tiles, 1)


def _interleaved(queues: list[list]) -> list:
    """Those of all queues, each evenly spread: readers are served at the same time, so that no two ranks that have much
    for one reader get into each other's way while links to others are idle."""
    spread = [((i + 0.5) / len(queue), n, item) for n, queue in enumerate(queues) for i, item in enumerate(queue)]
    return [item for _, _, item in sorted(spread)]


def _rotated(cut: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Ranges in the order of the sequence, but those from the longest of ``own`` on come first."""
    if not len(own):
        return cut
    pivot = own[np.argmax(own[:, 1] - own[:, 0]), 0]
    return np.roll(cut, -int(np.searchsorted(cut[:, 0], pivot)), axis=0)


def padded(rows: int) -> int:
    """Rounded up to whole tiles."""
    return -(-rows // TILE) * TILE


def _target_rows(owners: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """First row of each tile in its owner's box of gradients; tiles of one owner follow one another from its start."""
    targets = np.zeros(len(owners), dtype=np.int32)
    for owner in np.unique(owners):
        mine = owners == owner
        targets[mine] = starts[owner] + TILE * np.arange(mine.sum())
    return targets


def _table(rows: list[tuple[int, int, int, int]]) -> np.ndarray:
    return np.array(rows, dtype=np.int32).reshape(-1, 4)


def _rows_of(host: Packing, ranges: np.ndarray) -> np.ndarray:
    """Local rows of global ranges, in order."""
    cut = split_at(ranges, host.ranges.reshape(-1))
    return np.concatenate([np.arange(a, b) for a, b in host.localize(cut)] or [np.zeros(0, dtype=np.int64)])


__all__ = ["OneLaunchPart", "OneLaunchPlan"]
