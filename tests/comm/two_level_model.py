# SPDX-License-Identifier: Apache-2.0
"""Ranks that run transfer plans by four verbs, in a world that delays and reorders what they do.

A rank is a generator of verbs: ``Send`` a put, ``Wait`` until a signal of its own reaches a count, ``Drain`` until its
puts have read their sources. A barrier is made of these, so that it can say who did not come. The scheduler decides, by
a seed, when a put reads its source (any time before the drain), when its rows land, in pieces, and when its signal is
added: after its own rows, with no regard to those of others.

Memory holds names of rows in place of numbers. A read finds the row of its epoch or the world stops; so does a write
onto a row that has not had all its reads.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from typing import NamedTuple

import numpy as np

from magi_attention.common.two_level.transfers import Put, Region, Sum

OMISSIONS = ("credits", "drain", "whole blocks", "arrivals")


class Violation(AssertionError):
    """The protocol let something happen that must not."""


class RankLost(Exception):
    """What a rank raises that waited in vain: ``args[0]`` is the rank that it holds for dead."""


class Send(NamedTuple):
    source: str | Region
    put: Put | None  # None: a signal alone
    peer: int
    signal: object
    add: int = 1


class Wait(NamedTuple):
    signal: object
    count: int
    sender: int


class Drain(NamedTuple):
    pass


class Cell:
    __slots__ = ("epoch", "reads", "value")

    def __init__(self):
        self.epoch, self.reads, self.value = -1, 0, None


class Rank:
    """One rank's memory and its program over the epochs; an epoch is ("cast" | "reduce", plan)."""

    def __init__(self, rank, world):
        self.rank, self.world, self.epochs = rank, world, world.epochs
        self.signals, self.totals, self.ended = Counter(), Counter(), Counter()
        parts = [plan.ranks[rank] for _, plan in self.epochs]
        self.regions = {g: [Cell() for _ in range(max(p.region_rows[g] for p in parts))] for g in Region}
        self.local = {name: (-1, {}) for name in ("input", "partials", "sums")}  # by epoch, as its own memory is reused
        self.results, self.reading, self.is_done, self.lost = [], 0, False, None

    # ---- memory -------------------------------------------------------------------------------------------------
    def read(self, source, row, epoch):
        if not isinstance(source, Region):
            held, rows = self.local[source]
            if held != epoch:
                raise Violation(f"{source} of rank {self.rank} is of epoch {held} when a put of epoch {epoch} reads it")
            return rows[row]
        cell = self.regions[source][row]
        if cell.epoch != epoch or cell.reads < 1:
            raise Violation(f"rank {self.rank} reads {source.name}[{row}] in epoch {epoch}, which holds {cell.epoch}")
        cell.reads -= 1
        return cell.value

    def write(self, region, row, value, epoch):
        cell = self.regions[region][row]
        if cell.reads:
            raise Violation(f"{region.name}[{row}] of rank {self.rank} is written before epoch {cell.epoch} read it")
        if cell.epoch == epoch:
            raise Violation(f"{region.name}[{row}] of rank {self.rank} arrives twice in epoch {epoch}")
        cell.epoch, cell.value, cell.reads = epoch, value, self.world.reads[epoch][self.rank][region][row]

    # ---- program ------------------------------------------------------------------------------------------------
    def program(self):
        try:
            yield from self.barrier("begin")
            for epoch, (kind, plan) in enumerate(self.epochs):
                part = plan.ranks[self.rank]
                yield from (self.cast if kind == "cast" else self.reduce)(epoch, part)
                self.ended[kind] += 1
            yield from self.barrier("end")
            self.is_done = True
        except RankLost as error:
            self.lost = error.args[0]

    def wait(self, signal, count, sender):
        if (yield Wait(signal, count, sender)):
            return
        yield from self.blame(sender)

    def blame(self, sender):
        """Tells all for whom this rank waits, and gives them the time to do the same; then follows who waits for whom
        to the rank that waits for nobody."""
        for peer in range(self.world.size):
            yield Send("input", None, peer, ("waits", self.rank), 1 + sender)
        yield Wait("never", 1, sender)
        while waits := self.signals["waits", sender]:
            sender = waits - 1
        raise RankLost(sender)

    def barrier(self, name):
        for peer in range(self.world.size):
            yield Send("input", None, peer, (name, self.rank))
        for peer in range(self.world.size):
            yield from self.wait((name, peer), 1, peer)

    def arrived(self, kind, signals, index, omission):
        signal, (sender, expected, _) = (kind, index), signals[index]
        self.totals[signal] += expected
        missing = expected - 1 if self.world.omit == omission else 0  # goes on when the first put is here
        yield from self.wait(signal, self.totals[signal] - missing, sender)

    def begin(self, kind, peers):
        if self.world.omit != "credits":
            for peer in sorted(peers):
                yield from self.wait(("free", kind, peer), self.ended[kind], peer)

    def end(self, kind, peers):
        if self.world.omit != "drain":
            yield Drain()
        for peer in peers:
            yield Send("input", None, peer, ("free", kind, self.rank))

    def send(self, kind, source, puts):
        for put in puts:
            yield Send(source, put, put.peer, (kind, put.signal))

    def cast(self, epoch, part):
        rows = max((p.source_row + p.rows for p in part.send), default=0)
        self.local["input"] = epoch, {row: ("x", epoch, self.rank, row) for row in range(rows)}
        forwards = [put for block in part.blocks for put in block.forward]
        yield from self.begin("cast", {put.peer for put in (*part.send, *forwards)})
        yield from self.send("cast", "input", part.send)
        for block in part.blocks:
            yield from self.arrived("cast", part.cast_signals, block.held, "whole blocks")
            yield from self.send("cast", Region.HELD, block.forward)
        for signal in part.arrivals:
            yield from self.arrived("cast", part.cast_signals, signal, "arrivals")
        self.results.append([self.read(Region.OUT, row, epoch) for row in range(part.region_rows[Region.OUT])])
        yield from self.end("cast", part.upstream)

    def reduce(self, epoch, part):
        rows = range(part.region_rows[Region.OUT])
        self.local["partials"], sums = (epoch, {row: ("p", epoch, self.rank, row) for row in rows}), {}
        self.local["sums"] = epoch, sums
        yield from self.begin("reduce", {put.peer for put in (*part.give, *(b.back for b in part.blocks))})
        yield from self.send("reduce", "partials", part.give)
        for block in part.blocks:
            for signal in block.terms:
                yield from self.arrived("reduce", part.reduce_signals, signal, "whole blocks")
            for row, terms in enumerate(self.add(block.add, Region.TERMS, epoch)):
                sums[block.first + row] = terms
            yield from self.send("reduce", "sums", [block.back])
        for signal in part.grads:
            yield from self.arrived("reduce", part.reduce_signals, signal, "arrivals")
        self.results.append(self.add(own_sum(part), Region.GRADS, epoch))
        yield from self.end("reduce", part.downstream)

    def add(self, table, region, epoch):
        return [
            tuple(
                self.read(region, t, epoch) if t >= 0 else self.read("partials", -1 - t, epoch)
                for t in table.terms[a:b].tolist()
            )
            for a, b in zip(table.begins[:-1].tolist(), table.begins[1:].tolist())
        ]


