# SPDX-License-Identifier: Apache-2.0
"""Where the warps of a kernel wait: the instructions of its busiest loop, from a profile that ``ncu`` made.

    ncu --set full -k regex:ffa_bwd -s 3 -c 1 -o run python benchmarks/builds.py BUILD.so --masks full --seqlens 4K
    ncu -i run.ncu-rep --page source --csv > run.csv
    python benchmarks/kernel.py stalls run.csv [--least 0.3] [--mark HGMMA,BAR]

``ncu`` looks at every warp now and then and notes its instruction and why it has not been issued. One line for each
instruction that has at least ``--least`` per cent of the samples of the loop, or whose text holds one of the words of
``--mark``: its number, the samples up to it, its own, the two reasons that are noted most often, its text. Samples are
proportional to time where the warps of a loop run it all the while. What lies between the first and the last
instruction of the loop is shown, too, with how often it runs: parts that are jumped over, and loops of other warps.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SHARE = 0.9  # of the executions of the loop that an instruction must have to belong to it
MARKS = ("HGMMA", "BAR", "DEPBAR", "SYNCS", "FENCE", "BRA")


@dataclass(frozen=True)
class Instruction:
    """One line of the profile. ``reasons`` are samples by what a warp waited for, without the word "stall"."""

    number: int
    text: str
    executed: int
    samples: int
    reasons: Counter


class NotAProfile(ValueError):
    """The file holds no table of instructions; the text says what to do."""


def _count(cell: str) -> int:
    return 0 if cell in ("", "N/A") else int(float(cell.replace(",", "")))


def read(path: Path) -> list[Instruction]:
    """The instructions of the first kernel in the file.

    Raises:
        NotAProfile: no header with instructions and samples is there.
    """
    with open(path, newline="") as file:
        rows = list(csv.reader(file))
    wanted = {"Source", "# Samples", "Instructions Executed"}
    start = next((i for i, row in enumerate(rows) if wanted <= set(row)), None)
    if start is None:
        raise NotAProfile(
            f"{path} has no line with {', '.join(sorted(wanted))}; make it by "
            "`ncu -i FILE.ncu-rep --page source --csv` from a profile with `--set full`."
        )
    header = rows[start]
    stalls = [name for name in header if name.startswith("stall_") and "Not Issued" not in name]
    found = []
    for row in rows[start + 1 :]:
        if len(row) < len(header) - 1:  # ncu may leave the last comma out
            break  # the next kernel
        cells = dict(zip(header, row))
        reasons = Counter({name.removeprefix("stall_"): _count(cells[name]) for name in stalls})
        counts = _count(cells["Instructions Executed"]), _count(cells["# Samples"])
        found.append(Instruction(len(found), cells["Source"].strip(), *counts, +reasons))
    return found


def busiest_loop(instructions: Sequence[Instruction]) -> list[Instruction]:
    """From the first to the last that is executed as often as those with most samples, and what lies between."""
    by_count: Counter = Counter()
    for x in instructions:
        by_count[x.executed] += x.samples
    if not by_count or not max(by_count.values()):
        return []
    often = max(by_count, key=by_count.__getitem__)
    inside = [x.number for x in instructions if SHARE * often <= x.executed <= often / SHARE]
    return list(instructions[inside[0] : inside[-1] + 1])


def table(loop: Sequence[Instruction], least: float, marks: Sequence[str]) -> str:
    """A heading, then the lines described above."""
    total = sum(x.samples for x in loop)
    often = Counter({x.executed: 0 for x in loop})
    for x in loop:
        often[x.executed] += x.samples
    usual = max(often, key=often.__getitem__)
    steady = sum(SHARE * usual <= x.executed <= usual / SHARE for x in loop)
    reasons = sum((x.reasons for x in loop), Counter())
    lines = [f"{steady} instructions in each round, {total} samples; most for " + _shares(reasons, total, 5)]
    so_far = 0
    for x in loop:
        so_far += x.samples
        if 100 * x.samples >= least * total or any(mark in x.text for mark in marks):
            times = x.executed / usual
            part = "" if SHARE <= times <= 1 / SHARE else f"{times:.2f} times a round: "
            spent = f"{100 * so_far / total:6.1f}% {100 * x.samples / total:6.2f}%"
            lines.append(f"{x.number:6d} {spent}  {_shares(x.reasons, x.samples, 2):36s} {part}{x.text}")
    return "\n".join(lines)


def _shares(reasons: Counter, total: int, most: int) -> str:
    return ", ".join(f"{name} {100 * n / max(total, 1):.0f}%" for name, n in reasons.most_common(most))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kernel.py stalls", description=__doc__.split("\n")[0])
    parser.add_argument("profile", type=Path, metavar="FILE.csv")
    parser.add_argument("--least", type=float, default=0.3, help="per cent of the samples of the loop (0.3)")
    parser.add_argument("--mark", default=",".join(MARKS), metavar="A,B", help=",".join(MARKS))
    options = parser.parse_args(arguments)
    try:
        loop = busiest_loop(read(options.profile))
    except (OSError, NotAProfile) as error:
        parser.error(str(error))
    if not loop:
        parser.error(f"{options.profile} has no samples; profile with `--set full` a kernel that runs for a while.")
    print(table(loop, options.least, [word for word in options.mark.split(",") if word]))
    return 0
