# SPDX-License-Identifier: Apache-2.0
"""One rank's part of a plan for attention in one launch: local keys and those of all stages in one coordinate space.

Keys in the kernel's coordinates: local ones from 0, then a gap that nobody sees, then from ``base`` on the *buffer*,
the memory into which other ranks put their rows, in the order of the sequence, beginning behind the longest run of the
rank's own rows: so ranks that all read everything do not all want the rows of one rank first. The buffer is made of
tiles of 128 rows with one owner each; where the owner changes, the last tile is padded with zeros. Tiles form groups,
and all ranks send the last group first, because the forward kernel walks from the right; within a group they serve all
readers at the same time. What one rank sends one reader of one group is a *signal*; signals of a buffer are numbered
group by group.

Gradients of remote keys travel back the same way: every owner has a second buffer with tiles for each rank that got its
rows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.intervals import Packing, merge_intervals, ramps, split_at
from magi_attention.common.slices import K0, K1, Q0, Q1, SliceTable, merge
from magi_attention.meta.one_launch.row_runs import RowRuns
from magi_attention.meta.plan import Plan
from magi_attention.meta.rank_plan import cut_by_windows

_Rows = TypeVar("_Rows", int, NDArray[np.int64])

TILE = 128
MAX_GROUPS = 6  # of MAGI_SYMM_SIGNALS_PER_RANK: with 3 a causal forward waits longer, more than 5 win nothing
_GROUP_TILES = 4  # smaller groups are not worth a signal
_MAX_TRANSFER_ROWS = 32


@dataclass(frozen=True, eq=False)
class RankLayout:
    """What the attention kernel of a rank sees, whatever link its remote keys come by. All arrays are int32 but
    ``signal_rows``; T tiles and R signals of remote keys, S ranks that may add gradients.

    ``slices``: local query rows, keys in the kernel's coordinates. ``arrivals`` (T,): signal of each tile, ``owners``
    (T,) to whose memory its gradients go, of the ``senders``, 1 for those that add anything to this rank's.
    ``target_rows`` (T,): first row of each tile in that memory. ``src_rows`` (S, local rows): row of what a rank adds
    to a local row, in the memory where it arrives, -1 if nothing. ``signal_rows`` (R,): rows that have been sent or
    received when a signal is complete: how late it is.
    """

    local_rows: int
    base: int
    rows: int
    slices: SliceTable
    arrivals: NDArray[np.int32]
    owners: NDArray[np.int32]
    target_rows: NDArray[np.int32]
    src_rows: NDArray[np.int32]
    senders: NDArray[np.int32]
    signal_rows: NDArray[np.int64]

    @cached_property
    def summed_tiles(self) -> NDArray[np.int32]:
        """(S,) int32: the tiles of local rows to which other ranks add."""
        rows = padded(self.local_rows)
        is_added = np.zeros(rows, dtype=bool)
        is_added[: self.local_rows] = (self.src_rows >= 0).any(axis=0)
        return np.flatnonzero(is_added.reshape(-1, TILE).any(axis=1)).astype(np.int32)

    @cached_property
    def summed(self) -> NDArray[np.int32]:
        """(local tiles,) int32: which of ``summed_tiles`` a tile is, -1 for none."""
        numbers = np.full(padded(self.local_rows) // TILE, -1, dtype=np.int32)
        numbers[self.summed_tiles] = np.arange(len(self.summed_tiles))
        return numbers

    @cached_property
    def summed_src_rows(self) -> NDArray[np.int32]:
        """(ranks, 128 S) int32: ``src_rows`` of the rows of ``summed_tiles``; behind the last row -1."""
        src_rows = np.pad(self.src_rows, ((0, 0), (0, padded(self.local_rows) - self.local_rows)), constant_values=-1)
        ranks = len(src_rows)
        return src_rows.reshape(ranks, -1, TILE)[:, self.summed_tiles].reshape(ranks, -1)

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """All arrays but the slices."""
        values = [getattr(self, f.name) for f in fields(self)]
        derived = (self.summed_tiles, self.summed, self.summed_src_rows)
        return [*(x for x in values if isinstance(x, np.ndarray)), *derived]

    @property
    def total_keys(self) -> int:
        """Keys in the kernel's coordinates, gap included."""
        return self.base + self.rows


