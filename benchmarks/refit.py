# SPDX-License-Identifier: Apache-2.0
"""Measures backwards and fits the times by which the planner schedules them.

    python benchmarks/kernel.py refit --measure ROWS   # writes ROWS.json, on a GPU; about two minutes
    python benchmarks/kernel.py refit ROWS.json        # writes csrc/planner/schedule/heuristics_h100.h

The first has a row for each schedule: its work tiles and its time. The second solves least squares over the rows
(``schedule_fit.py``) and writes the fitted part of the header, with a comment that says from what.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from unittest import mock

import numpy as np
import torch
from kernel import make_inputs
from masks import Case, make_case
from peers_backward import OurGradients
from result_file import write_results
from schedule_fit import Fit, Row, fit, with_constants

from magi_attention.benchmarking.timing import LONG_LEAD_CYCLES, interleaved_us
from magi_attention.kernels.ffa import backward as ffa_bwd
from magi_attention.kernels.ffa import plans
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.native.planner import abi as schedule_abi
from magi_attention.native.planner.schedule import NONE, BwdSchedule, Split, with_schedule
from magi_attention.native.planner.tile_plan import TilePlan

HEADER = Path(__file__).resolve().parents[1] / "csrc" / "planner" / "schedule" / "heuristics_h100.h"
TOKENS, HEAD_DIM, TILE = 4096, 128, 128
# Masks and draws of work lists, and of tile splits in deterministic order, which diagonals have none of.
LIST_MASKS = (("full", 1), ("causal", 1), ("varlen_full", 8), ("varlen_block_causal", 5), ("varlen_causal", 5))
LIST_HEADS = ((64, 8), (32, 8))
SPLIT_HEADS, SPLIT_DRAWS = ((64, 8), (32, 8), (128, 8)), 4  # rows of q must differ, too


def steps_of(plan: TilePlan, tile: int, block_m: int, begin: int = 0, end: int = 2**31 - 1) -> tuple[int, int]:
    """m-blocks from ``begin`` to before ``end`` that a tile visits, and those of them that some key does not see
    whole."""
    first, segments = plan.tiles[tile, 2:4].tolist()
    steps = masked = 0
    for record in plan.records[first : first + segments].tolist():
        low, high = max(record[0] // block_m, begin), min(-(-record[1] // block_m), end)
        full_low = -(-max(record[10], record[14]) // block_m)
        full_high = min(record[11], record[15]) // block_m
        steps += max(high - low, 0)
        masked += max(high - low, 0) - max(min(full_high, high) - max(full_low, low), 0)
    return steps, masked


def list_row(words: np.ndarray, num_words: int, heads: tuple[int, int], num_sms: int, us: float = 0.0) -> Row:
    """Work list in m-blocks of 64 behind a plan of so many words."""
    plan, behind, group = TilePlan(words[:num_words]), words[num_words:], heads[0] // heads[1]
    header = schedule_abi.WorkListHeader.from_buffer_copy(behind[:16].tobytes())
    rows = behind[header.words_work_tiles :][: 8 * header.num_work_tiles].reshape(-1, 8).tolist()
    counts = [(group // w[3], steps_of(plan, w[0], 64, w[4], w[5])) for w in rows]
    queries, late = plan.header.total_k, max(num_sms // 8, 1)
    return Row(
        False, 64, num_sms, [n * c[0] for n, c in counts], [n * c[1] for n, c in counts], header.num_partials,
        queries * heads[0], us, late, -(-queries // 64) * heads[0],
    )  # fmt: skip


def split_row(plan: TilePlan, chosen: BwdSchedule, heads: tuple[int, int], num_sms: int, us: float = 0.0) -> Row:
    """Deterministic backward whose heads are one L2 group."""
    steps: list[float] = []
    for place, tile in enumerate(plan.order.tolist()):
        parts = chosen.split.parts if chosen.split.begin <= place < chosen.split.end else 1
        count = steps_of(plan, tile, chosen.block_m)[0] * (heads[0] // heads[1]) / parts
        steps += [count] * (parts * heads[1])
    partials = (chosen.split.end - chosen.split.begin) * chosen.split.parts * heads[1]
    rows = plan.header.total_k * heads[0]
    return Row(True, chosen.block_m, num_sms, steps, [0.0] * len(steps), partials, rows, us)


class Told(OurGradients):
    """``OurGradients`` by a schedule that is told. ``listed``: the words of the last plan with a work list, and how
    many are the plan's own."""

    def __init__(self, chosen: BwdSchedule, *arguments, **options) -> None:
        self._chosen, self.listed = chosen, (np.zeros(0, dtype=np.int32), 0)
        super().__init__(*arguments, **options)

    def __call__(self):
        def made(words, shape, *arguments):
            found = with_schedule(words, shape, *arguments)
            if shape.list_block_m:
                self.listed = found, len(words)
            return found

        with (
            mock.patch.object(ffa_bwd, "select_schedule", lambda *_: self._chosen),
            mock.patch.object(plans, "with_schedule", made),
        ):
            return super().__call__()


