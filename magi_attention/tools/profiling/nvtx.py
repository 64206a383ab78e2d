# SPDX-License-Identifier: Apache-2.0
"""Named ranges on the timeline of a CUDA profiler. Without CUDA they cost a function call and do nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

F = TypeVar("F", bound=Callable)


def _is_on() -> bool:
    # Inside a compiled graph a push would break the graph; the enclosing range still shows.
    return torch.cuda.is_initialized() and not torch.compiler.is_compiling()


@contextmanager
def add_nvtx_event(event_name: str) -> Iterator[None]:
    """Everything inside is one range called ``event_name``."""
    is_on = _is_on()
    if is_on:
        torch.cuda.nvtx.range_push(event_name)
    try:
        yield
    finally:
        if is_on:
            torch.cuda.nvtx.range_pop()


def instrument_nvtx(func: F) -> F:
    """Every call of ``func`` is one range with its qualified name."""

    @functools.wraps(func)
    def wrapped(*args, **kwargs):
        with add_nvtx_event(func.__qualname__):
            return func(*args, **kwargs)

    return wrapped  # type: ignore[return-value]


def switch_profile(
    iter_id: int,
    start: int,
    end: int,
    profile_ranks: Sequence[int],
    event_name: str | None = None,
    record_shape: bool = True,
) -> None:
    """Call at the start of every iteration: profiles iterations ``[start, end)`` on ``profile_ranks``.

    Starts and stops the CUDA profiler, emits a range for every operator and, between, one range per
    iteration named ``event_name`` (by default ``iter{iter_id}``). Nothing happens without CUDA.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else 0
    if rank not in profile_ranks or not torch.cuda.is_available():
        return
    if start < iter_id <= end:
        torch.cuda.nvtx.range_pop()
    if iter_id == start:
        torch.cuda.profiler.start()
        torch.autograd.profiler.emit_nvtx(record_shapes=record_shape).__enter__()
    if iter_id == end:
        torch.autograd.profiler.emit_nvtx(record_shapes=record_shape).__exit__(None, None, None)
        torch.cuda.profiler.stop()
    if start <= iter_id < end:
        torch.cuda.nvtx.range_push(event_name or f"iter{iter_id}")
