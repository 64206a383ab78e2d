# SPDX-License-Identifier: Apache-2.0
"""The lanes of ``csrc/ffa/sm90/bwd_feed.cuh`` and ``bwd_add.cuh``, the warpgroups of ``bwd_step.cuh``: processes that
wait and arrive.

Barriers count phases as mbarriers do, by parity, so a lane that is two phases late waits for ever, as it would. Who
runs next is drawn, with some slower than others. What a run shows: everything ends, the words of a step are still those
of the step when they are read, and no dq is written over before it was added. It follows the CUDA code line by line and
does not show that the code keeps to it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import numpy as np

Wait = Callable[[], bool]


@dataclass(frozen=True)
class Config:
    """Of ``BwdConfig``: stages of Q and dO; how dq leaves; what goes on into the next step.

    In turns lanes that add dq are told of steps in two ``places`` each: one if there is one stage, else two, of which
    one adds all if it ``is_alone``.
    """

    stages: int
    dq: str  # "direct", "shares" or "turns"
    is_flying: bool
    is_wide: bool = False
    is_dq_over_ds: bool = False
    is_alone: bool = False
    places_of_each: int = 2

    @property
    def adders(self) -> int:
        return 2 if self.dq == "turns" and self.stages == 2 else 1

    @property
    def places(self) -> int:
        return self.adders * self.places_of_each


class Barrier:
    """An mbarrier for ``count`` arrivals."""

    def __init__(self, count: int) -> None:
        self.count, self.pending, self.phase = count, count, 0

    def arrive(self) -> None:
        self.pending -= 1
        if self.pending == 0:
            self.pending, self.phase = self.count, self.phase + 1

    def is_over(self, parity: int) -> Wait:
        return lambda: self.phase % 2 != parity


class Machine:
    """One CTA that works on ``units``, numbers of steps."""

    def __init__(self, config: Config, units: list[int], rng: np.random.Generator) -> None:
        self.c, self.units, self.rng = config, units, rng
        n = config.stages
        self.q_full, self.do_full = ([Barrier(1) for _ in range(n)] for _ in range(2))
        self.step_full = [Barrier(1) for _ in range(config.places)]
        self.q_empty, self.do_empty = ([Barrier(2) for _ in range(n)] for _ in range(2))
        shares = 2 if config.dq == "shares" else 1
        self.dq_full = [Barrier(2 // shares) for _ in range(max(shares, config.adders))]
        self.dq_empty = [Barrier(1) for _ in range(shares)]
        self.ds_empty, self.both, self.over = Barrier(2), Barrier(2), Barrier(2)
        self.words: list[int | None] = [None] * n  # which step a slot tells of
        self.told: list[int | None] = [None] * config.places
        self.staged: list[tuple[int, bool] | None] = [None] * 2  # dq of a warpgroup: its step; does the unit end?
        self.added: list[list[int]] = [[], []]
        self.keys_loaded = 0
        self.units_begun = [0, 0]  # all of the one before has been added
        self.units_done = [0, 0]
        self.copies: list[Callable[[], None]] = []  # asynchronous, under way

    def run(self) -> None:
        """Raises AssertionError if somebody waits for ever or reads what is not meant."""
        in_turns = self.c.dq == "turns"
        adders = [self.add_every_second(who) for who in range(2)] if in_turns else [self.add_dq()]
        lanes = [self.copy_queries(), *adders, self.warpgroup(0), self.warpgroup(1)]
        waits: list[Wait | None] = [lambda: True] * len(lanes)
        weights = self.rng.choice((0.05, 0.3, 1.0), len(lanes) + 1)
        while any(wait is not None for wait in waits):
            ready = [i for i, wait in enumerate(waits) if wait is not None and wait()]
            if self.copies:
                ready.append(len(lanes))
            assert ready, f"all wait: {[n for n, wait in enumerate(waits) if wait is not None]}"
            share = weights[ready] / weights[ready].sum()
            i = int(self.rng.choice(ready, p=share))
            if i == len(lanes):
                self.copies.pop(int(self.rng.integers(len(self.copies))))()
                continue
            waits[i] = next(lanes[i], None)
        assert self.added == [list(range(sum(self.units)))] * 2 or self.c.dq == "direct"

    # ---- the feeding side ---------------------------------------------------------------------------
    def copy_dout(self, slot: int, phase: int) -> Iterator[Wait]:
        yield self.do_empty[slot].is_over(phase ^ 1)
        self.copies.append(self.do_full[slot].arrive)

    def copy_queries(self) -> Iterator[Wait]:
        ring, step = Ring(self.c.stages), 0
        for unit, steps in enumerate(self.units):
            # The next unit is handed out when the last one's copies have been asked for, in turns when it is added.
            if self.c.dq == "turns":
                yield lambda unit=unit: min(self.units_begun) >= unit
            for _ in range(steps):
                yield self.q_empty[ring.slot].is_over(ring.phase ^ 1)
                self.words[ring.slot] = step
                if self.c.dq == "turns":
                    self.told[step % self.c.places] = step
                    self.step_full[step % self.c.places].arrive()
                self.copies.append(self.q_full[ring.slot].arrive)
                yield from self.copy_dout(ring.slot, ring.phase)
                ring.advance()
                step += 1

    def add_dq(self) -> Iterator[Wait]:
        phase = 0
        for unit in range(len(self.units)):
            yield lambda unit=unit: min(self.units_done) >= unit  # room for its keys
            self.keys_loaded += 1
            if self.c.dq == "shares":
                phase = yield from self.add_shares(phase)

    def send_dq(self, step: int) -> Iterator[Wait]:
        """Of both warpgroups, when it is there."""
        yield lambda: True  # for its turn
        for group in (0, 1):
            assert self.staged[group] is not None and self.staged[group][0] == step
            self.added[group].append(step)
            self.staged[group] = None
        self.dq_empty[0].arrive()
        yield lambda: True  # until it is complete, and passed on

    def add_every_second(self, who: int) -> Iterator[Wait]:
        ring, step, is_alone = Ring(self.c.places), 0, self.c.is_alone or self.c.adders == 1
        for unit, steps in enumerate(self.units):
            if who == 1 and is_alone:
                yield lambda unit=unit: min(self.units_begun) >= unit
                self.units_begun[who] += 1
                continue
            if who == 0:
                yield lambda unit=unit: min(self.units_done) >= unit  # room for its keys
                self.keys_loaded += 1
            for _ in range(steps):
                yield self.step_full[ring.slot].is_over(ring.phase)
                assert self.told[ring.slot] == step, "what is told of another step"
                if step % 2 == who or is_alone:
                    yield self.dq_full[step % self.c.adders].is_over(step // self.c.adders & 1)
                    yield from self.send_dq(step)
                ring.advance()
                step += 1
            self.units_begun[who] += 1

    def add_shares(self, phase: int) -> Generator[Wait, None, int]:
        ends = False
        while not ends:
            for share in (0, 1):
                yield self.dq_full[share].is_over(phase)
                found = self.staged[share]
                assert found is not None
                self.added[share].append(found[0])
                ends = found[1]
            phase ^= 1
            yield lambda: True  # until it has been read
            self.staged = [None, None]
            for share in (0, 1):
                self.dq_empty[share].arrive()
        return phase

    # ---- the consumers ------------------------------------------------------------------------------
    def warpgroup(self, group: int) -> Iterator[Wait]:
        ring, step = Ring(self.c.stages), 0
        for unit, steps in enumerate(self.units):
            yield lambda unit=unit: self.keys_loaded > unit
            before: int | None = None  # slot whose Q is still being read
            if self.c.is_wide:
                yield self.q_full[ring.slot].is_over(ring.phase)
            for i in range(steps):
                if self.c.is_wide and i > 0:
                    self.announce(group, step - 1)
                before = yield from self.step(group, ring, step, before, i + 1 == steps)
                step += 1
            if self.c.is_wide:
                self.announce(group, step - 1)
            if before is not None:
                self.q_empty[before].arrive()
            yield from self.meet(self.both)
            self.units_done[group] += 1

    def meet(self, barrier: Barrier) -> Iterator[Wait]:
        phase = barrier.phase
        barrier.arrive()
        yield lambda: barrier.phase > phase

    def step(
        self, group: int, ring: Ring, step: int, before: int | None, ends: bool
    ) -> Generator[Wait, None, int | None]:
        slot, parity = ring.slot, step & 1
        if not self.c.is_wide:  # those have asked in the step before
            yield self.q_full[slot].is_over(ring.phase)
        if before is not None:
            self.q_empty[before].arrive()
        yield self.do_full[slot].is_over(ring.phase)
        assert self.words[slot] == step, "the words of another step"
        if self.c.is_dq_over_ds:
            yield self.dq_empty[0].is_over(parity ^ 1)
        if self.c.is_wide:
            yield self.ds_empty.is_over(parity ^ 1)
        yield from self.meet(self.both)
        self.do_empty[slot].arrive()
        if self.c.is_wide:
            self.ds_empty.arrive()
        if self.c.dq != "direct":
            yield from self.hand_over(group, step, parity, ends)
        ring.advance()
        if self.c.is_wide and not ends:
            yield self.q_full[ring.slot].is_over(ring.phase)
        if not self.c.is_flying:
            self.q_empty[slot].arrive()
        return slot if self.c.is_flying else None

    def hand_over(self, group: int, step: int, parity: int, ends: bool) -> Iterator[Wait]:
        share = group if self.c.dq == "shares" else 0
        if self.c.is_dq_over_ds:
            yield from self.meet(self.over)
        else:
            yield self.dq_empty[share].is_over(parity ^ 1)
        assert self.staged[group] is None, "dq was written over"
        self.staged[group] = (step, ends)
        if not self.c.is_wide:  # those do so in the next step, or when the unit ends
            self.announce(group, step)

    def announce(self, group: int, step: int) -> None:
        self.dq_full[step % self.c.adders if self.c.dq == "turns" else group if self.c.dq == "shares" else 0].arrive()


class Ring:
    """``Ring`` of barrier.cuh."""

    def __init__(self, stages: int) -> None:
        self.stages, self.slot, self.phase = stages, 0, 0

    def advance(self) -> None:
        self.slot += 1
        if self.slot == self.stages:
            self.slot, self.phase = 0, self.phase ^ 1