@dataclass(frozen=True, eq=False)
class RankFusedLayout(RankLayout):
    """Ranks that address each other's memory.

    ``transfers`` (N, 4): rows that this rank puts, in the order of sending: (own signal, first local row or -1 for
    zeros, first row in the buffer there, rows); ``signals`` (S, 4): (rank, signal in its buffer, transfers, 0) of each
    own signal. ``buffer_rows`` and ``grad_rows``: rows that the buffers of all ranks need.
    """

    rank: int
    world: int
    transfers: NDArray[np.int32]
    signals: NDArray[np.int32]
    buffer_rows: int
    grad_rows: int

    @property
    def rank_of_signal(self) -> dict[int, int]:
        """Whose rows each signal of this rank's buffer brings."""
        return dict(zip(self.arrivals.tolist(), self.owners.tolist()))


@dataclass(frozen=True, eq=False)
class _RankBuffer:
    """The buffer of one rank: ``runs`` of global rows, cut at chunks; ``owners`` and ``arrivals`` of its tiles.
    ``signals`` and ``signal_rows`` (groups, W): number and rows of the signal of a group and an owner, -1 and 0 for
    none."""

    runs: RowRuns
    owners: NDArray[np.int32]
    arrivals: NDArray[np.int32]
    signals: NDArray[np.int64]
    signal_rows: NDArray[np.int64]

    @property
    def num_signals(self) -> int:
        return int(self.signals.max(initial=-1)) + 1


