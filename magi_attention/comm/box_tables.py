# SPDX-License-Identifier: Apache-2.0
"""Where the rows of a group cast, and of the group reduce that is its transpose, lie in the boxes of all ranks.

A box holds arriving rows in the order of the wire of ``A2AVLayout``: sources ascending, and of each in its own order,
in a few slots. What a rank casts to itself, or adds to its own rows, does not pass through its box.

Made on the CPU from the layout of one rank and the counts of all, once per layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from magi_attention.comm.layout import A2AVLayout, Rows
from magi_attention.native import abi

SLOTS_PER_SENDER = abi.BOX_GROUPS
_PUSHED_ROWS, _TAKEN_ROWS = 32, 16  # of a piece at most
_SLOT_ROWS = 256  # there is a slot for as many, so that rows are copied out, or added, while the next ones arrive


@dataclass(frozen=True, eq=False)
class PushTable:
    """``pieces`` (N, 4): (own slot, first row here, first row there, rows), slot after slot; ``slots`` (S, 4): (rank,
    slot in its box, pieces, 0). Both int32."""

    pieces: np.ndarray
    slots: np.ndarray


@dataclass(frozen=True, eq=False)
class BoxTables:
    """All of one rank. ``take`` (M, 4) int32: (slot, first row in the box, first row of the output, rows); ``places``
    (world, input rows) int32: row in the box of what a rank adds to a row, of this rank the row of its own tensor, -1:
    nothing; ``needs`` (blocks of 16 input rows, world) int32: slots of a rank that a block waits for, a bit each, and
    ``awaited`` (world,) int32 all of them.
    ``cast_rows`` and ``reduce_rows``: rows that the boxes of all ranks need."""

    cast: PushTable
    take: np.ndarray
    cast_rows: int
    reduce: PushTable
    places: np.ndarray
    needs: np.ndarray
    awaited: np.ndarray
    reduce_rows: int

    @classmethod
    def of(cls, layout: A2AVLayout, counts: np.ndarray) -> BoxTables:
        """``counts[s, r]``: rows that rank s casts to rank r, itself included."""
        rank = layout.rank
        sent = counts * (1 - np.eye(layout.world, dtype=np.int64))  # rows for oneself do not pass through a box
        cast_starts, reduce_starts = _starts(sent.T), _starts(sent)  # [box, sender]
        return cls(
            _pushes(layout.send, layout.send_counts, cast_starts, rank),
            _takes(layout, cast_starts),
            int(sent.sum(axis=0).max()),
            _pushes(layout.recv, layout.recv_counts, reduce_starts, rank),
            *_additions(layout, reduce_starts),
            int(sent.sum(axis=1).max()),
        )


def _pushes(sent: Rows, counts: list[int], starts: np.ndarray, rank: int) -> PushTable:
    """Those for the next rank first, so that at any time every rank receives from one other."""
    parts, world, pushes = _parts(sent, counts), len(counts), []
    for step in range(1, world):
        to = (rank + step) % world
        for slot, first, rows in _slots(parts[to], rank):
            pushes.append((to, slot, rows, int(starts[to, rank]) + first))
    return _push_table(pushes)


def _additions(layout: A2AVLayout, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``places``, ``needs`` and ``awaited``."""
    rank, blocks = layout.rank, -(-layout.input_rows // abi.BOX_ADD_ROWS)
    places = np.full((layout.world, layout.input_rows), -1, dtype=np.int32)
    needs = np.zeros((blocks, layout.world), dtype=np.uint32)
    for peer, rows in enumerate(_parts(layout.send, layout.send_counts)):
        places[peer, rows] = starts[rank, peer] + np.arange(rows.size)
        for slot, _, some in _slots(rows, peer):
            needs[np.unique(some // abi.BOX_ADD_ROWS), peer] |= np.uint32(1 << slot % SLOTS_PER_SENDER)
    places[rank, layout.self_in.index] = layout.self_out.index
    return places, needs.view(np.int32), np.bitwise_or.reduce(needs, axis=0).view(np.int32)


def _slots(rows: np.ndarray, sender: int) -> list[tuple[int, int, np.ndarray]]:
    """(slot, first of its rows, rows) of what travels from ``sender`` to one rank; the same on both sides."""
    count = int(np.clip(len(rows) // _SLOT_ROWS, min(len(rows), 1), SLOTS_PER_SENDER))
    edges = [len(rows) * i // max(count, 1) for i in range(count + 1)]
    return [(SLOTS_PER_SENDER * sender + i, a, rows[a:b]) for i, (a, b) in enumerate(zip(edges, edges[1:]))]


def _takes(layout: A2AVLayout, starts: np.ndarray) -> np.ndarray:
    """In the order of arrival."""
    parts = _parts(layout.recv, layout.recv_counts)
    found = [np.zeros((0, 4), dtype=np.int32)]
    for step in range(1, layout.world):
        sender = (layout.rank - step) % layout.world
        for slot, first, rows in _slots(parts[sender], sender):
            pieces = _runs(rows, int(starts[layout.rank, sender]) + first, _TAKEN_ROWS)
            found.append(np.stack([np.full(len(pieces), slot), pieces[:, 1], pieces[:, 0], pieces[:, 2]], axis=1))
    return np.concatenate(found).astype(np.int32)


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


def _parts(rows: Rows, counts: list[int]) -> list[np.ndarray]:
    """The rows that travel to or from each rank, in the order of the wire."""
    return np.split(rows.index, np.cumsum(counts)[:-1])


def _starts(counts: np.ndarray) -> np.ndarray:
    """Exclusive sums along rows."""
    return np.cumsum(counts, axis=1) - counts