def own_sum(part):
    """The sum of an owner; a term -1 - t is row t of its own partials."""
    terms, at = [[] for _ in range(part.input_rows)], 0
    for sender, rows in enumerate(part.returns):
        for i, row in enumerate(rows.tolist()):
            terms[row].append(-1 - int(part.own_rows[i]) if sender == part.rank else at)
            at += sender != part.rank
    return Sum(np.cumsum([0, *map(len, terms)]), np.array([t for ts in terms for t in ts], np.int64))


def reads_of(part):
    """How often each row of each region is read in an epoch that writes it."""
    reads = {g: np.ones(part.region_rows[g], np.int64) for g in Region}
    reads[Region.HELD][:] = 0
    for block in part.blocks:
        for put in block.forward:
            reads[Region.HELD][put.source_row : put.source_row + put.rows] += 1
    return {g: counts.tolist() for g, counts in reads.items()}


class World:
    """Runs the epochs once. ``dies``: a rank that stops at a time of the seed's choice, where ``timeout`` is finite."""

    def __init__(self, epochs, seed, timeout=math.inf, dies=None, omit=None):
        self.epochs, self.size, self.omit, self.timeout = epochs, epochs[0][1].nodes.world, omit, timeout
        self.seed, self.random = seed, random.Random(seed)
        self.heap, self.now, self.count = [], 0.0, 0
        self.reads = [[reads_of(part) for part in plan.ranks] for _, plan in epochs]
        self.ranks = [Rank(r, self) for r in range(self.size)]
        self.programs = [rank.program() for rank in self.ranks]
        self.blocked: dict[int, tuple[Wait, int]] = {}
        self.draining: set[int] = set()
        self.dead: set[int] = set()
        # how wild this world is: most delays are short, some last `slow` times as long
        self.share, self.slow = self.random.choice([(0.0, 1), (0.1, 30), (0.3, 10), (0.02, 100)])
        for rank in range(self.size):
            self.later(self.delay(), self.resume, rank, None)
        if dies is not None:
            self.later(self.random.uniform(0, 40), self.kill, dies)

    def delay(self):
        return self.random.random() * (self.slow if self.random.random() < self.share else 1)

    def later(self, delay, action, *args):
        self.count += 1
        heapq.heappush(self.heap, (self.now + delay, self.count, action, args))

    def run(self):
        try:
            while self.heap:
                self.now, _, action, args = heapq.heappop(self.heap)
                action(*args)
        except Violation as error:
            raise Violation(f"seed {self.seed}: {error}") from None
        stuck = [r.rank for r in self.ranks if not (r.is_done or r.lost is not None or r.rank in self.dead)]
        if stuck:
            raise Violation(f"seed {self.seed}: ranks {stuck} wait for ever: {[self.blocked.get(r) for r in stuck]}")
        return self

    def kill(self, rank):
        self.dead.add(rank)
        self.programs[rank].close()

    def resume(self, rank, answer):
        if rank in self.dead:
            return
        try:
            verb = self.programs[rank].send(answer)
        except StopIteration:
            return
        if isinstance(verb, Wait):
            self.blocked[rank] = verb, self.count
            self.look(rank)
            if rank in self.blocked and self.timeout < math.inf:
                self.later(self.timeout, self.give_up, rank, self.blocked[rank])
        elif isinstance(verb, Drain):
            self.draining.add(rank)
            self.look(rank)
        else:
            self.issue(rank, verb)
            self.later(0.1 * self.delay(), self.resume, rank, None)

    def give_up(self, rank, waiting):
        if self.blocked.get(rank) is waiting:
            del self.blocked[rank]
            self.resume(rank, False)

    def look(self, rank):
        """Goes on with a rank that has what it waits for."""
        if rank in self.blocked:
            wait = self.blocked[rank][0]
            if self.ranks[rank].signals[wait.signal] >= wait.count:
                del self.blocked[rank]
                self.later(0.1 * self.delay(), self.resume, rank, True)
        elif rank in self.draining and not self.ranks[rank].reading:
            self.draining.remove(rank)
            self.later(0.1 * self.delay(), self.resume, rank, None)

    # ---- a put ----------------------------------------------------------------------------------------------------
    def issue(self, rank, send):
        epoch = sum(self.ranks[rank].ended.values())
        if send.put is None:
            self.later(self.delay(), self.add, send)
        else:
            self.ranks[rank].reading += 1
            self.later(self.delay(), self.depart, rank, send, epoch)

    def depart(self, rank, send, epoch):
        """The put reads its source, unless its rank died in between."""
        if rank in self.dead and self.random.random() < 0.5:
            return
        put, sender = send.put, self.ranks[rank]
        values = [sender.read(send.source, put.source_row + i, epoch) for i in range(put.rows)]
        last, pieces = 0.0, range(put.rows) if put.rows < 4 else self.random.sample(range(put.rows), put.rows)
        for i in pieces:
            at = self.delay()
            last = max(last, at)
            self.later(at, self.land, put, i, values[i], epoch)
        self.later(last + (0 if self.random.random() < 0.5 else self.delay()), self.add, send)
        sender.reading -= 1
        self.look(rank)

    def land(self, put, i, value, epoch):
        if put.peer not in self.dead:
            self.ranks[put.peer].write(put.target, put.target_row + i, value, epoch)

    def add(self, send):
        self.ranks[send.peer].signals[send.signal] += send.add
        if send.peer not in self.dead:
            self.look(send.peer)
