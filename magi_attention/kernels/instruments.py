# SPDX-License-Identifier: Apache-2.0
"""What measures calls while a program runs: named intervals, and an observer of attention calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from magi_attention.env import general
from magi_attention.errors import ContractError

# Steps that kernels elsewhere time on their own -> the interval that holds them here.
PART_OF = {
    "fwd_range_merge": "fwd_run",
    "fwd_sparse_load_preprocess": "fwd_run",
    "fwd_postprocess": "fwd_run",
    "bwd_range_merge": "bwd_run",
    "bwd_preprocess": "bwd_run",
    "bwd_postprocess": "bwd_run",
}


# Names of the ranges in which a profiler shows a distributed call.
FORWARD_RANGE, BACKWARD_RANGE = "magi::attention_forward", "magi::attention_backward"


def profiler_range(name: str) -> AbstractContextManager[Any]:
    """A range in the profile of torch's profiler while one runs (under ``emit_nvtx`` an NVTX range), else nothing."""
    return torch.profiler.record_function(name) if torch.autograd.profiler._is_profiler_enabled else nullcontext()


class Timers:
    """Named intervals: CUDA events on the current stream where CUDA is in use, else the host clock."""

    def __init__(self) -> None:
        self._marks: dict[str, list[Any]] = {}

    @staticmethod
    def _now() -> Any:
        if not torch.cuda.is_initialized():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self, name: str) -> None:
        """Begins (again) the interval ``name``."""
        self._marks[name] = [self._now()]

    def stop(self, name: str) -> None:
        """Ends the interval ``name``; ``ContractError`` if it was not begun."""
        self._get(name, 1)[1:] = [self._now()]

    def elapsed_ms(self, name: str) -> float:
        """Milliseconds of the interval ``name``, the last one; waits for the device."""
        first, second = self._get(name, 2)
        if isinstance(first, float):
            milliseconds: float = (second - first) * 1e3
            return milliseconds
        second.synchronize()
        milliseconds = first.elapsed_time(second)
        return milliseconds

    def destroy(self, name: str | None = None) -> None:
        """Forgets the interval ``name``, if there is one; all of them without a name."""
        if name is None:
            self._marks.clear()
        else:
            self._marks.pop(name, None)

    @contextmanager
    def interval(self, name: str) -> Iterator[None]:
        """The time within is the interval ``name``."""
        self.start(name)
        yield
        self.stop(name)

    def _get(self, name: str, least: int) -> list[Any]:
        marks = self._marks.get(name, [])
        if len(marks) < least and name in PART_OF:
            raise ContractError(f"Event {name!r} is no step of its own here; {PART_OF[name]!r} holds it.")
        if len(marks) < least:
            raise ContractError(f"Event {name!r} was not {'started' if least == 1 else 'stopped'}; do so first.")
        return marks


class Instruments:
    """The measuring parts of a ``Registry``, which all registries made from it share.

    ``observe``, where it is set, is called with the plan, this process's rank in it and q, for each distributed call
    that has no ``trace`` of its own. It gives the list for the call's timed steps.
    """

    def __init__(self) -> None:
        self.timers = Timers()
        self.observe: Callable[[Any, int, torch.Tensor], list[dict[str, Any]]] | None = None

    def steps(self) -> Callable[[str], AbstractContextManager[None]]:
        """``timers.interval`` with ``MAGI_ATTENTION_PROFILE_MODE=1``, else a function whose intervals cost nothing.

        Events of a CUDA graph cannot be asked for their time, so there are none while one is captured.
        """
        if not general.is_profile_mode_enable():
            return untimed
        is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        return untimed if is_captured else self.timers.interval


_NOTHING = nullcontext()


def untimed(name: str) -> AbstractContextManager[None]:
    """The interval ``name`` where nobody measures."""
    return _NOTHING
