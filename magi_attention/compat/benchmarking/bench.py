# SPDX-License-Identifier: Apache-2.0
"""Time and memory of a function, on CUDA or on the CPU."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from magi_attention.benchmarking.timing import Clock, interleaved_us
from magi_attention.compat.benchmarking.report import Benchmark, Mark, perf_report, report_all_from_perf  # noqa: F401
from magi_attention.compat.names import maybe_dist_sync, nvml_context  # noqa: F401
from magi_attention.errors import ContractError

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_MODES: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "max": max,
}


class MemRecorder:
    """Peak memory of what happens between ``start()`` and ``stop()``, in bytes above the level at start.

    On CUDA it is the allocator's peak of device ``device_idx``, ``allocated`` or ``reserved``. On the CPU it
    is the peak of the resident set, 0 where the operating system does not tell it.
    """

    def __init__(self, mode: str = "allocated", device_idx: int = 0) -> None:
        if mode not in ("allocated", "reserved"):
            raise ContractError(f"mode={mode!r} is unknown; use 'allocated' or 'reserved'.")
        self._mode, self._device, self._base = mode, device_idx, 0

    def __enter__(self) -> MemRecorder:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.peak = self.stop()

    def start(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._base = getattr(torch.cuda, f"memory_{self._mode}")(self._device)
            return
        try:
            _CLEAR_REFS.write_text("5")  # resets the peak of the resident set to its present size
        except OSError:
            pass  # then the peak may be from before the start, which only overstates
        self._base = _resident("VmRSS")

    def stop(self) -> int:
        """Peak in bytes above the level at start."""
        if torch.cuda.is_available():
            torch.cuda.synchronize(self._device)
            return getattr(torch.cuda, f"max_memory_{self._mode}")(self._device) - self._base
        return max(_resident("VmHWM") - self._base, 0)


def _resident(field: str) -> int:
    if not _STATUS.exists():
        return 0
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def do_bench(
    fn: Callable[[], Any],
    warmup: int = 25,
    rep: int = 100,
    grad_to_none: Sequence[torch.Tensor] | None = None,
    quantiles: Sequence[float] | None = None,
    fast_flush: bool = True,
    return_mode: str = "mean",
    return_flops: bool = True,
    return_mem: bool = True,
    mem_record_mode: str = "allocated",
    device_idx: int = 0,
    to_gc_collect: bool = True,
    to_empty_cache: bool = True,
) -> dict[str, float | list[float]]:
    """Runs ``fn`` once untimed, ``warmup`` times, then ``rep`` times under the clock.

    Args:
        warmup, rep: numbers of iterations.
        grad_to_none: tensors whose ``grad`` is dropped before every iteration.
        quantiles: if given, one value per quantile instead of ``return_mode`` (mean, median, min, max).
        fast_flush: clear the cache buffer by 4-byte instead of 1-byte writes.
        return_flops, return_mem: what to measure. The entry ``flops`` holds *milliseconds*, from which the
            caller computes rates; ``mem`` holds bytes.
        mem_record_mode: allocated or reserved.
        device_idx: the CUDA device.
        to_gc_collect, to_empty_cache: tidy up before measuring.
    Returns:
        {"flops": ms, "mem": bytes}, each a number or a list with one value per quantile. With a process
        group every iteration begins at a barrier and counts as long as on the slowest rank.
    """
    if warmup < 0 or rep < 1 or return_mode not in _MODES:
        raise ContractError(f"warmup {warmup}, rep {rep}, return_mode {return_mode!r}: give >= 0, >= 1, {[*_MODES]}.")
    if to_gc_collect:
        gc.collect()
    if to_empty_cache and torch.cuda.is_available():
        torch.cuda.empty_cache()
    fn()
    result: dict[str, float | list[float]] = {}
    if return_flops:
        times = _times_ms(fn, warmup, rep, grad_to_none, fast_flush, device_idx)
        result["flops"] = _summary(times, quantiles, return_mode)
    if return_mem:
        peaks = []
        for _ in range(rep if not return_flops else min(rep, 3)):  # peaks repeat; times do not
            _drop_grads(grad_to_none)
            with MemRecorder(mem_record_mode, device_idx) as recorder:
                fn()
            peaks.append(float(recorder.peak))
        result["mem"] = _summary(peaks, quantiles, return_mode)
    return result


def do_bench_flops(fn: Callable[[], Any], **kwargs: Any) -> float | list[float]:
    """The milliseconds of ``do_bench``."""
    return do_bench(fn, return_flops=True, return_mem=False, **kwargs)["flops"]


def do_bench_mem(fn: Callable[[], Any], **kwargs: Any) -> float | list[float]:
    """The bytes of ``do_bench``."""
    return do_bench(fn, return_flops=False, return_mem=True, **kwargs)["mem"]


def _summary(values: list[float], quantiles: Sequence[float] | None, mode: str) -> float | list[float]:
    if quantiles is None:
        return _MODES[mode](values)
    return torch.tensor(values, dtype=torch.float64).quantile(torch.tensor(quantiles).double()).tolist()


def _drop_grads(tensors: Sequence[torch.Tensor] | None) -> None:
    for tensor in tensors or ():
        tensor.grad = None


def _times_ms(fn, warmup: int, rep: int, grad_to_none, fast_flush: bool, device_idx: int) -> list[float]:
    device = torch.device("cuda", device_idx) if torch.cuda.is_available() else torch.device("cpu")
    distributed = dist.is_available() and dist.is_initialized()
    clock = Clock(device, torch.int32 if fast_flush else torch.int8, is_shared=distributed)
    us = interleaved_us(
        {"fn": fn}, rep, None, 0, clock=clock, warm_up_rounds=warmup, before=lambda: _drop_grads(grad_to_none),
        waits=False,
    )["fn"]  # fmt: skip
    times = [t / 1e3 for t in us]
    if distributed:
        slowest = torch.tensor(times, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        times = slowest.tolist()
    return times
