# SPDX-License-Identifier: Apache-2.0
"""Where the rows of a group cast, and of the group reduce that is its transpose, lie in the boxes of all ranks.

Cast: a box holds arriving rows in the order of the wire of ``A2AVLayout``: sources ascending, and of each in its own
order; each source has a slot. Reduce: a box holds what each rank adds, ranks ascending, this one included.

Made on the CPU from the layout of one rank and the counts of all, once per layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from magi_attention.comm.layout import A2AVLayout

SLOTS_PER_SENDER = 8  # MAGI_BOX_GROUPS
_PUSHED_ROWS, _TAKEN_ROWS = 32, 16  # of a piece at most
_SLOT_ROWS = 512  # a cast has a slot for as many, so that rows are copied out while the next ones arrive


@dataclass(frozen=True, eq=False)
class PushTable:
    """``pieces`` (N, 4): (own slot, first row here, first row there, rows), slot after slot; ``slots`` (S, 4): (rank,
    slot in its box, pieces, 0). Both int32."""

    pieces: np.ndarray
    slots: np.ndarray


@dataclass(frozen=True, eq=False)
class BoxTables:
    """All of one rank. ``take`` (M, 4) int32: (slot, first row in the box, first row of the output, rows); ``places``
    (world, input rows) int32: row in the box of what a rank adds to a row, -1: nothing; ``senders`` (world,) int32.
    ``cast_rows`` and ``reduce_rows``: rows that the boxes of all ranks need."""

    cast: PushTable
    take: np.ndarray
    cast_rows: int
    reduce: PushTable
    places: np.ndarray
    senders: np.ndarray
    reduce_rows: int

    @classmethod
    def of(cls, layout: A2AVLayout, counts: np.ndarray) -> BoxTables:
        """``counts[s, r]``: rows that rank s casts to rank r, itself included."""
        rank = layout.rank
        sent = counts * (1 - np.eye(layout.world, dtype=np.int64))  # rows for oneself do not pass through a box
        cast_starts = _starts(sent.T)  # [box, sender]
        reduce_starts = _starts(counts)
        places = np.full((layout.world, layout.input_rows), -1, dtype=np.int32)
        for r, rows in enumerate(_with_own(layout.send.index, layout.send_counts, layout.self_in.index, rank)):
            places[r, rows] = reduce_starts[rank, r] + np.arange(rows.size)
        return cls(
            _cast_pushes(layout, cast_starts),
            _takes(layout, cast_starts),
            int(sent.sum(axis=0).max()),
            _reduce_pushes(layout, reduce_starts),
            places,
            (counts[rank] > 0).astype(np.int32),
            int(counts.sum(axis=1).max()),
        )


def _cast_pushes(layout: A2AVLayout, starts: np.ndarray) -> PushTable:
    """Those for the next rank first, so that at any time every rank receives from one other."""
    parts = np.split(layout.send.index, np.cumsum(layout.send_counts)[:-1])
    pushes = []
    for step in range(1, layout.world):
        to = (layout.rank + step) % layout.world
        for slot, first, rows in _slots(parts[to], layout.rank):
            pushes.append((to, slot, rows, int(starts[to, layout.rank]) + first))
    return _push_table(pushes)


def _slots(rows: np.ndarray, sender: int) -> list[tuple[int, int, np.ndarray]]:
    """(slot, first of its rows, rows) of what travels from ``sender`` to one rank; the same on both sides."""
    count = int(np.clip(len(rows) // _SLOT_ROWS, min(len(rows), 1), SLOTS_PER_SENDER))
    edges = [len(rows) * i // max(count, 1) for i in range(count + 1)]
    return [(SLOTS_PER_SENDER * sender + i, a, rows[a:b]) for i, (a, b) in enumerate(zip(edges, edges[1:]))]


def _takes(layout: A2AVLayout, starts: np.ndarray) -> np.ndarray:
    """In the order of arrival."""
    parts = np.split(layout.recv.index, np.cumsum(layout.recv_counts)[:-1])
    found = [np.zeros((0, 4), dtype=np.int32)]
    for step in range(1, layout.world):
        sender = (layout.rank - step) % layout.world
        for slot, first, rows in _slots(parts[sender], sender):
            pieces = _runs(rows, int(starts[layout.rank, sender]) + first, _TAKEN_ROWS)
            found.append(np.stack([np.full(len(pieces), slot), pieces[:, 1], pieces[:, 0], pieces[:, 2]], axis=1))
    return np.concatenate(found).astype(np.int32)


def _reduce_pushes(layout: A2AVLayout, starts: np.ndarray) -> PushTable:
    rank = layout.rank
    parts = _with_own(layout.recv.index, layout.recv_counts, layout.self_out.index, rank)
    owners = [(rank + step) % layout.world for step in range(1, layout.world + 1)]
    return _push_table([(to, rank, parts[to], int(starts[to, rank])) for to in owners if len(parts[to])])


def _push_table(pushes: list[tuple[int, int, np.ndarray, int]]) -> PushTable:
    """From (rank, slot there, rows here, first row there) of each own slot."""
    pieces, slots = [np.zeros((0, 4), dtype=np.int32)], []
    for own, (to, slot, rows, there) in enumerate(pushes):
        runs = _runs(rows, there, _PUSHED_ROWS)
        pieces.append(np.concatenate([np.full((len(runs), 1), own), runs], axis=1))
        slots.append((to, slot, len(runs), 0))
    return PushTable(np.concatenate(pieces).astype(np.int32), np.array(slots, dtype=np.int32).reshape(-1, 4))


def _runs(rows: np.ndarray, there: int, most: int) -> np.ndarray:
    """(runs, 3): first of consecutive ``rows``, its place counted from ``there``, and how many; at most ``most``."""
    first = np.ones(len(rows), dtype=bool)
    first[1:] = np.diff(rows) != 1
    position = np.arange(len(rows))
    first |= (position - np.maximum.accumulate(np.where(first, position, 0))) % most == 0
    begin = np.flatnonzero(first)
    return np.stack([rows[begin], there + begin, np.diff(np.append(begin, len(rows)))], axis=1)


def _with_own(index: np.ndarray, counts: list[int], own: np.ndarray, rank: int) -> list[np.ndarray]:
    """The rows for each rank, those for this one included."""
    parts = np.split(index, np.cumsum(counts)[:-1])
    parts[rank] = own
    return parts


def _starts(counts: np.ndarray) -> np.ndarray:
    """Exclusive sums along rows."""
    return np.cumsum(counts, axis=1) - counts
