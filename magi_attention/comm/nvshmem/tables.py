# SPDX-License-Identifier: Apache-2.0
"""A transfer plan as the kernels of ``csrc/comm`` read it: places in one piece of memory, and rows of int64.

All ranks lay their memory out alike, with each region as large as the largest of any rank, so a place is an offset that
holds everywhere. ``csrc/include/magi/comm.h`` says what the columns are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.two_level.transfers import Put, Region, Signal, Sum, TransferPlan
from magi_attention.errors import ContractError

Table = NDArray[np.int64]
SUM_BYTES = 4  # the sums of an owner are float32
_OWNER_ROWS = 32  # of the result, that a CTA adds at a time
_ALIGN = 256
_PUT, _WAIT, _BLOCK = 8, 3, 9  # columns


@dataclass(frozen=True, slots=True)
class Arena:
    """The layout of the memory of an exchange, in bytes; the same on all ranks.

    ``row_bytes``: of a row of the cast; ``grad_bytes``: of one of the reduce. Signals of casts come first, then those
    of reduces, then a credit of each rank for casts, and one for reduces.
    """

    row_bytes: int
    grad_bytes: int
    num_cast_signals: int
    num_reduce_signals: int
    world: int
    places: dict[str, int]
    num_bytes: int

    @classmethod
    def of(cls, plan: TransferPlan, row_bytes: int, grad_bytes: int) -> Arena:
        """``ContractError`` unless rows are multiples of 16 bytes."""
        for size in (row_bytes, grad_bytes):
            if size < 16 or size % 16:
                raise ContractError(f"Rows of {size} bytes cannot travel by puts; they must be multiples of 16 bytes.")
        world = plan.nodes.world
        casts = max(len(part.cast_signals) for part in plan.ranks)
        reduces = max(len(part.reduce_signals) for part in plan.ranks)
        most = [max(part.region_rows[region] for part in plan.ranks) for region in Region]
        inputs = max(part.add.begins.size - 1 for part in plan.ranks)
        sizes = {
            "cast epoch": 8,
            "reduce epoch": 8,
            "signals": 8 * (casts + reduces + 2 * world),
            "input": inputs * row_bytes,
            Region.HELD.name: most[Region.HELD] * row_bytes,
            Region.OUT.name: most[Region.OUT] * row_bytes,
            "partials": most[Region.OUT] * grad_bytes,
            Region.TERMS.name: most[Region.TERMS] * grad_bytes,
            "sums": most[Region.HELD] * grad_bytes,
            Region.GRADS.name: most[Region.GRADS] * grad_bytes,
        }
        places, at = {}, 0
        for name, size in sizes.items():
            places[name] = at
            at += -(-size // _ALIGN) * _ALIGN
        return cls(row_bytes, grad_bytes, casts, reduces, world, places, at)

    def credit(self, of_reduce: bool, rank: int) -> int:
        """The signal by which ``rank`` says that its memory is free."""
        return self.num_cast_signals + self.num_reduce_signals + of_reduce * self.world + rank


class SumTable(NamedTuple):
    """What ``magi_comm_sum`` adds."""

    blocks: Table
    waits: Table
    begins: Table
    terms: Table


@dataclass(frozen=True, eq=False, slots=True)
class ExchangeTables:
    """The tables of one rank."""

    arena: Arena
    input_rows: int
    output_rows: int
    cast_puts: Table
    cast_credits: Table
    cast_waits: Table
    cast_end: Table
    reduce_puts: Table
    reduce_credits: Table
    reduce_waits: Table
    reduce_end: Table
    node_sums: SumTable
    owner_sums: SumTable


def exchange_tables(plan: TransferPlan, rank: int, arena: Arena, value_bytes: int) -> ExchangeTables:
    """The tables of ``rank``. ``value_bytes``: of a value of the reduce on the wire."""
    part = plan.ranks[rank]
    waits = {b.held: _wait(part.cast_signals, b.held, 0) for b in part.blocks}
    cast_puts = [_put(arena, "input", put) for put in part.send]
    cast_puts += [_put(arena, Region.HELD.name, p, waits[b.held]) for b in part.blocks for p in b.forward]
    give = [_put(arena, "partials", put) for put in part.give]
    to_cast = {put.peer for put in (*part.send, *(p for b in part.blocks for p in b.forward))}
    to_reduce = {put.peer for put in (*part.give, *(b.back for b in part.blocks))}
    shift = arena.num_cast_signals
    return ExchangeTables(
        arena,
        part.add.begins.size - 1,
        part.region_rows[Region.OUT],
        _table(cast_puts, _PUT),
        _table([(arena.credit(False, peer), 1, peer) for peer in sorted(to_cast)], _WAIT),
        _table([_wait(part.cast_signals, signal, 0) for signal in part.arrivals], _WAIT),
        np.asarray(part.upstream, np.int64),
        _table(give, _PUT),
        _table([(arena.credit(True, peer), 1, peer) for peer in sorted(to_reduce)], _WAIT),
        _table([_wait(part.reduce_signals, signal, shift) for signal in part.grads], _WAIT),
        np.asarray(part.downstream, np.int64),
        _node_sums(plan, rank, arena),
        _owner_sums(part.add, arena, value_bytes),
    )


def _table(rows: Sequence[tuple[int, ...]], columns: int) -> Table:
    return np.array(rows, np.int64).reshape(len(rows), columns)


def _wait(signals: Sequence[Signal], index: int, shift: int) -> tuple[int, int, int]:
    return index + shift, signals[index].expected, signals[index].sender


def _target(arena: Arena, put: Put) -> tuple[int, int, int, int]:
    """Place, bytes, rank, signal."""
    is_cast = put.target in (Region.HELD, Region.OUT)
    size = arena.row_bytes if is_cast else arena.grad_bytes
    signal = put.signal if is_cast else put.signal + arena.num_cast_signals
    return arena.places[put.target.name] + put.target_row * size, put.rows * size, put.peer, signal


def _put(arena: Arena, source: str, put: Put, wait: tuple[int, int, int] = (-1, 0, 0)) -> tuple[int, ...]:
    size = arena.grad_bytes if source == "partials" else arena.row_bytes
    return (arena.places[source] + put.source_row * size, *_target(arena, put), *wait)


def _node_sums(plan: TransferPlan, rank: int, arena: Arena) -> SumTable:
    """A block of held rows each: its waits, the terms of its rows, and its way back to the owner."""
    part = plan.ranks[rank]
    none = np.zeros(0, np.int64)
    blocks, waits, begins, terms, num_begins, num_terms = [], [], [none], [none], 0, 0
    for block in part.blocks:
        waits += [_wait(part.reduce_signals, signal, arena.num_cast_signals) for signal in block.terms]
        result = arena.places["sums"] + block.first * arena.grad_bytes
        ends = len(waits) - len(block.terms), len(waits)
        blocks.append((num_begins, block.rows, result, *_target(arena, block.back), *ends))
        begins.append(num_terms + block.add.begins)
        terms.append(arena.places[Region.TERMS.name] + arena.grad_bytes * block.add.terms)
        num_begins += block.add.begins.size
        num_terms += block.add.terms.size
    return SumTable(_table(blocks, _BLOCK), _table(waits, _WAIT), np.concatenate(begins), np.concatenate(terms))


def _owner_sums(add: Sum, arena: Arena, value_bytes: int) -> SumTable:
    """The rows of the result, some in each block; nothing goes on to other ranks."""
    rows, width = add.begins.size - 1, arena.grad_bytes // value_bytes * SUM_BYTES
    firsts = range(0, rows, _OWNER_ROWS)
    blocks = [(first, min(_OWNER_ROWS, rows - first), first * width, 0, 0, -1, 0, 0, 0) for first in firsts]
    grads, own = arena.places[Region.GRADS.name], arena.places["partials"]
    terms = np.where(add.terms >= 0, grads + arena.grad_bytes * add.terms, own + arena.grad_bytes * (-1 - add.terms))
    return SumTable(_table(blocks, _BLOCK), _table([], _WAIT), add.begins, terms)