def plan_of(case: Case) -> TilePlan:
    return TilePlan.of_table(case.mask.slices, case.seqlen, case.seqlen, TILE, 2, is_transposed=True)


def timed(case: Case, heads: tuple[int, int], chosen: Sequence[BwdSchedule], deterministic: bool, repeats: int):
    """The call of each schedule, and its median in microseconds."""
    tensors = make_inputs(case, heads, HEAD_DIM, torch.bfloat16, "cuda", has_dout=True)
    calls = {
        str(i): Told(x, *tensors, case, is_both=False, deterministic=deterministic, backend=FfaBackend())
        for i, x in enumerate(chosen)
    }
    for call in calls.values():
        call()
    spread = interleaved_us(calls, repeats, None, LONG_LEAD_CYCLES, warm_up_s=0.3)
    return [(calls[name], median(times)) for name, times in spread.items()]


def measured(repeats: int) -> Iterator[Row]:
    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    for heads in LIST_HEADS:
        seqlen = TOKENS * 8 // heads[1]
        for name, draws in LIST_MASKS:
            for draw in range(draws):
                ((call, us),) = timed(make_case(name, seqlen, draw), heads, [BwdSchedule(64, 0)], False, repeats)
                if call.listed[1]:
                    yield list_row(*call.listed, heads, num_sms, us)
    splits = (NONE, Split(0, 1, 4), Split(0, 3, 2), Split(1, TOKENS // TILE // 3, 2), Split(0, TOKENS // TILE // 2, 2))
    chosen = [BwdSchedule(64, 0), *(BwdSchedule(80, 0, split=split) for split in splits)]
    for heads in SPLIT_HEADS:
        for draw in range(SPLIT_DRAWS):
            case = make_case("varlen_full", TOKENS, draw)
            plan, found = plan_of(case), timed(case, heads, chosen, True, repeats)
            yield from (split_row(plan, x, heads, num_sms, us) for x, (_, us) in zip(chosen, found))


def source_of(rows_file: Path, where: dict, fits: Sequence[Fit]) -> list[str]:
    """The comment in the header."""
    found = [f"From {rows_file.name}: {where['gpu']}, {where['time']}."]
    for what, x in zip(("Work lists", "Tile splits"), fits):
        found.append(f"{what}: {x.rows} rows, error {100 * x.error:.1f}% (root mean square).")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kernel.py refit", description=__doc__.split("\n")[0])
    parser.add_argument("rows", nargs="?", type=Path, help="measured rows, to be fitted")
    parser.add_argument("--measure", type=Path, metavar="ROWS", help="measure, and write ROWS.json")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--header", type=Path, default=HEADER, help="the header to write")
    options = parser.parse_args(arguments)
    if (options.rows is None) == (options.measure is None):
        parser.error("give rows to fit, or --measure and where to write them")
    if options.measure:
        if not torch.cuda.is_available():
            print("Measuring needs a CUDA GPU, and torch sees none.", file=sys.stderr)
            return 2
        rows = []
        for row in measured(options.repeats):
            rows.append(row)
            print(
                f"{'deterministic' if row.is_deterministic else 'list':<14}{row.block_m:>4}{row.us:>9.1f} us",
                flush=True,
            )
        write_results(options.measure, {"repeats": options.repeats}, results=[asdict(row) for row in rows])
        return 0
    record = json.loads(options.rows.read_text())
    try:
        fits = fit([Row(**row) for row in record["results"]])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    constants = fits[0].constants | fits[1].constants
    source = source_of(options.rows, record["environment"], fits)
    options.header.write_text(with_constants(options.header.read_text(), constants, source))
    print("\n".join([*source, *(f"{name:<24}{value:.4g}" for name, value in constants.items())]))
    return 0
