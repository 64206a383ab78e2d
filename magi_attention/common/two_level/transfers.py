# SPDX-License-Identifier: Apache-2.0
"""A group cast over nodes, and the group reduce that is its transpose, as one-sided transfers.

Every rank owns regions of rows that others write:

``HELD``    rows of far ranks, each once, that this rank carries for its node
``OUT``     the output of the cast
``TERMS``   what the ranks of this node add to the rows held, rank by rank
``GRADS``   what comes back for this rank's rows, senders ascending: a term of each other rank of its node, and a sum of
            each other node from its carrier

A *put* moves a run of rows, a block at most, into a region of one rank and adds 1 to a signal there. Puts overtake one
another, so a signal says something only when all of its puts are counted: ``expected``. Held rows form *blocks* of one
sender, which travel on as soon as they are whole, so that a node forwards or adds one block while the next is on its
way.

    cast      send;  of each block: wait, forward;  wait for ``arrivals``
    reduce    give;  of each block: wait, add its terms in the order of their ranks, back;  wait for ``grads``, add

Rows of ``OUT`` may be told apart by *groups*, of which the reader wants group 0 first. Then a signal of ``OUT`` is of
one sender and one group, and rows travel group by group, in ``HELD`` by the first group that any reader wants them for.

``docs/design/two_levels.md`` has the protocol around it. Everything follows from the specs alone, so each rank makes
the same plan without communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from magi_attention.common.group_spec import GroupSpec
from magi_attention.common.two_level.nodes import Nodes
from magi_attention.common.two_level.routes import Routes, Rows
from magi_attention.errors import ContractError

BLOCK_ROWS = 1024  # 4 MiB of K and V, 8 heads of 128 in 16 bits: far above what hides the latency of a network
Run = tuple[int, int, int]


class Region(IntEnum):
    """Memory that other ranks write."""

    HELD, OUT, TERMS, GRADS = range(4)


class Put(NamedTuple):
    """``rows`` rows, from ``source_row`` on, to ``target`` of ``peer``, from ``target_row`` on; 1 to its ``signal``.
    ``group``: how early they are wanted."""

    peer: int
    source_row: int
    target: Region
    target_row: int
    rows: int
    signal: int
    group: int = 0


class Signal(NamedTuple):
    """A counter of this rank: in each epoch ``sender`` adds ``expected`` to it. Of ``OUT``: rows of ``group``."""

    sender: int
    expected: int
    group: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Sum:
    """Row i of a result is the sum of rows ``terms[begins[i] : begins[i + 1]]`` of a region in this order, senders
    ascending."""

    begins: Rows
    terms: Rows


@dataclass(frozen=True, eq=False, slots=True)
class Block:
    """Rows ``first .. first + rows`` of ``HELD`` on one rank; signals are those of that rank."""

    source: int
    first: int
    rows: int
    held: int  # signal: the block is whole
    forward: tuple[Put, ...]  # from HELD
    terms: tuple[int, ...]  # signals: what each rank of the node adds is here
    add: Sum  # rows of TERMS
    back: Put  # from the sums, which lie as the rows of HELD do
    group: int = 0  # the first group that reads one of its rows


@dataclass(frozen=True, eq=False, slots=True)
class RankTransfers:
    """The part of one rank. Source rows are those of the cast's input (``send``) or output (``give``).

    ``returns[s]``: rows of the cast's input, group by group, for which something comes from rank s; GRADS holds it, s
    ascending. What this rank itself adds to ``returns[rank]`` are ``own_rows`` of the output; they do not travel.

    Signals of casts (of puts into HELD and OUT) and of reduces are counted apart, as the one may begin while the other
    ends. ``upstream`` and ``downstream``: over these nodes, whatever the specs, who may write to this rank in a cast,
    and to whom it may write; in a reduce it is the other way round.
    """

    rank: int
    send: tuple[Put, ...]  # group by group, in each far ranks first
    blocks: tuple[Block, ...]
    arrivals: tuple[int, ...]  # signals: OUT is whole
    give: tuple[Put, ...]  # far owners first
    grads: tuple[int, ...]  # signals: GRADS is whole
    input_rows: int
    returns: tuple[Rows, ...]
    own_rows: Rows
    cast_signals: tuple[Signal, ...]
    reduce_signals: tuple[Signal, ...]
    region_rows: tuple[int, int, int, int]  # by Region
    upstream: tuple[int, ...]
    downstream: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class TransferPlan:
    """The transfers of all ranks for one cast and its reduce."""

    nodes: Nodes
    ranks: tuple[RankTransfers, ...]

    @property
    def network_rows(self) -> int:
        """Rows that cross between nodes in the cast; as many sums come back in the reduce."""
        node_of = self.nodes.node_of
        return sum(p.rows for r in self.ranks for p in r.send if node_of[p.peer] != node_of[r.rank])


def plan_transfers(
    specs: Sequence[GroupSpec], nodes: Nodes, block_rows: int = BLOCK_ROWS, group_ends: Sequence[Rows] | None = None
) -> TransferPlan:
    """The transfers for the casts ``specs`` of all ranks, in rank order; ``group_ends`` as in ``Routes``.

    Raises:
        ContractError: specs and nodes are of different numbers of ranks, ``block_rows`` is below 1, or two ranks
            disagree about how many rows pass between them.
    """
    if len(specs) != nodes.world or block_rows < 1:
        raise ContractError(
            f"{len(specs)} specs, nodes of {nodes.world} ranks and blocks of {block_rows} rows; give one spec per rank "
            "and blocks of at least one row."
        )
    return plan_routes(Routes.of_specs(specs, group_ends), nodes, block_rows)


def plan_routes(routes: Routes, nodes: Nodes, block_rows: int = BLOCK_ROWS) -> TransferPlan:
    """The transfers for a cast whose rows go where ``routes`` says."""
    return _Builder(routes, nodes, block_rows).build()


@dataclass(slots=True)
class _Part:
    """What grows of one rank."""

    send: list[Put] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)
    give: list[Put] = field(default_factory=list)
    grads: list[int] = field(default_factory=list)
    cast_signals: list[Signal] = field(default_factory=list)
    reduce_signals: list[Signal] = field(default_factory=list)
    held_rows: int = 0
    term_rows: int = 0


def _added(signals: list[Signal], sender: int, expected: int, group: int = 0) -> int:
    signals.append(Signal(sender, expected, group))
    return len(signals) - 1


class _Builder:
    """``needed`` and ``placed`` as ``Routes.by_group`` gives them."""

    def __init__(self, routes: Routes, nodes: Nodes, block_rows: int) -> None:
        self.routes, self.nodes, self.block_rows = routes, nodes, block_rows
        self.needed, self.placed = routes.by_group()
        self.parts = [_Part() for _ in range(nodes.world)]
        self.returns = [self._list_returns(owner) for owner in range(nodes.world)]
        self.first_returns = [self._place_returns(owner) for owner in range(nodes.world)]
        self.arrivals = self._list_arrivals()

    def build(self) -> TransferPlan:
        nodes, ranks = self.nodes, range(self.nodes.world)
        num_nodes = len(nodes.members)
        for step in range(1, num_nodes):  # why: so that not all ranks send to node 0 first
            for source in ranks:
                self._carry(source, (nodes.node_of[source] + step) % num_nodes)
        for source in ranks:
            self._stay(source)
        return TransferPlan(nodes, tuple(self._finish(rank) for rank in ranks))

    def _list_returns(self, owner: int) -> tuple[Rows, ...]:
        """``RankTransfers.returns`` of ``owner``."""
        found = [np.zeros(0, np.int64)] * self.nodes.world
        for node, ranks in enumerate(self.nodes.members):
            if node == self.nodes.node_of[owner]:
                for reader in ranks:
                    found[reader] = self.needed[owner][reader]
            else:
                needed = np.concatenate([self.needed[owner][reader] for reader in ranks])
                groups = [self.routes.group_of(reader, self.placed[reader][owner]) for reader in ranks]
                order = np.lexsort((np.concatenate(groups), needed))  # of each row the first group
                rows, first = np.unique(needed[order], return_index=True)
                by_group = np.argsort(np.concatenate(groups)[order][first], kind="stable")
                found[self.nodes.carrier(owner, node)] = rows[by_group]
        return tuple(found)

    def _place_returns(self, owner: int) -> list[int]:
        """Where in GRADS what comes from each rank begins."""
        sizes = [0 if sender == owner else rows.size for sender, rows in enumerate(self.returns[owner])]
        return [0, *np.cumsum(sizes).tolist()[:-1]]

    def _list_arrivals(self) -> dict[tuple[int, int, int], int]:
        """The signal of each (last sender, reader, group) of a row; its count follows as puts are listed."""
        signals: dict[tuple[int, int, int], int] = {}
        for reader, part in enumerate(self.parts):
            node = self.nodes.node_of[reader]
            for source, places in enumerate(self.placed[reader]):
                near = self.nodes.node_of[source] == node
                last = source if near else self.nodes.carrier(source, node)
                for group in np.unique(self.routes.group_of(reader, places)).tolist():
                    if (last, reader, group) not in signals:
                        signals[last, reader, group] = _added(part.cast_signals, last, 0, group)
                        part.arrivals.append(signals[last, reader, group])
        return signals

    def _out(self, last: int, reader: int, runs: Sequence[Run]) -> Iterator[Put]:
        """Puts of these runs, each of one group, into the output of ``reader``."""
        counted = self.parts[reader].cast_signals
        groups = self.routes.group_of(reader, np.array([b for _, b, _ in runs], np.int64)).tolist()
        for (a, b, rows), group in zip(runs, groups):
            signal = self.arrivals[last, reader, group]
            counted[signal] = Signal(last, counted[signal].expected + 1, group)
            yield Put(reader, a, Region.OUT, b, rows, signal, group)

    def _stay(self, source: int) -> None:
        """Rows for ranks of the own node, straight to their place, and what comes back for them."""
        owner = self.parts[source]
        for reader in self.nodes.mates(source):
            rows, places = self.needed[source][reader], self.placed[reader][source]
            changes = np.flatnonzero(np.diff(self.routes.group_of(reader, places))) + 1
            starts = np.union1d(np.arange(0, rows.size, self.block_rows), changes)
            owner.send += self._out(source, reader, list(_runs(rows, places, starts)))
            if not rows.size or reader == source:
                continue
            first = self.first_returns[source][reader]
            at = np.arange(first, first + rows.size)
            runs = list(_runs(places, at, starts))
            signal = _added(owner.reduce_signals, reader, len(runs))
            self.parts[reader].give += [Put(source, a, Region.GRADS, b, n, signal) for a, b, n in runs]
            owner.grads.append(signal)

    def _carry(self, source: int, node: int) -> None:
        """Rows of ``source`` for another node: once to the carrier, from there on, and their sums back."""
        carrier = self.nodes.carrier(source, node)
        union, size = self.returns[source][carrier], self.block_rows
        owner, part = self.parts[source], self.parts[carrier]
        if not union.size:
            return
        firsts = range(0, union.size, size)
        grad_signal = _added(owner.reduce_signals, carrier, len(firsts))
        owner.grads.append(grad_signal)
        first_grad, first_held = self.first_returns[source][carrier], part.held_rows
        held = np.arange(first_held, first_held + union.size)
        starts = np.arange(0, union.size, size)
        sent = _grouped(_runs(union, held, starts), union.size, starts)
        passed_on = self._pass_on(source, carrier, union)
        for begin, runs, (forward, terms, add) in zip(firsts, sent, passed_on, strict=True):
            signal, rows = _added(part.cast_signals, source, len(runs)), min(size, union.size - begin)
            group = min(put.group for put in forward)
            owner.send += [Put(carrier, a, Region.HELD, b, n, signal, group) for a, b, n in runs]
            back = Put(source, first_held + begin, Region.GRADS, first_grad + begin, rows, grad_signal)
            part.blocks.append(Block(source, first_held + begin, rows, signal, forward, terms, add, back, group))
        part.held_rows += union.size

    def _pass_on(
        self, source: int, carrier: int, union: Rows
    ) -> Iterator[tuple[tuple[Put, ...], tuple[int, ...], Sum]]:
        """For each block of the rows that ``carrier`` holds of ``source``: who gets them, the signals of what these
        add, and the sum. All blocks at once, because there are many and numpy is slow to begin."""
        mates, part, size = self.nodes.mates(carrier), self.parts[carrier], self.block_rows
        wanted = [self.needed[source][reader] for reader in mates]
        reader_of = np.repeat(np.arange(len(mates)), [rows.size for rows in wanted])
        ascending = np.argsort(union)
        at = ascending[np.searchsorted(union, np.concatenate(wanted), sorter=ascending)]
        places = np.concatenate([self.placed[reader][source] for reader in mates])
        group_of = np.concatenate([self.routes.group_of(r, self.placed[r][source]) for r in mates])
        # Blocks, in these the readers, in these the groups, in these the rows.
        order = np.lexsort((at, group_of, reader_of, at // size))
        at, places, reader_of, group_of = at[order], places[order], reader_of[order], group_of[order]
        terms = np.arange(part.term_rows, part.term_rows + at.size)
        is_new = [np.diff(of_row, prepend=-1) != 0 for of_row in (at // size, reader_of, group_of)]
        starts = np.flatnonzero(np.logical_or.reduce(is_new))
        forwards = _grouped(_runs(part.held_rows + at, places, starts), at.size, starts)
        gives = _grouped(_runs(terms, places, starts), at.size, starts)
        by_row = np.argsort(at, kind="stable")  # why stable: terms of a row stay in the order of the ranks
        ends = np.concatenate([[0], np.cumsum(np.bincount(at, minlength=union.size))])
        block, summed = -1, terms[by_row]
        forward: list[Put] = []
        signals: list[int] = []
        blocks, readers = (at[starts] // size).tolist(), reader_of[starts].tolist()
        for g, (new, reader) in enumerate(zip([*blocks, -1], [*readers, -1])):
            if new != block and block >= 0:
                begins = ends[block * size : (block + 1) * size + 1]
                yield tuple(forward), tuple(signals), Sum(begins - begins[0], summed[begins[0] : begins[-1]])
                forward, signals = [], []
            if new >= 0:
                forward += self._out(carrier, mates[reader], forwards[g])
                signals.append(_added(part.reduce_signals, mates[reader], len(gives[g])))
                give = [Put(carrier, b, Region.TERMS, a, n, signals[-1]) for a, b, n in gives[g]]
                self.parts[mates[reader]].give += give
            block = new
        part.term_rows += at.size

    def _finish(self, rank: int) -> RankTransfers:
        part, nodes = self.parts[rank], self.nodes
        returns = self.returns[rank]
        grad_rows = sum(rows.size for rows in returns) - returns[rank].size
        far = [s for s in range(nodes.world) if nodes.node_of[s] != nodes.node_of[rank]]
        carried = [s for s in far if nodes.carrier(s, nodes.node_of[rank]) == rank]
        carriers = {nodes.carrier(rank, nodes.node_of[s]) for s in far}
        mates = nodes.mates(rank)
        return RankTransfers(
            rank,
            # Stable, so as they were listed within a group: far ranks first.
            tuple(sorted(part.send, key=lambda put: put.group)),
            tuple(sorted(part.blocks, key=lambda block: block.group)),
            tuple(part.arrivals),
            tuple(part.give),
            tuple(part.grads),
            self.routes.input_rows[rank],
            returns,
            self.placed[rank][rank],
            tuple(part.cast_signals),
            tuple(part.reduce_signals),
            (part.held_rows, self.routes.output_rows[rank], part.term_rows, grad_rows),
            tuple(sorted({*mates, *carried})),
            tuple(sorted({*mates, *carriers})),
        )


def _runs(sources: Rows, targets: Rows, starts: Rows | None = None) -> Iterator[Run]:
    """(first source, first target, rows) of the runs in which both rise by one; a new one at each of ``starts``."""
    if not sources.size:
        return
    is_new = np.ones(sources.size, bool)
    is_new[1:] = (np.diff(sources) != 1) | (np.diff(targets) != 1)
    if starts is not None:
        is_new[starts] = True
    begins = np.flatnonzero(is_new)
    sizes = np.diff(begins, append=sources.size)
    yield from zip(sources[begins].tolist(), targets[begins].tolist(), sizes.tolist())


def _grouped(runs: Iterator[Run], rows: int, starts: Rows) -> list[list[Run]]:
    """Runs of ``rows`` rows by the groups of rows that begin at ``starts``; no run lies in two of them."""
    found: list[list[Run]] = []
    for size in np.diff(starts, append=rows).tolist():
        group = []
        while size:
            group.append(next(runs))
            size -= group[-1][2]
        found.append(group)
    return found
