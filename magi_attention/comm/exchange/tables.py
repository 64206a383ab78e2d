# SPDX-License-Identifier: Apache-2.0
"""A transfer plan as the kernels of ``csrc/comm`` read it: rows of int64, with places in the arena.

``csrc/include/magi/comm.h`` says what the columns are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from magi_attention.comm.exchange.arena import Arena, Regions
from magi_attention.common.two_level.transfers import Put, RankTransfers, Region, Signal, TransferPlan

Table = NDArray[np.int64]
L = TypeVar("L", int, Table)
_PUT, _WAIT, _BLOCK = 8, 3, 9  # columns


class SumTable(NamedTuple):
    """What ``magi_comm_sum`` adds."""

    blocks: Table
    waits: Table
    begins: Table
    terms: Table


@dataclass(frozen=True, eq=False, slots=True)
class CastTables:
    """A cast of one rank. ``counted``: all signals that an epoch adds to here. ``waits`` are for all of OUT, those of
    group g begin at ``begins[g]``; the last one is where those of the last group end. ``places``: of each tensor."""

    places: tuple[dict[str, int], ...]
    input_rows: int
    output_rows: int
    puts: Table
    credits: Table
    waits: Table
    begins: Table
    counted: Table
    free_for: Table


@dataclass(frozen=True, eq=False, slots=True)
class ReduceTables:
    """A reduce of one rank. By the kernels' sums: ``puts``, ``node_sums`` of each tensor, ``waits``. Or with sums by
    others: ``puts``, ``node_waits``, then ``backs`` from "sums", ``waits``."""

    places: tuple[dict[str, int], ...]
    output_rows: int
    puts: Table
    credits: Table
    node_sums: tuple[SumTable, ...]
    node_waits: Table
    backs: Table
    waits: Table
    counted: Table
    free_for: Table


def cast_tables(plan: TransferPlan, rank: int, arena: Arena, row_bytes: Sequence[int]) -> CastTables:
    """The tables of ``rank`` for rows of so many bytes, of each tensor."""
    part, to = plan.ranks[rank], _Places.of_cast(plan, arena, row_bytes)
    puts = [((put.group, 0), to.put("input", put)) for put in part.send]
    for block in part.blocks:
        wait = to.wait(part.cast_signals, block.held)
        # Behind sends of the next group, so that the network has some while a CTA waits; those wait for nothing, so
        # nobody waits in a circle.
        key = block.group + 1, 1
        puts += [(key, to.put(Region.HELD.name, put, wait)) for put in block.forward]
    peers = {put.peer for put in (*part.send, *(p for b in part.blocks for p in b.forward))}
    arrivals = sorted(part.arrivals, key=lambda signal: part.cast_signals[signal].group)
    groups = [part.cast_signals[signal].group for signal in arrivals]
    return CastTables(
        to.places,
        part.input_rows,
        part.region_rows[Region.OUT],
        _table([row for _, rows in sorted(puts, key=lambda one: one[0]) for row in rows], _PUT),
        to.credits(peers),
        _table([to.wait(part.cast_signals, signal) for signal in arrivals], _WAIT),
        np.searchsorted(groups, np.arange(max(groups, default=-1) + 2)),
        to.all_waits(part.cast_signals),
        np.asarray(part.upstream, np.int64),
    )


def reduce_tables(plan: TransferPlan, rank: int, arena: Arena, row_bytes: Sequence[int]) -> ReduceTables:
    """The tables of ``rank`` for rows of so many bytes, of each tensor."""
    part, to = plan.ranks[rank], _Places.of_reduce(plan, arena, row_bytes)
    peers = {put.peer for put in (*part.give, *(b.back for b in part.blocks))}
    node_sums = tuple(_node_sums(part, to, tensor) for tensor in range(len(row_bytes)))
    return ReduceTables(
        to.places,
        part.region_rows[Region.OUT],
        _table([row for put in part.give for row in to.put("partials", put)], _PUT),
        to.credits(peers),
        node_sums,
        node_sums[0].waits,
        _table([row for block in part.blocks for row in to.put("sums", block.back)], _PUT),
        _table([to.wait(part.reduce_signals, signal) for signal in part.grads], _WAIT),
        to.all_waits(part.reduce_signals),
        np.asarray(part.downstream, np.int64),
    )


@dataclass(frozen=True, slots=True)
class _Places:
    """Where rows of a cast, or of a reduce, lie and which signals count them. A put of the plan is one of each tensor,
    so signals count as many times more."""

    arena: Arena
    is_reduce: bool
    places: tuple[dict[str, int], ...]
    row_bytes: tuple[int, ...]

    @classmethod
    def of_cast(cls, plan: TransferPlan, arena: Arena, row_bytes: Sequence[int]) -> _Places:
        return cls._of(Regions.of_cast(plan, row_bytes), arena, arena.cast_at, False, row_bytes)

    @classmethod
    def of_reduce(cls, plan: TransferPlan, arena: Arena, row_bytes: Sequence[int]) -> _Places:
        return cls._of(Regions.of_reduce(plan, row_bytes), arena, arena.reduce_at, True, row_bytes)

    @classmethod
    def _of(cls, regions: Regions, arena: Arena, begin: int, is_reduce: bool, row_bytes: Sequence[int]) -> _Places:
        places = tuple({name: begin + at for name, at in of_tensor.items()} for of_tensor in regions.places)
        return cls(arena, is_reduce, places, tuple(row_bytes))

    def row(self, name: str, row: L, tensor: int) -> L:
        return self.places[tensor][name] + row * self.row_bytes[tensor]

    def target(self, put: Put, tensor: int) -> tuple[int, int, int, int]:
        """Place, bytes, rank, signal."""
        at = self.row(put.target.name, put.target_row, tensor)
        return at, put.rows * self.row_bytes[tensor], put.peer, self.arena.signal(self.is_reduce, put.signal)

    def put(self, source: str, put: Put, wait: tuple[int, int, int] = (-1, 0, 0)) -> list[tuple[int, ...]]:
        return [
            (self.row(source, put.source_row, tensor), *self.target(put, tensor), *wait)
            for tensor in range(len(self.row_bytes))
        ]

    def wait(self, signals: Sequence[Signal], index: int) -> tuple[int, int, int]:
        expected = signals[index].expected * len(self.row_bytes)
        return self.arena.signal(self.is_reduce, index), expected, signals[index].sender

    def all_waits(self, signals: Sequence[Signal]) -> Table:
        return _table([self.wait(signals, index) for index in range(len(signals))], _WAIT)

    def credits(self, peers: set[int]) -> Table:
        return _table([(self.arena.credit(self.is_reduce, peer), 1, peer) for peer in sorted(peers)], _WAIT)


def _table(rows: Sequence[tuple[int, ...]], columns: int) -> Table:
    return np.array(rows, np.int64).reshape(len(rows), columns)


def _node_sums(part: RankTransfers, to: _Places, tensor: int) -> SumTable:
    """A block of held rows each: its waits, the terms of its rows, and its way back to the owner."""
    none = np.zeros(0, np.int64)
    blocks, waits, begins, terms, num_begins, num_terms = [], [], [none], [none], 0, 0
    for block in part.blocks:
        waits += [to.wait(part.reduce_signals, signal) for signal in block.terms]
        ends = len(waits) - len(block.terms), len(waits)
        back = to.row("sums", block.first, tensor), *to.target(block.back, tensor)
        blocks.append((num_begins, block.rows, *back, *ends))
        begins.append(num_terms + block.add.begins)
        terms.append(to.row(Region.TERMS.name, block.add.terms, tensor))
        num_begins += block.add.begins.size
        num_terms += block.add.terms.size
    return SumTable(_table(blocks, _BLOCK), _table(waits, _WAIT), np.concatenate(begins), np.concatenate(terms))