class FusedLayout:
    """What the parts of all ranks share: where the rows of whom lie in the buffers."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.world = plan, plan.cp_size

    @cached_property
    def buffers(self) -> list[_RankBuffer]:
        """The buffers of all ranks."""
        return [self._buffer(rank) for rank in range(self.world)]

    @cached_property
    def grad_starts(self) -> NDArray[np.int64]:
        """``[s, r]``: first row of what rank r adds, in the buffer of gradients of rank s; the last column is its
        size."""
        tiles = np.array(
            [np.bincount(buffer.owners, minlength=self.world) for buffer in self.buffers], dtype=np.int64
        ).T
        return TILE * np.concatenate([np.zeros((self.world, 1), dtype=np.int64), np.cumsum(tiles, axis=1)], axis=1)

    def part(self, rank: int) -> RankFusedLayout:
        """The part of ``rank``."""
        host, buffer = Packing(self.plan.host_ranges(rank)), self.buffers[rank]
        base = base_of(host.length)
        sent = [self._sent_to(reader, rank, host) for reader in range(self.world)]
        transfers, signals = self._transfers(rank, sent)
        src_rows = self._src_rows(rank, sent, host.length)
        return RankFusedLayout(
            host.length, base, TILE * len(buffer.owners), kernel_slices(self.plan, rank, base, buffer.runs),
            buffer.arrivals, buffer.owners, self._target_rows(rank), src_rows,
            np.logical_or.reduce(src_rows >= 0, axis=1).astype(np.int32), self._signal_rows(rank),
            rank, self.world, transfers, signals, TILE * max(len(b.owners) for b in self.buffers),
            int(self.grad_starts[:, -1].max()),
        )  # fmt: skip

    def _buffer(self, rank: int) -> _RankBuffer:
        plan = self.plan
        cut = remote_keys(plan, rank)
        if not len(cut):
            nothing = np.zeros(0, dtype=np.int64)
            return self._with_signals(rank, RowRuns(nothing, nothing, nothing, nothing), nothing)
        owner, rows = plan.owner_of(cut[:, 0]), cut[:, 1] - cut[:, 0]
        # Runs of tiles of one owner, the last of which is padded.
        first = np.flatnonzero(np.concatenate([[True], (np.diff(owner) != 0) | (np.diff(cut[:, 0]) < 0)]))
        run_rows = np.add.reduceat(rows, first)
        run_ends = np.cumsum(padded(run_rows))
        run_at, counts = run_ends - padded(run_rows), np.diff(np.append(first, len(cut)))
        before = np.cumsum(rows) - rows
        at = before + np.repeat(run_at - before[first], counts)
        short = np.flatnonzero(run_rows % TILE)
        data = RowRuns(owner, cut[:, 0], at, rows)
        zeros_at = (run_at + run_rows)[short]
        zeros = RowRuns(owner[first[short]], np.full(len(short), -1), zeros_at, run_ends[short] - zeros_at)
        both = RowRuns(*map(np.concatenate, zip(data, zeros)))
        return self._with_signals(rank, both.of(np.argsort(both.at)), np.repeat(owner[first], padded(run_rows) // TILE))

    def _with_signals(self, rank: int, runs: RowRuns, owners: NDArray[np.int64]) -> _RankBuffer:
        """Slots are numbered group by group, in each by how far their owner is before ``rank``."""
        groups, world = group_of_tile(len(owners)), self.world
        used, arrivals = np.unique(groups * world + (rank - owners) % world, return_inverse=True)
        group, owner = used // world, (rank - used % world) % world
        signals, rows = np.full((MAX_GROUPS, world), -1), np.zeros((MAX_GROUPS, world), dtype=np.int64)
        signals[group, owner] = np.arange(len(used))
        rows[group, owner] = TILE * np.bincount(arrivals, minlength=len(used))
        return _RankBuffer(runs, owners.astype(np.int32), arrivals.astype(np.int32), signals, rows)

    def _sent_to(self, reader: int, rank: int, host: Packing) -> RowRuns:
        """What ``rank`` sends to the buffer of ``reader``; sources are local rows."""
        found = self.buffers[reader].runs
        mine = found.of(np.flatnonzero(found.owner == rank))
        source, data = mine.source.copy(), np.flatnonzero(mine.source >= 0)
        rows = np.stack([mine.source, mine.source + mine.rows], axis=1)[data]
        source[data] = host.localize(rows)[:, 0]
        return mine._replace(source=source).joined()

    def _transfers(self, rank: int, sent: list[RowRuns]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Readers of a group are served evenly: no two ranks that have much for one of them get into each other's way
        while links to others are idle."""
        signals, found = [], []
        for step in range(1, self.world):
            reader = (rank + step) % self.world
            groups = group_of_tile(len(self.buffers[reader].owners))
            transfers = sent[reader].cut_at(TILE * (1 + np.flatnonzero(np.diff(groups)))).cut_into(_MAX_TRANSFER_ROWS)
            group = groups[transfers.at // TILE]
            counts = np.bincount(group, minlength=MAX_GROUPS)
            # They lie group by group, the last group first.
            number = np.arange(len(group)) - (np.cumsum(counts[::-1])[::-1] - counts)[group]
            key = group * self.world + step
            found.append((key, (number + 0.5) / counts[group], transfers.source, transfers.at, transfers.rows))
            there = np.flatnonzero(counts)
            numbers = self.buffers[reader].signals[there, rank]
            signals.append((there * self.world + step, np.full(len(there), reader), numbers, counts[there]))
        if not found:  # one rank
            return np.zeros((0, 4), dtype=np.int32), np.zeros((0, 4), dtype=np.int32)
        signal_key, *signal = map(np.concatenate, zip(*signals))
        key, turn, *transfer = map(np.concatenate, zip(*found))
        by_key, in_turns = np.argsort(signal_key), np.lexsort((key, turn, key // self.world))
        own = np.searchsorted(signal_key[by_key], key)
        return (
            np.stack([own, *transfer], axis=1)[in_turns].astype(np.int32),
            np.stack([*signal, np.zeros_like(signal_key)], axis=1)[by_key].astype(np.int32),
        )

    def _src_rows(self, rank: int, sent: list[RowRuns], local_rows: int) -> NDArray[np.int32]:
        src_rows = np.full((self.world, local_rows), -1, dtype=np.int32)
        for reader, mine in enumerate(sent):
            data = mine.of(np.flatnonzero(mine.source >= 0))
            tiles = np.flatnonzero(self.buffers[reader].owners == rank)  # these follow one another where they return
            first = self.grad_starts[rank, reader] + TILE * np.searchsorted(tiles, data.at // TILE) + data.at % TILE
            src_rows[reader, ramps(data.source, data.rows)] = ramps(first, data.rows)
        return src_rows

    def _target_rows(self, rank: int) -> NDArray[np.int32]:
        """First row of each tile in its owner's buffer of gradients; tiles of an owner follow one another there."""
        owners = self.buffers[rank].owners
        order = np.argsort(owners, kind="stable")
        counts = np.bincount(owners, minlength=self.world)
        number = np.empty(len(owners), dtype=np.int64)
        number[order] = ramps(np.zeros_like(counts), counts)
        first: NDArray[np.int64] = self.grad_starts[owners, rank] + TILE * number
        return first.astype(np.int32)

    @cached_property
    def _sent_rows(self) -> NDArray[np.int64]:
        """(groups, W): rows that an owner has sent when a group is complete, to all ranks."""
        sent: NDArray[np.int64] = np.cumsum(sum(buffer.signal_rows for buffer in self.buffers), axis=0)
        return sent

    def _signal_rows(self, rank: int) -> NDArray[np.int64]:
        buffer = self.buffers[rank]
        used = buffer.signals >= 0
        rows = np.zeros((2, buffer.num_signals), dtype=np.int64)
        rows[:, buffer.signals[used]] = buffer.signal_rows[used], self._sent_rows[used]
        late: NDArray[np.int64] = np.maximum.accumulate(np.maximum(np.cumsum(rows[0]), rows[1]))
        return late


def base_of(local_rows: int) -> int:
    """Where remote keys begin in the kernel's coordinates."""
    return padded(local_rows) + TILE


def remote_keys(plan: Plan, rank: int) -> NDArray[np.int64]:
    """(N, 2) ranges of the sequence that ``rank`` reads of others, cut at chunks, in the order in which they lie behind
    its own."""
    wanted = merge_intervals(np.concatenate([np.zeros((0, 2), dtype=np.int64), *plan.stage_ranges[rank]]))
    return _rotated(split_at(wanted, plan.chunk_ranges[:, 0]), plan.host_ranges(rank))


def kernel_slices(plan: Plan, rank: int, base: int, runs: RowRuns) -> SliceTable:
    """The slices of ``rank`` in the kernel's coordinates, with remote keys where ``runs`` puts those of the
    sequence; neighbours become one."""
    host, local = Packing(plan.host_ranges(rank)), plan.rank(rank).host.array
    keys = runs.of(np.flatnonzero(runs.source >= 0)).joined()
    if not len(keys.at):
        return SliceTable(local)
    keys = keys.of(np.argsort(keys.source))
    windows = np.stack([keys.source, keys.source + keys.rows], axis=1)
    transfers, _, window = cut_by_windows(plan.slices_of(rank), windows)
    transfers[:, [Q0, Q1]] = host.localize(transfers[:, [Q0, Q1]])
    transfers[:, [K0, K1]] += (base + keys.at - keys.source)[window, None]
    return SliceTable(np.concatenate([local, merge(transfers)]))


def group_of_tile(num_tiles: int) -> NDArray[np.int64]:
    """(num_tiles,): the last tiles are in group 0, which is sent first."""
    groups = int(np.clip(num_tiles // _GROUP_TILES, 1, MAX_GROUPS))
    return groups - 1 - np.arange(num_tiles) * groups // max(num_tiles, 1)


def _rotated(cut: NDArray[np.int64], own: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ranges in the order of the sequence, but those from the longest of ``own`` on come first."""
    if not len(own):
        return cut
    pivot = own[np.argmax(own[:, 1] - own[:, 0]), 0]
    return np.roll(cut, -int(np.searchsorted(cut[:, 0], pivot)), axis=0)


def padded(rows: _Rows) -> _Rows:
    """Rounded up to whole tiles; an int or an array."""
    return -(-rows // TILE) * TILE
