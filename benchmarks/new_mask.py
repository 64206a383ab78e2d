# SPDX-License-Identifier: Apache-2.0
"""What a new mask costs the host, part by part; no GPU is used.

    python benchmarks/planner.py new-mask [--tokens 131072,1048576] [--ranks 1,8,64] [--repeats 5] [--out PATH]

All ranks plan the same mask; rank 0 is timed. ``dispatch`` is the plan that a key holds, ``slices`` the part of it that
the rank has, ``one launch`` the layout of what arrives while one kernel runs, ``forward`` and ``backward`` the tile
plans of that kernel, with the choice of the schedule and its work tiles, for 64 query heads on 8 of dimension 128 and
132 multiprocessors. Not in the sum: ``locality``, the dispatch by ``LocalityDispatchAlg`` instead, and ``wire``, the
rows of all stages where attention goes stage by stage instead. The median of the repeats, each with a mask that nothing
has seen. Copies to a GPU are not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from masks import sample_documents
from result_file import plain_settings, write_results

from magi_attention.comm.collectives.layout import A2AVLayout
from magi_attention.common.mask import Mask
from magi_attention.common.slices import SliceTable
from magi_attention.config import (
    DispatchAlg,
    DispatchConfig,
    DistAttnConfig,
    LocalityDispatchAlg,
    MinHeapDispatchAlg,
)
from magi_attention.kernels.ffa.arrival import Pace
from magi_attention.kernels.ffa.peer_kv import RemoteKeys, RemoteMask
from magi_attention.kernels.ffa.plans import PlanShape, table_plan
from magi_attention.kernels.ffa.schedule import select_schedule
from magi_attention.kernels.types import AttnOptions
from magi_attention.meta.one_launch.fused_layout import FusedLayout
from magi_attention.meta.plan import Plan
from magi_attention.meta.planner import PlanOptions, build_plan
from magi_attention.native.ffa import FfaTile
from magi_attention.native.planner.schedule import WorkTileShape

HEADS, HEADS_KV, DIM, PROCESSORS = 64, 8, 128, 132
FRAME = 1560  # tokens that a block-causal mask of video adds at a time
PUSH_BYTES_PER_S, FLOPS = 2.2e11, 5e12  # of a rank's push and of a multiprocessor: by these tiles are put in order
TILE = FfaTile(128, 2, 1)  # of the forward as of the backward
CPU = torch.device("cpu")
PARTS = ("dispatch", "slices", "one launch", "forward", "backward")
BESIDE = ("locality", "wire")
MASKS = ("documents full", "documents causal", "block causal", "causal")


def slices_of(name: str, tokens: int, seed: int) -> SliceTable:
    """A mask of ``tokens`` queries and keys that no memo knows."""
    if name == "causal":
        return Mask.causal(tokens).slices
    if name == "block causal":
        return Mask.block_causal([0, tokens], FRAME).slices
    ends = np.cumsum([0, *sample_documents(tokens, seed)]).tolist()
    return Mask.varlen(ends, causal=name == "documents causal").slices


class Clock:
    """Milliseconds of each part, one repeat after another."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    def time(self, part: str, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        made = call()
        self.times.setdefault(part, []).append(1e3 * (time.perf_counter() - begin))
        return made


