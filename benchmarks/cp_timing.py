# SPDX-License-Identifier: Apache-2.0
"""Times of one distributed attention step: on the device, by the wall clock, and of its kernels alone.

An iteration is a forward and the backward of what it kept. Before each of the two, all ranks meet in an all-reduce of
one number, so that both begin together on all ranks; on a GPU the caches are flushed before and the device idles a
while, so that launches are queued when the clock starts. Nothing in a timed region waits for the device.

By the wall clock it is a row of layers, as in a model: the forward of all, then the backward of all in one call of
autograd, each row from an idle device to an idle device, per layer. So what the host does counts where the device waits
for it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from magi_attention.benchmarking import timing

PHASES = ("forward", "backward")
Milliseconds = dict[str, list[float]]  # one per iteration, for each phase


@dataclass
class Step:
    """``forward()`` is that of a layer; ``backward`` takes what the layers of a row gave, the first layer first."""

    forward: Callable[[], object]
    backward: Callable[[list], object]


class Clock(timing.Clock):
    """Meets the other ranks."""

    def __init__(self, device: torch.device, flush: bool = True) -> None:
        super().__init__(device, torch.int32 if flush else None, is_shared=True)

    def agreed(self, value: float) -> float:
        """The value of rank 0, on all ranks."""
        told = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(told, 0)
        return told.item()


@contextmanager
def no_collection():
    """No garbage collection meanwhile: it would stop one rank, and all wait for it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def heat_up(step: Step, clock: Clock, seconds: float) -> int:
    """Iterations for ``seconds`` by the clock of rank 0, and how many those were. What is timed then begins as hot as
    what was timed before it: GPUs at work grow slower by some percent."""
    iterations, started = 0, time.perf_counter()
    while seconds > 0:
        step.backward([step.forward()])
        clock.synchronise()
        iterations += 1
        if clock.agreed(seconds - (time.perf_counter() - started)) <= 0:
            break
    return iterations


def device_ms(step: Step, clock: Clock, warm_up: int, repeats: int) -> Milliseconds:
    """Device time of this rank, by events on its stream; the host runs ahead."""
    marks = []
    with no_collection():
        for iteration in range(warm_up + repeats):
            clock.idle()
            clock.meet()
            first = clock.mark()
            row = [step.forward()]
            second = clock.mark()
            clock.idle()
            clock.meet()
            third = clock.mark()
            step.backward(row)
            fourth = clock.mark()
            del row
            if iteration >= warm_up:
                marks.append((first, second, third, fourth))
        clock.synchronise()
    return {
        "forward": [clock.between(m[0], m[1]) for m in marks],
        "backward": [clock.between(m[2], m[3]) for m in marks],
    }


def wall_ms(step: Step, clock: Clock, repeats: int, layers: int) -> tuple[Milliseconds, Milliseconds]:
    """Per layer of a row of ``layers``: (from the first call to the last result, of which the calls themselves).

    A first row is not timed: it asks the device for the memory of so many layers, which the rows behind it find.
    """
    wall: Milliseconds = {phase: [] for phase in PHASES}
    host: Milliseconds = {phase: [] for phase in PHASES}
    with no_collection():
        for _ in range(repeats + 1):
            row: list = []
            for phase in PHASES:
                clock.meet()
                clock.synchronise()
                started = time.perf_counter()
                if phase == "forward":
                    row.extend(step.forward() for _ in range(layers))
                else:
                    grads = step.backward(row)  # held, as a model holds them
                returned = time.perf_counter()
                clock.synchronise()
                wall[phase].append((time.perf_counter() - started) * 1e3 / layers)
                host[phase].append((returned - started) * 1e3 / layers)
            del row, grads
    wall, host = ({phase: values[1:] for phase, values in times.items()} for times in (wall, host))
    return wall, host


def kernel_ms(calls: Sequence[Callable[[], object]], clock: Clock, repeats: int) -> float:
    """Median of this rank's kernel calls one after another, with no communication in between."""
    marks = []
    for iteration in range(repeats + 1):
        clock.idle()
        first = clock.mark()
        for call in calls:
            call()
        if iteration:
            marks.append((first, clock.mark()))
    clock.synchronise()
    return median(clock.between(a, b) for a, b in marks)


def peak_bytes(step: Step, clock: Clock, result_bytes: tuple[int, int]) -> dict[str, int] | None:
    """Most memory in use beyond inputs and results, by the allocator; None without a GPU.

    ``result_bytes`` are the bytes of out and of all gradients, which are subtracted. ``both`` is the peak of a
    forward and its backward, with what the one keeps for the other.
    """
    if not clock.is_cuda:
        return None
    out_bytes, grad_bytes = result_bytes
    clock.synchronise()
    gc.collect()
    torch.cuda.reset_peak_memory_stats(clock.device)
    base = torch.cuda.memory_allocated(clock.device)
    row = [step.forward()]
    clock.synchronise()
    forward = torch.cuda.max_memory_allocated(clock.device) - base - out_bytes
    step.backward(row)
    clock.synchronise()
    both = torch.cuda.max_memory_allocated(clock.device) - base - out_bytes - grad_bytes
    return {"forward": max(forward, 0), "both": max(both, 0)}


def outside_bytes(clock: Clock) -> int:
    """Memory of the device in use that torch's allocator does not know of: symmetric memory, buffers of NCCL."""
    if not clock.is_cuda:
        return 0
    free, total = torch.cuda.mem_get_info(clock.device)
    return total - free - torch.cuda.memory_reserved(clock.device)


def with_both(times: Milliseconds) -> Milliseconds:
    """Adds ``both``: the two phases of each iteration, summed."""
    return times | {"both": [a + b for a, b in zip(times["forward"], times["backward"])]}


def over_ranks(times: Milliseconds, device: torch.device, is_mean: bool = False) -> Milliseconds:
    """For each iteration, the largest over ranks, or the mean."""
    names = sorted(times)
    table = torch.tensor([times[name] for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(table, op=dist.ReduceOp.SUM if is_mean else dist.ReduceOp.MAX)
    return dict(zip(names, (table / dist.get_world_size() if is_mean else table).tolist()))


def mean_and_max(value: float, device: torch.device) -> tuple[float, float]:
    """Over ranks."""
    total, most = (torch.tensor([value], dtype=torch.float64, device=device) for _ in range(2))
    dist.all_reduce(total)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return total.item() / dist.get_world_size(), most.item()
