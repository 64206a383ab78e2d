# SPDX-License-Identifier: Apache-2.0
"""Where the rows of a group cast, and of the group reduce that is its transpose, lie in the buffers of all ranks.

A buffer holds arriving rows in the order of the wire of ``A2AVLayout``: sources ascending, and of each in its own
order, in a few signals. What a rank casts to itself, or adds to its own rows, does not pass through its buffer.

Made on the CPU from the layout of one rank and the counts of all, once per layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from magi_attention.comm.collectives.layout import A2AVLayout, Rows
from magi_attention.native import abi

SIGNALS_PER_SENDER = abi.SYMM_SIGNALS_PER_RANK
_PUT_ROWS, _UNPACKED_ROWS = 32, 16  # of a transfer at most
_SIGNAL_ROWS = 256  # there is a signal for as many, so that rows are copied out, or added, while the next ones arrive


@dataclass(frozen=True, eq=False)
class PutTable:
    """``transfers`` (N, 4): (own signal, first row here, first row there, rows), signal after signal; ``signals`` (S,
    4): (rank, signal in its buffer, transfers, 0). Both int32."""

    transfers: np.ndarray
    signals: np.ndarray


@dataclass(frozen=True, eq=False)
class SymmTables:
    """All of one rank. ``unpack`` (M, 4) int32: (signal, first row in the buffer, first row of the output, rows);
    ``src_rows`` (world, input rows) int32: row in the buffer of what a rank adds to a row, of this rank the row of its
    own tensor, -1: nothing; ``needed_signals`` (blocks of 16 input rows, world) int32: signals of a rank that a block
    waits for, a bit each, and ``awaited`` (world,) int32 all of them.
    ``cast_rows`` and ``reduce_rows``: rows that the buffers of all ranks need."""

    cast: PutTable
    unpack: np.ndarray
    cast_rows: int
    reduce: PutTable
    src_rows: np.ndarray
    needed_signals: np.ndarray
    awaited: np.ndarray
    reduce_rows: int

    @property
    def arrays(self) -> list[np.ndarray]:
        """All of them."""
        puts = [x for table in (self.cast, self.reduce) for x in (table.transfers, table.signals)]
        return [*puts, self.unpack, self.src_rows, self.needed_signals, self.awaited]

    @classmethod
    def of(cls, layout: A2AVLayout, counts: np.ndarray) -> SymmTables:
        """``counts[s, r]``: rows that rank s casts to rank r, itself included."""
        rank = layout.rank
        sent = counts * (1 - np.eye(layout.world, dtype=np.int64))  # rows for oneself do not pass through a buffer
        cast_starts, reduce_starts = _starts(sent.T), _starts(sent)  # [buffer, sender]
        return cls(
            _puts(layout.send, layout.send_counts, cast_starts, rank),
            _unpacks(layout, cast_starts),
            int(sent.sum(axis=0).max()),
            _puts(layout.recv, layout.recv_counts, reduce_starts, rank),
            *_additions(layout, reduce_starts),
            int(sent.sum(axis=1).max()),
        )


def _puts(sent: Rows, counts: list[int], starts: np.ndarray, rank: int) -> PutTable:
    """Those for the next rank first, so that at any time every rank receives from one other."""
    parts, world, puts = _parts(sent, counts), len(counts), []
    for step in range(1, world):
        to = (rank + step) % world
        for signal, first, rows in _signals(parts[to], rank):
            puts.append((to, signal, rows, int(starts[to, rank]) + first))
    return _put_table(puts)


def _additions(layout: A2AVLayout, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``src_rows``, ``needed_signals`` and ``awaited``."""
    rank, blocks = layout.rank, -(-layout.input_rows // abi.SYMM_REDUCE_ROWS)
    src_rows = np.full((layout.world, layout.input_rows), -1, dtype=np.int32)
    needed_signals = np.zeros((blocks, layout.world), dtype=np.uint32)
    for peer, rows in enumerate(_parts(layout.send, layout.send_counts)):
        src_rows[peer, rows] = starts[rank, peer] + np.arange(rows.size)
        for signal, _, some in _signals(rows, peer):
            needed_signals[np.unique(some // abi.SYMM_REDUCE_ROWS), peer] |= np.uint32(1 << signal % SIGNALS_PER_SENDER)
    src_rows[rank, layout.self_in.index] = layout.self_out.index
    return src_rows, needed_signals.view(np.int32), np.bitwise_or.reduce(needed_signals, axis=0).view(np.int32)


def _signals(rows: np.ndarray, sender: int) -> list[tuple[int, int, np.ndarray]]:
    """(signal, first of its rows, rows) of what travels from ``sender`` to one rank; the same on both sides."""
    count = int(np.clip(len(rows) // _SIGNAL_ROWS, min(len(rows), 1), SIGNALS_PER_SENDER))
    edges = [len(rows) * i // max(count, 1) for i in range(count + 1)]
    return [(SIGNALS_PER_SENDER * sender + i, a, rows[a:b]) for i, (a, b) in enumerate(zip(edges, edges[1:]))]


def _unpacks(layout: A2AVLayout, starts: np.ndarray) -> np.ndarray:
    """In the order of arrival."""
    parts = _parts(layout.recv, layout.recv_counts)
    found = [np.zeros((0, 4), dtype=np.int32)]
    for step in range(1, layout.world):
        sender = (layout.rank - step) % layout.world
        for signal, first, rows in _signals(parts[sender], sender):
            transfers = _runs(rows, int(starts[layout.rank, sender]) + first, _UNPACKED_ROWS)
            found.append(
                np.stack([np.full(len(transfers), signal), transfers[:, 1], transfers[:, 0], transfers[:, 2]], axis=1)
            )
    return np.concatenate(found).astype(np.int32)


def _put_table(puts: list[tuple[int, int, np.ndarray, int]]) -> PutTable:
    """From (rank, signal there, rows here, first row there) of each own signal."""
    transfers, signals = [np.zeros((0, 4), dtype=np.int32)], []
    for own, (to, signal, rows, there) in enumerate(puts):
        runs = _runs(rows, there, _PUT_ROWS)
        transfers.append(np.concatenate([np.full((len(runs), 1), own), runs], axis=1))
        signals.append((to, signal, len(runs), 0))
    return PutTable(np.concatenate(transfers).astype(np.int32), np.array(signals, dtype=np.int32).reshape(-1, 4))


def _runs(rows: np.ndarray, there: int, most: int) -> np.ndarray:
    """(runs, 3): first of consecutive ``rows``, its place counted from ``there``, and how many; at most ``most``."""
    first = np.ones(len(rows), dtype=bool)
    first[1:] = np.diff(rows) != 1
    position = np.arange(len(rows))
    first |= (position - np.maximum.accumulate(np.where(first, position, 0))) % most == 0
    begin = np.flatnonzero(first)
    return np.stack([rows[begin], there + begin, np.diff(np.append(begin, len(rows)))], axis=1)


def _parts(rows: Rows, counts: list[int]) -> list[np.ndarray]:
    """The rows that travel to or from each rank, in the order of the wire."""
    return np.split(rows.index, np.cumsum(counts)[:-1])


def _starts(counts: np.ndarray) -> np.ndarray:
    """Exclusive sums along rows."""
    return np.cumsum(counts, axis=1) - counts
