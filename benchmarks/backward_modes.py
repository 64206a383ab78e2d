# SPDX-License-Identifier: Apache-2.0
"""What each mode of the backward is worth: the schedule that is chosen, beside the same with one mode changed.

    python benchmarks/kernel.py modes [--masks varlen_full,causal] [--seqlens 4K,8K,16K,32K] [--samples 3]
                                        [--deterministic] [--out benchmarks/results/NAME]

A figure is the time of what is chosen over the time with the mode changed, in one run. If a mode is on, 0.90 says
that it saves a tenth. ``first writer`` and ``by document`` are also tried where they are off: there a figure above 1
says that the mode would be faster. The last table has for each mode the cells where it counts, their geometric mean,
the least and the most, and how many are more than 2% from 1. The thresholds in
``csrc/planner/schedule/heuristics_h100.h`` are fitted by these figures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import exp, log
from pathlib import Path
from statistics import median
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from case_options import DTYPES, add_case_options, cases_of
from kernel import make_inputs, size_of
from masks import NAMES, Case
from peers_backward import OurGradients
from result_file import plain_settings, write_results

from magi_attention.benchmarking.timing import LONG_LEAD_CYCLES, interleaved_us
from magi_attention.kernels.ffa import backward as ffa_bwd
from magi_attention.kernels.ffa import plans
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.native.ffa import BackwardNeeds, FfaLibrary
from magi_attention.native.planner.schedule import NONE, BwdSchedule

NOTICED = 0.02  # of 1, from which on a figure is no noise
CHOSEN = "chosen"


class Mode(NamedTuple):
    """How to change one mode: of the schedule, of what the library says that a call needs, or of waves of tiles."""

    schedule: Callable[[BwdSchedule], BwdSchedule] = lambda schedule: schedule
    needs: Callable[[BackwardNeeds], BackwardNeeds] = lambda needs: needs
    has_waves: bool = True


MODES = {
    "m-blocks of 80": Mode(lambda s: s._replace(block_m=64, split=NONE)),
    "first writer": Mode(lambda s: s._replace(first_writer=not s.first_writer, direct_dq_store=False)),
    "by document": Mode(lambda s: s._replace(by_document=not s.by_document)),
    "direct store": Mode(lambda s: s._replace(direct_dq_store=False)),
    "tile split": Mode(lambda s: s._replace(split=NONE)),
    "head split": Mode(lambda s: s._replace(num_head_splits=0)),
    "work list": Mode(needs=lambda n: n._replace(takes_list=False)),
    "tail split": Mode(needs=lambda n: n._replace(tail=(0, 1))),
    "waves": Mode(has_waves=False),
}
NOT_DETERMINISTIC = {"first writer", "work list", "tail split", "waves"}  # deterministic backwards have none


class Gradients(OurGradients):
    """``OurGradients`` with one mode changed. ``counts`` is set by a call where that changes anything."""

    def __init__(self, mode: Mode, *arguments, **options) -> None:
        self._mode, self.counts = mode, False
        super().__init__(*arguments, **options)

    def __call__(self):
        with self._changed():
            return super().__call__()

    @contextmanager
    def _changed(self) -> Iterator[None]:
        select, prefix, list_work_tiles = ffa_bwd.select_schedule, FfaLibrary.backward_prefix, plans.with_schedule

        def selected(*arguments) -> BwdSchedule:
            schedule = select(*arguments)
            made = self._mode.schedule(schedule)
            self.counts |= made != schedule
            return made

        def needed(library: FfaLibrary, **fields) -> tuple[bytes, BackwardNeeds]:
            found, needs = prefix(library, **fields)
            made = self._mode.needs(needs)
            self.counts |= made != needs
            return found, made

        def listed(words, shape, *arguments):
            made = list_work_tiles(words, shape, *arguments)
            if self._mode.has_waves:
                return made
            in_order = list_work_tiles(words, shape._replace(keeps_plan_order=True), *arguments)
            self.counts |= not np.array_equal(in_order, made)
            return in_order

        with (
            mock.patch.object(ffa_bwd, "select_schedule", selected),
            mock.patch.object(FfaLibrary, "backward_prefix", needed),
            mock.patch.object(plans, "with_schedule", listed),
        ):
            yield


def calls_of(case: Case, options: argparse.Namespace) -> dict[str, Gradients]:
    """What is chosen, and each mode that counts on the case. Each has run once, with its own backend and mask."""
    tensors = make_inputs(case, options.heads, options.head_dim, DTYPES[options.dtype], "cuda", has_dout=True)
    modes = {n: m for n, m in MODES.items() if not (options.deterministic and n in NOT_DETERMINISTIC)}
    found = {}
    for name, mode in {CHOSEN: Mode(), **modes}.items():
        call = Gradients(
            mode, *tensors, replace(case), is_both=False, deterministic=options.deterministic, backend=FfaBackend()
        )
        call()
        if name == CHOSEN or call.counts:
            found[name] = call
    return found


def figures_of(times: dict[str, float]) -> dict[str, float]:
    """Time of what is chosen over the time with each mode changed."""
    return {name: times[CHOSEN] / time for name, time in times.items() if name != CHOSEN}


def summary(figures: Sequence[dict[str, float]]) -> list[str]:
    """A line for each mode: cells where it counts, geometric mean, least, most, cells that are noticed."""
    lines = [f"{'mode':<16}{'cells':>6}{'mean':>8}{'least':>8}{'most':>8}{'beyond 2%':>11}"]
    for name in MODES:
        found = [f[name] for f in figures if name in f]
        if found:
            mean = exp(sum(map(log, found)) / len(found))
            noticed = sum(abs(f - 1) > NOTICED for f in found)
            lines.append(f"{name:<16}{len(found):>6}{mean:>8.3f}{min(found):>8.3f}{max(found):>8.3f}{noticed:>11}")
    return lines


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kernel.py modes", description=__doc__.split("\n")[0])
    add_case_options(parser, NAMES, "4K,8K,16K,32K", samples=3)
    parser.add_argument("--deterministic", action="store_true", help="backwards with deterministic=True")
    parser.add_argument("--out", type=Path, help="write OUT.json")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA GPU, and torch sees none.", file=sys.stderr)
        return 2
    records = []
    for mask in options.masks:
        for seqlen in options.seqlens:
            for sample, case in enumerate(cases_of(options, mask, seqlen)):
                spread = interleaved_us(calls_of(case, options), options.repeats, {}, LONG_LEAD_CYCLES)
                times = {name: median(t) for name, t in spread.items()}
                figures = figures_of(times)
                records.append({"mask": mask, "seqlen": seqlen, "sample": sample, "us": times, "figures": figures})
                print(
                    f"{mask:<22}{size_of(seqlen):>5} draw {sample} {times[CHOSEN]:9.1f} us  "
                    + "  ".join(f"{name} {figure:.3f}" for name, figure in figures.items()),
                    flush=True,
                )
                torch.cuda.empty_cache()
    print("\n".join(["", *summary([r["figures"] for r in records])]))
    if options.out:
        write_results(options.out, plain_settings(options), results=records)
    return 0
