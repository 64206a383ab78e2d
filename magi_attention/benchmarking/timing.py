# SPDX-License-Identifier: Apache-2.0
"""Device time of several functions side by side, and what a call costs the host.

Nothing else of the package is imported, so that programs can time another version of it by this file.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

FLUSH_BYTES = 256 * 2**20  # more than the L2 of any GPU so far
WARM_UP_SECONDS = 1.0
LEAD_CYCLES = 500_000  # about 0.3 ms of idling on the GPU, in which the host gets its launches queued
# For calls through autograd, which cost the host more, and for two calls in a row.
LONG_LEAD_CYCLES = 4 * LEAD_CYCLES
HOST_ROUND_SECONDS = 0.2  # at most, of the GPU, for one round of host times
Call = Callable[[], object]


def reason_of(failure: Exception) -> str:
    """One line. Text, because the frames of an exception that is kept would hold tensors."""
    return f"{type(failure).__name__}: {str(failure).partition(chr(10))[0][:200]}"


class Clock:
    """Marks times on ``device``; on the CPU by the host's clock. ``idle`` empties the GPU's L2 cache by writes of
    ``flush``, None for none. ``is_shared``: ``meet`` waits for all ranks."""

    def __init__(
        self, device: torch.device, flush: torch.dtype | None = torch.int32, is_shared: bool = False
    ) -> None:
        self.device, self.is_cuda = device, device.type == "cuda"
        self._flush: torch.Tensor | None = None
        if flush is not None and self.is_cuda:
            self._flush = torch.empty(FLUSH_BYTES // flush.itemsize, dtype=flush, device=device)
        self._ticket = torch.zeros(1, device=device) if is_shared else None

    def synchronise(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def idle(self, lead_cycles: int = LONG_LEAD_CYCLES) -> None:
        """Flushes the cache and idles, while the host gets ahead; both on the device."""
        if self._flush is not None:
            self._flush.zero_()
        if self.is_cuda and lead_cycles:
            torch.cuda._sleep(lead_cycles)

    def meet(self) -> None:
        """Ordered on the device: what is launched afterwards begins when all ranks have come here."""
        if self._ticket is not None:
            dist.all_reduce(self._ticket)

    def mark(self) -> torch.cuda.Event | float:
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first, second) -> float:
        """Milliseconds; the device must have passed both marks."""
        return first.elapsed_time(second) if self.is_cuda else (second - first) * 1e3


def interleaved_us(
    calls: Mapping[str, Call], repeats: int, failed: dict[str, str] | None, lead_cycles: int = LEAD_CYCLES,
    device: str = "cuda", warm_up_s: float = WARM_UP_SECONDS, *, clock: Clock | None = None,
    warm_up_rounds: int | None = None, before: Call | None = None, waits: bool = True,
) -> dict[str, list[float]]:  # fmt: skip
    """Microseconds of each call, ``repeats`` times each in turns, so that clocks and heat drift for all alike.

    Each round has an order of its own, drawn with seed 0, so that none always follows the one that leaves the chip
    coolest, which counts at the power limit. Before each, a buffer larger than the L2 cache is written, and the GPU
    waits until the host has launched, so the host's share is not counted: of nobody, also where it is large. A call
    that raises, out of memory for one, leaves the round and the result, and has its reason in ``failed``; where that
    is None it ends the measurement. On the CPU calls run after one another, and one of each warms up.

    ``clock``: in place of one of ``device``; with a shared one each call begins on all ranks at once. With
    ``warm_up_rounds`` so many rounds warm up, in place of seconds: ranks make as many. ``before`` runs ahead of each
    call and is not timed. ``waits`` False: the host does not wait between rounds, so it counts where it is slower.
    """
    calls = dict(calls)

    def attempt(name: str) -> None:
        try:
            calls[name]()
        except Exception as failure:
            if failed is None:
                raise
            failed[name] = reason_of(failure)
            del calls[name]

    clock = clock or Clock(torch.device(device))
    started = time.perf_counter()
    while calls and warm_up_rounds is None and time.perf_counter() - started < warm_up_s:
        for name in list(calls):
            attempt(name)
        clock.synchronise()
        if not clock.is_cuda:
            break
    marks: dict[str, list[tuple]] = {name: [] for name in calls}
    draw, skipped = random.Random(0), warm_up_rounds or 0
    for _ in range(skipped + repeats):
        for name in draw.sample(list(calls), len(calls)):  # a copy, as calls may leave
            if before is not None:
                before()
            clock.idle(lead_cycles)
            clock.meet()
            first = clock.mark()
            attempt(name)
            marks[name].append((first, clock.mark()))
        if waits:
            clock.synchronise()
    clock.synchronise()
    return {
        name: [clock.between(a, b) * 1e3 for a, b in pairs[skipped:]] for name, pairs in marks.items() if name in calls
    }


def host_us(call: Call, calls: int = 100, rounds: int = 5, is_alone: bool = True) -> float:
    """Microseconds that the host needs for one call, without waiting for the GPU; the best of the rounds.

    A round has fewer calls where they take long: what is queued would take the GPU minutes, or fill the queue so that
    the host waits. Not if other ranks take part (``is_alone`` False): they must make as many.
    """
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    if is_alone:
        calls = max(1, min(calls, int(HOST_ROUND_SECONDS / (time.perf_counter() - started))))
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, time.perf_counter() - started)
    torch.cuda.synchronize()
    return best / calls * 1e6


def as_graph(call: Call) -> Call:
    """``call`` captured in a CUDA graph after three warm-up runs; the result replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def middle_and_quantiles(times: Sequence[float]) -> tuple[float, float, float]:
    """Median and the 10% and 90% quantiles."""
    cuts = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else [times[0]] * 9
    return statistics.median(times), cuts[0], cuts[-1]


def summary(times_us: list[float]) -> dict[str, float]:
    """Median and the 10% and 90% quantiles."""
    return dict(zip(("median_us", "p10_us", "p90_us"), middle_and_quantiles(times_us)))
