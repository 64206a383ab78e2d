# SPDX-License-Identifier: Apache-2.0
"""Timing, memory, sweeps and plots. matplotlib and pandas are imported only when used."""

from magi_attention.benchmarking.bench import MemRecorder, do_bench, do_bench_flops, do_bench_mem
from magi_attention.benchmarking.report import (
    Benchmark,
    Mark,
    make_img_grid,
    perf_report,
    report_all_from_perf,
)

__all__ = [
    "Benchmark",
    "Mark",
    "MemRecorder",
    "do_bench",
    "do_bench_flops",
    "do_bench_mem",
    "make_img_grid",
    "perf_report",
    "report_all_from_perf",
]
