# SPDX-License-Identifier: Apache-2.0
"""A transfer plan as the kernels of ``csrc/comm`` read it: rows of int64, with places in the arena.

``csrc/include/magi/comm.h`` says what the columns are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from magi_attention.comm.exchange.arena import Arena, Regions
from magi_attention.common.two_level.transfers import Put, RankTransfers, Region, Signal, TransferPlan

Table = NDArray[np.int64]
_PUT, _WAIT, _BLOCK = 8, 3, 9  # columns


class SumTable(NamedTuple):
    """What ``magi_comm_sum`` adds."""

    blocks: Table
    waits: Table
    begins: Table
    terms: Table


@dataclass(frozen=True, eq=False, slots=True)
class CastTables:
    """A cast of one rank. ``counted``: all signals that an epoch adds to here."""

    places: dict[str, int]
    input_rows: int
    output_rows: int
    puts: Table
    credits: Table
    waits: Table
    counted: Table
    free_for: Table


@dataclass(frozen=True, eq=False, slots=True)
class ReduceTables:
    """A reduce of one rank. By the kernels' sums: ``puts``, ``node_sums``, ``waits``. Or with sums by others: ``puts``,
    ``node_waits``, then ``backs`` from "sums", ``waits``."""

    places: dict[str, int]
    output_rows: int
    puts: Table
    credits: Table
    node_sums: SumTable
    node_waits: Table
    backs: Table
    waits: Table
    counted: Table
    free_for: Table


def cast_tables(plan: TransferPlan, rank: int, arena: Arena, row_bytes: int) -> CastTables:
    """The tables of ``rank`` for rows of so many bytes."""
    part, to = plan.ranks[rank], _Places.of_cast(plan, arena, row_bytes)
    waits = {b.held: to.wait(part.cast_signals, b.held) for b in part.blocks}
    puts = [to.put("input", put) for put in part.send]
    puts += [to.put(Region.HELD.name, p, waits[b.held]) for b in part.blocks for p in b.forward]
    peers = {put.peer for put in (*part.send, *(p for b in part.blocks for p in b.forward))}
    return CastTables(
        to.places,
        part.input_rows,
        part.region_rows[Region.OUT],
        _table(puts, _PUT),
        to.credits(peers),
        _table([to.wait(part.cast_signals, signal) for signal in part.arrivals], _WAIT),
        to.all_waits(part.cast_signals),
        np.asarray(part.upstream, np.int64),
    )


def reduce_tables(plan: TransferPlan, rank: int, arena: Arena, row_bytes: int) -> ReduceTables:
    """The tables of ``rank`` for rows of so many bytes."""
    part, to = plan.ranks[rank], _Places.of_reduce(plan, arena, row_bytes)
    peers = {put.peer for put in (*part.give, *(b.back for b in part.blocks))}
    node_sums = _node_sums(part, to)
    return ReduceTables(
        to.places,
        part.region_rows[Region.OUT],
        _table([to.put("partials", put) for put in part.give], _PUT),
        to.credits(peers),
        node_sums,
        node_sums.waits,
        _table([to.put("sums", block.back) for block in part.blocks], _PUT),
        _table([to.wait(part.reduce_signals, signal) for signal in part.grads], _WAIT),
        to.all_waits(part.reduce_signals),
        np.asarray(part.downstream, np.int64),
    )


@dataclass(frozen=True, slots=True)
class _Places:
    """Where rows of a cast, or of a reduce, lie and which signals count them."""

    arena: Arena
    is_reduce: bool
    places: dict[str, int]
    row_bytes: int

    @classmethod
    def of_cast(cls, plan: TransferPlan, arena: Arena, row_bytes: int) -> _Places:
        places = Regions.of_cast(plan, row_bytes).places
        return cls(arena, False, {name: arena.cast_at + at for name, at in places.items()}, row_bytes)

    @classmethod
    def of_reduce(cls, plan: TransferPlan, arena: Arena, row_bytes: int) -> _Places:
        places = Regions.of_reduce(plan, row_bytes).places
        return cls(arena, True, {name: arena.reduce_at + at for name, at in places.items()}, row_bytes)

    def row(self, name: str, row: int) -> int:
        return self.places[name] + row * self.row_bytes

    def target(self, put: Put) -> tuple[int, int, int, int]:
        """Place, bytes, rank, signal."""
        at = self.row(put.target.name, put.target_row)
        return at, put.rows * self.row_bytes, put.peer, self.arena.signal(self.is_reduce, put.signal)

    def put(self, source: str, put: Put, wait: tuple[int, int, int] = (-1, 0, 0)) -> tuple[int, ...]:
        return (self.row(source, put.source_row), *self.target(put), *wait)

    def wait(self, signals: Sequence[Signal], index: int) -> tuple[int, int, int]:
        return self.arena.signal(self.is_reduce, index), signals[index].expected, signals[index].sender

    def all_waits(self, signals: Sequence[Signal]) -> Table:
        return _table([self.wait(signals, index) for index in range(len(signals))], _WAIT)

    def credits(self, peers: set[int]) -> Table:
        return _table([(self.arena.credit(self.is_reduce, peer), 1, peer) for peer in sorted(peers)], _WAIT)


def _table(rows: Sequence[tuple[int, ...]], columns: int) -> Table:
    return np.array(rows, np.int64).reshape(len(rows), columns)


def _node_sums(part: RankTransfers, to: _Places) -> SumTable:
    """A block of held rows each: its waits, the terms of its rows, and its way back to the owner."""
    none = np.zeros(0, np.int64)
    blocks, waits, begins, terms, num_begins, num_terms = [], [], [none], [none], 0, 0
    for block in part.blocks:
        waits += [to.wait(part.reduce_signals, signal) for signal in block.terms]
        ends = len(waits) - len(block.terms), len(waits)
        blocks.append((num_begins, block.rows, to.row("sums", block.first), *to.target(block.back), *ends))
        begins.append(num_terms + block.add.begins)
        terms.append(to.places[Region.TERMS.name] + to.row_bytes * block.add.terms)
        num_begins += block.add.begins.size
        num_terms += block.add.terms.size
    return SumTable(_table(blocks, _BLOCK), _table(waits, _WAIT), np.concatenate(begins), np.concatenate(terms))

