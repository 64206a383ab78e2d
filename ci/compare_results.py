# SPDX-License-Identifier: Apache-2.0
"""Compares results of a benchmark with a baseline of the same (``result_files.py``); no GPU and no torch is needed for
that.

A cell has up to two measures of how much slower ours became:

- *ratio*: our speed over that of each peer in the same run, the median over peers. Clocks and heat cancel out. It
  counts where the peers are the same code in both, so where torch, CUDA and cuDNN are.
- *tflops*, of attention, or *bandwidth*: our speed. It counts on the same GPU with the same power limit.

The ratio decides where there is one, the speed where there is none. Where that fell and the ratio did not, the peers
became slower as well: that is the machine's doing, and a warning.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import sqrt
from statistics import median

from result_files import Cell, Incomparable, Run

WARN, FAIL = 0.05, 0.10  # share of speed lost
_VARIANTS = "magi"  # our other settings: neither ours nor peers
SEVERITY = ("ok", "faster", "warn", "slow", "missing", "wrong")  # what fails comes last
FAILING = SEVERITY[3:]


@dataclass
class Verdict:
    """How a cell fares. ``slower_by`` is the share that decided; below zero means faster. ``noise`` is what repeats
    alone may change of it, as a share; None if a record does not tell its repeats apart."""

    cell: Cell
    status: str
    slower_by: float = 0.0
    measure: str = ""
    notes: list[str] = field(default_factory=list)
    noise: float | None = None

    @property
    def ratio(self) -> float | None:
        """Time now over that of the baseline; None without a measure."""
        return 1 / (1 - self.slower_by) if self.measure else None

    def line(self) -> str:
        """One sentence."""
        change = f"{abs(self.slower_by):.1%} {'slower' if self.slower_by > 0 else 'faster'} by {self.measure}"
        return f"{self.cell}: {self.status}" + "; ".join([f", {change}" if self.measure else "", *self.notes])


def narrow(run: Run, masks: Collection[str], sizes: Collection[str]) -> Run:
    """Only the cells of these masks and lengths (such as ``"4K"``); an empty collection stands for all."""
    kept = {
        cell: rows
        for cell, rows in run.results.items()
        if (not masks or cell.mask in masks) and (not sizes or {cell.size, str(cell.seqlen)} & set(sizes))
    }
    return replace(run, results=kept)


def merge(runs: Iterable[Run]) -> Run:
    """One run out of several of one machine and benchmark; later results replace earlier ones."""
    runs = list(runs)
    if len({run.benchmark for run in runs}) > 1:
        raise Incomparable("These are results of several benchmarks; compare those of one at a time.")
    results: dict[Cell, dict[str, dict]] = {}
    for run in runs:
        results |= run.results
    return replace(runs[0], settings=[s for run in runs for s in run.settings], results=results)


def _power_limit(environment: Mapping) -> str:
    parts = (environment.get("nvidia_smi") or "").split(", ")
    return parts[1] if len(parts) > 1 else ""


def measures(baseline: Mapping, now: Mapping) -> tuple[set[str], list[str]]:
    """What of two machines' numbers may be compared, and sentences on what may not."""
    if baseline.get("gpu") != now.get("gpu"):
        raise Incomparable(
            f"The baseline is of {baseline.get('gpu') or 'no GPU'} and this is {now.get('gpu') or 'no GPU'}; commit "
            "results of this GPU to benchmarks/results, as --out of the benchmarks writes them."
        )
    found, notes = {"ratio", "speed"}, []
    if (was := _power_limit(baseline)) != (is_now := _power_limit(now)):
        found.discard("speed")
        notes.append(f"The power limit was {was or 'unknown'} and is {is_now or 'unknown'}: speeds are not compared.")
    for key in ("torch", "cuda", "cudnn"):
        if baseline.get(key) != now.get(key):
            found.discard("ratio")
            notes.append(f"{key} was {baseline.get(key)} and is {now.get(key)}: ratios over peers are not compared.")
    if not baseline.get("gpu") and (was := baseline.get("cpu")) != (is_now := now.get("cpu")):
        found.discard("speed")
        notes.append(f"The CPU was {was or 'unknown'} and is {is_now or 'unknown'}: speeds are not compared.")
    if not found:
        raise Incomparable(" ".join([*notes, "Nothing is left to compare; commit new results to benchmarks/results."]))
    return found, notes