def _work_tiles(schedule) -> WorkTileShape | None:
    """The shape of the work tiles that a plan lists, see ``BackwardCalls``; work lists are left out."""
    if not schedule.has_order(is_deterministic=False):
        return None
    return WorkTileShape(HEADS_KV, HEADS // HEADS_KV, PROCESSORS, PROCESSORS, schedule.by_document)


def one_rank(clock: Clock, slices: SliceTable, tokens: int) -> None:
    """The kernel alone."""
    shapes = (tokens, HEADS, DIM), (tokens, HEADS_KV, DIM)

    def backward() -> None:
        work_tiles = _work_tiles(select_schedule(*shapes, slices, AttnOptions(DIM**-0.5), PROCESSORS))
        table_plan(slices, PlanShape(tokens, tokens, TILE, True, work_tiles), CPU)

    clock.time("forward", lambda: table_plan(slices, PlanShape(tokens, tokens, TILE), CPU))
    clock.time("backward", backward)


def many_ranks(clock: Clock, slices: SliceTable, tokens: int, ranks: int) -> None:
    """Rank 0 of so many."""

    def build(alg: DispatchAlg) -> Plan:
        config = DistAttnConfig(DispatchConfig(alg=alg))
        return build_plan(slices, tokens, ranks, PlanOptions(HEADS, HEADS_KV, DIM), config=config)

    plan = clock.time("dispatch", lambda: build(MinHeapDispatchAlg()))
    clock.time("locality", lambda: build(LocalityDispatchAlg()))
    stages = clock.time("slices", lambda: plan.rank(0).stages)
    clock.time("wire", lambda: [A2AVLayout.from_spec(stage.cast) for stage in stages])
    part = clock.time("one launch", lambda: FusedLayout(plan).part(0))
    group = HEADS // HEADS_KV
    seconds = 1e-5 + part.signal_rows * 4 * HEADS_KV * DIM / PUSH_BYTES_PER_S
    pace = Pace(seconds, 4 * DIM / FLOPS, 10 * DIM / FLOPS, heads=group, l2_group_heads=HEADS)
    mask = RemoteMask(part.slices, part.local_rows, part.base, part.arrivals, pace, len(part.summed_tiles))
    shapes = (part.local_rows, HEADS, DIM), (part.local_rows, HEADS_KV, DIM)

    def backward() -> None:
        work_tiles = _work_tiles(select_schedule(*shapes, RemoteKeys(mask, b""), AttnOptions(DIM**-0.5), PROCESSORS))
        mask.plan(PlanShape(part.local_rows, mask.total_k, TILE, True, work_tiles), CPU)

    clock.time("forward", lambda: mask.plan(PlanShape(part.local_rows, mask.total_k, TILE), CPU))
    clock.time("backward", backward)


def measure(tokens: int, ranks: int, name: str, repeats: int) -> dict:
    """One row: milliseconds of each part and of all."""
    clock = Clock()
    for seed in range(repeats + 1):
        if seed == 1:
            clock = Clock()  # the first one loads what has to be loaded
        slices = slices_of(name, tokens, seed)
        if ranks == 1:
            one_rank(clock, slices, tokens)
        else:
            many_ranks(clock, slices, tokens, ranks)
    parts = {part: round(statistics.median(times), 2) for part, times in clock.times.items()}
    total = round(sum(parts.get(part, 0.0) for part in PARTS), 2)
    return {"tokens": tokens, "ranks": ranks, "mask": name, "ms": parts, "sum_ms": total}


def line(row: dict) -> str:
    parts = [f"{row['ms'][p]:10.2f}" if p in row["ms"] else f"{'-':>10s}" for p in (*PARTS, *BESIDE)]
    parts.insert(len(PARTS), f"{row['sum_ms']:8.2f}")
    return f"{row['tokens']:8d}  {row['ranks']:5d}  {row['mask']:16s}  {'  '.join(parts)}"


def main(arguments: Sequence[str] | None = None) -> int:
    def numbers(text: str) -> list[int]:
        found = [int(word) for word in text.split(",")]
        if min(found) < 1:
            raise ValueError
        return found

    parser = argparse.ArgumentParser(prog="planner.py new-mask", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=numbers, default=[131072, 1048576], help="of the whole sequence")
    parser.add_argument("--ranks", type=numbers, default=[1, 8, 64])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="writes the record to this file")
    options = parser.parse_args(arguments)
    parts, beside = ("  ".join(f"{part:>10s}" for part in some) for some in (PARTS, BESIDE))
    print(f"{'tokens':>8s}  {'ranks':>5s}  {'mask, ms':16s}  {parts}  {'sum':>8s}  {beside}")
    rows = []
    for tokens in options.tokens:
        for ranks in options.ranks:
            for name in MASKS:
                rows.append(measure(tokens, ranks, name, max(options.repeats, 1)))
                print(line(rows[-1]), flush=True)
    if options.out:
        write_results(options.out, plain_settings(options), rows=rows)
    return 0
