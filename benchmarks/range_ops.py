# SPDX-License-Identifier: Apache-2.0
"""Bytes per second of the row kernels, beside a plain copy on the same GPU in the same run.

    python benchmarks/group_collectives.py rows [--megabytes 256] [--repeats 20] [--out PATH]

Rows of 64 to 8,192 elements of 16 bits: gathered by random ranges, moved by a list of single rows in random order,
rounded from float32, added up (two terms and what was there before), merged by lse, filled. Bytes are those that have
to be read and written, lists not counted. ``copy`` is ``Tensor.copy_`` of contiguous tensors, ``torch`` its own
operations. Last, what a small call costs the host.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from result_file import plain_settings, write_results

from magi_attention.benchmarking.timing import host_us, interleaved_us
from magi_attention.comm.collectives.layout import Rows, copy_rows
from magi_attention.kernels import range_fill_, range_gather, range_reduce

WIDTHS = (64, 128, 1024, 8192)
Case = tuple[int, dict[str, Callable[[], object]]]  # (bytes, calls by who does it)


def random_ranges(rng: np.random.Generator, rows: int, mean: int) -> torch.Tensor:
    """Ranges that cut ``rows`` rows at random, in random order, int32 (n, 2) on the GPU."""
    cuts = np.unique(np.concatenate([[0, rows], rng.integers(1, rows, max(1, min(2000, rows // mean)))]))
    ranges = np.stack([cuts[:-1], cuts[1:]], 1)
    return torch.from_numpy(rng.permutation(ranges).astype(np.int32)).cuda()


def cases(width: int, num_bytes: int) -> dict[str, Case]:
    """What is timed at one row width; every result is as large as ``num_bytes``."""
    rng = np.random.default_rng(width)
    rows = num_bytes // (2 * width)
    x, y = (torch.randn(rows, width, device="cuda").bfloat16() for _ in range(2))
    ranges = random_ranges(rng, rows, 50)
    order = Rows(rng.permutation(rows))
    index = order.on(x.device)
    found: dict[str, Case] = {
        "copy": (2 * num_bytes, {"copy": lambda: y.copy_(x)}),
        "gather ranges": (2 * num_bytes, {"magi": lambda: range_gather(x, ranges, output=y)}),
        "gather rows": (
            2 * num_bytes,
            {"magi": lambda: copy_rows([y], [x], None, order), "torch": lambda: torch.index_select(x, 0, index, out=y)},
        ),
        "scatter rows": (
            2 * num_bytes,
            {"magi": lambda: copy_rows([y], [x], order, None), "torch": lambda: y.index_copy_(0, index, x)},
        ),
        "fill": (num_bytes, {"magi": lambda: range_fill_(y, ranges, 1.0, total_size=rows)}),
    }
    wide = torch.randn(rows, width, device="cuda")
    found["gather rounded"] = (3 * num_bytes, {"magi": lambda: copy_rows([y], [wide], None, order)})
    total = torch.zeros(rows // 2, width, device="cuda")
    half = random_ranges(rng, rows // 2, 50)
    sources, targets = torch.cat([half, half + rows // 2]), torch.cat([half, half])
    found["sum of 16 bits"] = (3 * num_bytes, {"magi": lambda: range_reduce(x, total, sources, targets)})
    found["sum of 32 bits"] = (4 * num_bytes, {"magi": lambda: range_reduce(wide, total, sources, targets)})
    dim = min(width, 128)
    shape = (-1, width // dim, dim)
    lse, total_lse = torch.randn(rows, width // dim, device="cuda"), torch.zeros(rows // 2, width // dim, device="cuda")
    found["merge of 16 bits"] = (
        3 * num_bytes,
        {
            "magi": lambda: range_reduce(
                x.view(shape), total.view(shape), sources, targets, reduce_op="lse", input_lse=lse, output_lse=total_lse
            )
        },
    )
    return found


def small_host_us() -> dict[str, float]:
    """Host microseconds of calls on 256 rows of 1 KiB."""
    x = torch.randn(512, 8, 64, device="cuda").bfloat16()
    y, v, w = (torch.empty_like(x[:256]) for _ in range(3))
    order = Rows(np.random.default_rng(0).permutation(512)[:256])
    ranges = torch.tensor([[0, 100], [300, 456]], device="cuda")
    total = torch.zeros(512, 8, 64, device="cuda")
    return {
        "gather of K and V": host_us(lambda: copy_rows([y, v], [x, x], None, order)),
        "range_gather": host_us(lambda: range_gather(x, ranges, output=w)),
        "range_reduce": host_us(lambda: range_reduce(w, total, ranges, ranges)),
        "torch.index_select": host_us(lambda: torch.index_select(x, 0, order.on(x.device), out=y)),
    }


def measure(megabytes: int, repeats: int) -> list[dict]:
    """One row for each width, case and implementation."""
    results = []
    for width in WIDTHS:
        todo = cases(width, megabytes * 2**20)
        failed: dict[str, str] = {}
        calls = {f"{case}/{who}": call for case, (_, them) in todo.items() for who, call in them.items()}
        times = interleaved_us(calls, repeats, failed)
        speeds = {name: todo[name.partition("/")[0]][0] / statistics.median(t) / 1e3 for name, t in times.items()}
        for name, speed in speeds.items():
            case, _, who = name.partition("/")
            share = speed / speeds["copy/copy"]
            row = {"width": width, "case": case, "by": who, "gb_per_s": round(speed, 1), "of_copy": round(share, 3)}
            results.append(row)
            print(f"{width:6d}  {case:18s} {who:6s} {speed:8.0f} GB/s  {share:6.2f}", flush=True)
        for name, reason in failed.items():
            print(f"{width:6d}  {name}: {reason}", flush=True)
    return results


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="group_collectives.py rows", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=256, help="size of a result")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, metavar="PATH", help="write PATH.json")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA GPU, and torch sees none.", file=sys.stderr)
        return 2
    results, host = measure(options.megabytes, options.repeats), small_host_us()
    for name, us in host.items():
        print(f"host, {name}: {us:.1f} us")
    if options.out:
        write_results(options.out, plain_settings(options), results=results, host_us=host)
    return 0