def _noise(cell: Cell, names: Collection[str], *runs: Run) -> float | None:
    """How much chance moves our speed, the first of ``names``, or its ratio to the others, from run to run. The spreads
    of repeats add in quadrature; several others count by their median."""
    ours, *peers = ([run.noise(cell, name) for run in runs] for name in names)
    if None in ours or any(None in of for of in peers):
        return None
    squares = [sum(x * x for x in of) for of in (ours, *peers)]
    return sqrt(squares[0] + (median(squares[1:]) if peers else 0.0))


def judge(cell: Cell, baseline: Run, now: Run, allowed: set[str]) -> Verdict | None:
    """The verdict on one cell; None where the baseline has no number of ours."""
    before, after, ours = baseline.speeds(cell), now.speeds(cell), baseline.ours
    if ours not in before:
        return None
    if ours not in after:
        row = now.results.get(cell, {}).get(ours)
        reason = (row or {}).get("reason") or "it was not measured"
        return Verdict(cell, "wrong" if reason.startswith("wrong") else "missing", notes=[reason])
    slower: dict[str, float] = {}
    peers = [p for p in before if p != ours and not p.startswith(_VARIANTS)]
    shared = [p for p in peers if p in after]
    if "ratio" in allowed and shared:
        slower["ratio"] = 1 - median(after[ours] / after[p] * before[p] / before[ours] for p in shared)
    name, unit = baseline.speed
    if "speed" in allowed:
        slower[name] = 1 - after[ours] / before[ours]
    if not slower:
        return Verdict(cell, "missing", notes=[f"no peer of the baseline was measured, and {unit} are not comparable"])
    measure = "ratio" if "ratio" in slower else name
    share = slower[measure]
    status = "slow" if share > FAIL else "warn" if share > WARN else "faster" if share < -WARN else "ok"
    names = [ours, *(shared if measure == "ratio" else ())]
    verdict = Verdict(cell, status, share, measure, noise=_noise(cell, names, baseline, now))
    if absent := [p for p in peers if p not in after]:
        verdict.notes.append(f"{', '.join(absent)} of the baseline did not run")
    if measure == "ratio" and share <= WARN < slower.get(name, 0.0):
        verdict.status = "warn"
        verdict.notes.append(f"{unit} fell by {slower[name]:.1%} and those of the peers too: look at the clocks")
    return verdict


def compare(baseline: Run, now: Run) -> tuple[list[Verdict], list[str]]:
    """Verdicts on the cells of the baseline, and notes on the comparison as a whole."""
    allowed, notes = measures(baseline.environment, now.environment)
    verdicts = [v for cell in sorted(baseline.results) if (v := judge(cell, baseline, now, allowed))]
    if not verdicts:
        raise Incomparable("The baseline has no number of ours; measure it anew.")
    if fresh := sorted(set(now.results) - set(baseline.results)):
        notes.append(f"Not in the baseline: {', '.join(map(str, fresh))}.")
    return verdicts, notes


def above(verdicts: Iterable[Verdict], limit: float) -> list[Verdict]:
    """Those that take more than ``limit`` times as long as the baseline, beyond their noise; the missing and the wrong
    among them."""
    return [v for v in verdicts if v.status in ("missing", "wrong") or (v.ratio or 0.0) - (v.noise or 0.0) > limit]


def to_repeat(verdicts: Iterable[Verdict]) -> list[Cell]:
    """Cells that get a second try: the slow and the missing. A wrong result stays one, whatever a second run says."""
    return [v.cell for v in verdicts if v.status in ("slow", "missing")]


def best_of(first: Iterable[Verdict], second: Iterable[Verdict]) -> list[Verdict]:
    """After the second try: the better of two verdicts counts, except that a wrong result is never mended."""
    again = {v.cell: v for v in second}
    out = []
    for verdict in first:
        other = again.get(verdict.cell)
        if other is None or verdict.status not in ("slow", "missing"):
            out.append(verdict)
            continue
        pair = sorted((verdict, other), key=lambda v: (SEVERITY.index(v.status), v.slower_by))
        chosen = other if other.status == "wrong" else pair[0]
        how = "in two tries" if other.status in FAILING else f"in the second try; the first was {verdict.status}"
        chosen.notes.append(how)
        out.append(chosen)
    return out
