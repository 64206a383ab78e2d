# SPDX-License-Identifier: Apache-2.0
"""How long units in turns take (``turns_model``), by the clock: what an order costs over one that nobody waits for.

A CTA works on its units step by step. The dq of a step is handed over when that of the step before has been read; of
two lanes each adds every second one, when its turn has come, and who is next may add when that is complete and seen. No
cache: what walks cost in L2 is not seen. Before v30 costs of 1.05 to 2.2 were within 5% of an
H100, which adds up to a tenth to those of 1.01 to 1.17 that are left (``docs/notes/ffa_backward_turns.md``).
"""

from __future__ import annotations

import heapq
from collections import Counter
from typing import NamedTuple

from turns_model import Unit


class Times(NamedTuple):
    """Microseconds. Of head dim 128 with steps of 80 queries."""

    step: float = 2.65
    read: float = 0.35  # dq, by a bulk copy
    added: float = 1.8  # until it is complete
    seen: float = 0.3  # by who is next
    begin: float = 3.0  # a unit
    end: float = 2.0


class _Cta:
    """At work on a unit: its next step, when dq of that is there, and when the last one was read."""

    def __init__(self, unit: Unit, now: float, times: Times) -> None:
        self.unit, self.step, self.read = unit, 0, now
        self.there = now + times.begin + times.step
        self.lanes = [now, now]  # when each has added its last one

    def ready(self) -> float:
        return max(self.there, self.read, self.lanes[self.step % 2])


def time_of(units: list[Unit], ctas: int, times: Times, in_turns: bool = True) -> float:
    """Microseconds until all is added. Without turns nobody waits for another CTA."""
    left, end = iter(units), 0.0
    counts: Counter[tuple[int, int, int]] = Counter()
    waiting: dict[tuple, int] = {}
    work: dict[int, _Cta] = {}
    events: list[tuple[float, int, tuple]] = [(0.0, cta, ()) for cta in range(ctas)]  # or a count, with its key
    while events:
        now, cta, key = heapq.heappop(events)
        if key:
            counts[key] += 1
            if (key, counts[key]) not in waiting:
                continue
            cta = waiting.pop((key, counts[key]))
        job = work.get(cta)
        if job is None:
            unit = next((u for u in left if u.steps), None)
            if unit is None:
                end = max(end, now)
                continue
            job = work[cta] = _Cta(unit, now, times)
        if job.ready() > now:
            heapq.heappush(events, (job.ready(), cta, ()))
            continue
        head, block = job.unit.steps[job.step]
        at, turn = (job.unit.head, head, block), job.unit.turns[job.step]
        if in_turns and counts[at] < turn:
            waiting[at, turn] = cta
            continue
        added = job.lanes[job.step % 2] = now + times.added
        if in_turns:
            heapq.heappush(events, (added + times.seen, -1, at))
        job.there = max(job.there, job.read) + times.step
        job.read = now + times.read
        job.step += 1
        if job.step < len(job.unit.steps):
            heapq.heappush(events, (job.ready(), cta, ()))
        else:
            del work[cta]
            heapq.heappush(events, (added + times.end, cta, ()))
    assert not waiting and not work, "somebody waits for ever"
    return end
