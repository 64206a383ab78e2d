# SPDX-License-Identifier: Apache-2.0
"""Two checkouts beside each other through the public functions: the part of ``builds.py`` that takes folders.

Each checkout is imported by a process of its own, and the two take turns on one machine: while one measures, the other
waits. A cell is a function, a direction, a mask and a size. Its figure is the time of the new checkout over that of the
old one, each a mean over the rounds of medians; the rounds go old, new, new, old, so that a GPU that grows warmer
counts for both. Some rows of what both give are compared, too. A cell beyond the limit is measured once more with as
many rounds, and all of them count.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from result_file import ROOT, described, plain_settings, write_results

sys.path[:0] = [str(ROOT / "ci"), str(ROOT / "benchmarks" / "sparse")]

import sparse_cases  # noqa: E402
from case_options import head_dims_of, list_of  # noqa: E402
from masks import ALL_NAMES  # noqa: E402
from result_files import KERNEL, SPARSE, Incomparable, Run, load  # noqa: E402

FUNCTIONS = ("flex_flash_attn_func", "attend", "index_attn_func")
DIRECTIONS = ("forward", "backward")
RECORDS = ROOT / "benchmarks" / "results"
TOLERANCES = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 1e-4, "fp64": 1e-10}  # of the largest number of a result
ANSWER_SECONDS = 900  # within which a side answers: kernels may have to be compiled first
_SIDE = "from checkout_side import main; main()"


@dataclass(frozen=True)
class Cell:
    """What is timed. ``documents`` and ``window`` as of ``masks.make_case``; ``sample`` is the draw of documents or of
    sparse patterns. ``deterministic`` is said of backwards alone."""

    function: str
    direction: str
    mask: str
    seqlen: int
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    dtype: str
    sample: int = 0
    documents: int | None = None
    window: int | None = None
    deterministic: bool = False

    def __str__(self) -> str:
        size = f"{self.seqlen // 1024}K" if self.seqlen % 1024 == 0 else str(self.seqlen)
        dims = "x".join(map(str, dict.fromkeys(self.head_dims)))
        what = f"{self.direction}{', deterministic' * self.deterministic}"
        draw = f", draw {self.sample}" if self.sample else ""
        return f"{self.function} {what}: {self.mask} {size}, {self.heads[0]}/{self.heads[1]} heads of {dims}{draw}"


@dataclass
class Measured:
    """Microseconds of each round by side; ``reason`` says of a side why there are none, ``error`` by how much results
    differ, as a share of the largest number."""

    cell: Cell
    us: dict[str, list[float]] = field(default_factory=lambda: {"old": [], "new": []})
    reason: dict[str, str] = field(default_factory=dict)
    error: float = 0.0

    @property
    def ratio(self) -> float | None:
        """Time of the new one over that of the old one; None where one has no times."""
        return fmean(self.us["new"]) / fmean(self.us["old"]) if all(self.us.values()) else None

    def fault(self, limit: float) -> str | None:
        """Why the new checkout fails here. What the old one cannot do either is no fault."""
        if "new" in self.reason:
            return None if "old" in self.reason else f"new: {self.reason['new']}"
        if not self.error <= TOLERANCES[self.cell.dtype]:  # nan, too
            return f"results differ by {self.error:.3g}"
        return f"{self.ratio - 1:+.2%}" if self.ratio is not None and self.ratio > 1 + limit else None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those that only checkouts take."""
    add = parser.add_argument_group("two checkouts").add_argument
    allowed = ", ".join(FUNCTIONS)
    add("--functions", type=list_of(str, FUNCTIONS), default=list(FUNCTIONS), metavar="A,B", help=allowed)
    add("--no-deterministic", dest="modes", action="store_const", const=(False,), default=(False, True),
        help="leave deterministic backwards out")  # fmt: skip
    add("--records", type=Path, nargs="+", metavar="FILE", help="whose cells are timed; all that are committed")
    add("--rounds", type=int, default=3, help="turns of each checkout, whose mean counts (3)")
    add("--warm-up", type=float, default=0.1, metavar="S", help="seconds before each turn that do not count (0.1)")
    add("--limit", type=float, default=0.01, help="a cell fails that takes longer by more than this share (0.01)")
    add("--out", type=Path, help="write OUT.json")


# ---- cells -----------------------------------------------------------------------------------------------------


def functions_of(mask: str) -> tuple[str, ...]:
    """Public functions that take the mask."""
    return FUNCTIONS[2:] if mask.startswith(("index", "dsa")) else FUNCTIONS[:2]


def is_mask(name: str) -> bool:
    try:
        return name in ALL_NAMES or bool(sparse_cases.parse(name, 0))
    except ValueError:
        return False


def _with_modes(functions: Sequence[str], directions: Sequence[str], modes: Sequence[bool], **rest) -> Iterator[Cell]:
    for function in functions_of(rest["mask"]):
        for direction in directions:
            for deterministic in modes if direction == "backward" else (False,):
                if function in functions:
                    yield Cell(function, direction, deterministic=deterministic, **rest)


def stored_runs() -> list[Run]:
    """The committed records of ``kernel.py`` and ``sparse_bench.py``."""
    runs = []
    for file in sorted(RECORDS.glob("*.json")):
        with suppress(Incomparable):  # of other programs
            runs.append(load(file))
    return [run for run in runs if run.benchmark in (KERNEL, SPARSE)]


def recorded_cells(runs: Sequence[Run], options: argparse.Namespace) -> list[Cell]:
    """The cells of ``runs``, each once."""
    found: dict[Cell, None] = {}
    for run in runs:
        for cell in run.results:
            settings = next(s for s in run.settings if cell.mask in s["masks"] and cell.seqlen in s["seqlens"])
            directions = [d for d in options.directions if cell.direction in (d, "both")]
            for sample in range(min(cell.samples, options.samples)):
                rest = {
                    "mask": cell.mask, "seqlen": cell.seqlen, "heads": cell.heads, "dtype": cell.dtype,
                    "head_dims": (cell.head_dim, settings.get("head_dim_v") or cell.head_dim), "sample": sample,
                    "documents": settings.get("documents"), "window": settings.get("window"),
                }  # fmt: skip
                found |= dict.fromkeys(_with_modes(options.functions, directions, options.modes, **rest))
    return [
        cell for cell in found
        if (options.masks is None or cell.mask in options.masks)
        and (options.seqlens is None or cell.seqlen in options.seqlens)
    ]  # fmt: skip


def given_cells(options: argparse.Namespace) -> list[Cell]:
    """Those of --masks and --seqlens, with the other options of cases. Lists of keys are for one kv head."""
    found: list[Cell] = []
    for mask in options.masks:
        dims = sparse_cases.DSA_HEAD_DIMS if mask.startswith("dsa") else head_dims_of(options)
        heads = tuple(options.heads) if functions_of(mask) == FUNCTIONS[:2] else (options.heads[0], 1)
        for seqlen in options.seqlens:
            for sample in range(options.samples if mask.startswith("varlen") and not options.documents else 1):
                rest = {
                    "mask": mask, "seqlen": seqlen, "heads": heads, "head_dims": dims,
                    "dtype": options.dtype, "sample": sample, "documents": options.documents, "window": options.window,
                }  # fmt: skip
                found += _with_modes(options.functions, options.directions, options.modes, **rest)
    return found


# ---- the two processes -----------------------------------------------------------------------------------------


class Side:
    """The process of one checkout."""

    def __init__(self, name: str, checkout: Path) -> None:
        self.name, self.checkout, self.libraries = name, checkout.resolve(), set[str]()
        kept = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        kept = [p for p in kept if not (Path(p) / "magi_attention").is_dir()]
        folders = [self.checkout, ROOT / "benchmarks", ROOT / "benchmarks" / "sparse", *kept]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SIDE], cwd=self.checkout, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def check(self) -> None:
        """SystemExit if the process imported another package than that of its checkout."""
        package = Path(self.ask("hello").get("package", ""))
        if self.checkout not in package.parents:
            raise SystemExit(f"{self.checkout} was to be imported, and Python took {package}; is it a checkout?")

    def ask(self, what: str, **request: Any) -> dict[str, Any]:
        """The answer to one request; a side that ends is a SystemExit, since nothing can be compared then."""
        assert self._process.stdin and self._process.stdout
        try:
            print(json.dumps({"do": what, **request}), file=self._process.stdin, flush=True)
            if not select.select([self._process.stdout], [], [], ANSWER_SECONDS)[0]:
                self._process.kill()
                raise SystemExit(f"The process of {self.checkout} did not answer {what!r} in {ANSWER_SECONDS} s.")
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise SystemExit(
                f"The process of {self.checkout} ended at {what!r} with {self._process.wait()}; its words are above."
            )
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def difference(first: Path, second: Path) -> float:
    """The largest difference of the rows in two files, as a share of the largest number of the first."""
    pairs = list(zip(torch.load(first), torch.load(second), strict=True))
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)) for a, b in pairs)


def measure(cell: Cell, sides: Sequence[Side], options: argparse.Namespace, folder: Path) -> Measured:
    """``options``: rounds, repeats, warm_up, limit. Both sides hold the cell's tensors meanwhile."""
    found = Measured(cell)
    rows = {side.name: folder / f"{side.name}.pt" for side in sides}
    for side in sides:
        answer = side.ask("open", cell=asdict(cell), rows=str(rows[side.name]))
        if "reason" in answer:
            found.reason[side.name] = answer["reason"]
        side.libraries |= {*answer.get("libraries", ())}
    if not found.reason:
        found.error = difference(rows["old"], rows["new"])
        _take_turns(found, sides, options)
        if not found.reason and found.fault(options.limit) and found.error <= TOLERANCES[cell.dtype]:
            _take_turns(found, sides, options)
    for side in sides:
        side.ask("close")
    return found


def _take_turns(found: Measured, sides: Sequence[Side], options: argparse.Namespace) -> None:
    for number in range(options.rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            answer = side.ask("time", repeats=options.repeats, warm_up=options.warm_up)
            if "reason" in answer:
                found.reason[side.name] = answer["reason"]
                return
            found.us[side.name].append(answer["median_us"])


# ---- what is told ----------------------------------------------------------------------------------------------


def line(found: Measured, limit: float) -> str:
    """One cell for the terminal."""
    fault = found.fault(limit)
    if found.ratio is None:
        told = fault or "neither side runs it: " + "; ".join(f"{n}: {r}" for n, r in found.reason.items())
        return f"{'-':>9} {'-':>9} {'-':>6}  {found.cell}  {told}"
    old, new = (fmean(found.us[name]) for name in ("old", "new"))
    return f"{old:9.1f} {new:9.1f} {found.ratio:6.3f}  {found.cell}" + (f"  FAILS, {fault}" if fault else "")


def ran(side: Side) -> str:
    """Which libraries a side had: one that lacks the planner, for one, is not what users have."""
    names = ", ".join(sorted(Path(path).name for path in side.libraries))
    return f"{side.name}, {side.checkout}: {names or 'no native library'}"


def summary(all_found: Sequence[Measured], limit: float) -> str:
    ratios = [found.ratio for found in all_found if found.ratio is not None]
    bad = [found for found in all_found if found.fault(limit)]
    mean = exp(fmean(map(log, ratios))) if ratios else float("nan")
    most = f", the most {max(ratios):.3f}" if ratios else ""
    told = f"{len(ratios)} of {len(all_found)} cells were timed; new over old is {mean:.4f} on average{most}."
    if bad:
        names = "\n".join(f"  {found.cell}: {found.fault(limit)}" for found in bad)
        return f"{told}\n{len(bad)} fail, by more than {limit:.1%} of the time or otherwise:\n{names}"
    return f"{told} None takes over {limit:.1%} longer."


def compare(old: Path, new: Path, options: argparse.Namespace) -> int:
    """0 if no cell fails, 1 if some do, 2 if there is nothing to compare."""
    cells = cells_of(options)
    if not cells:
        print("There are no cells; name records with --records, or others with --masks, --seqlens.", file=sys.stderr)
        return 2
    all_found: list[Measured] = []
    settings = plain_settings(options, ["builds", "records", "turns", "steps"])
    settings |= {name: str(path.resolve()) for name, path in (("old", old), ("new", new))}
    settings["commits"] = [described(path) for path in (old, new)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides = []
        for name, checkout in (("old", old), ("new", new)):
            sides.append(side := Side(name, checkout))
            stack.callback(side.close)
        print(f"{'old us':>9} {'new us':>9} {'ratio':>6}  {len(cells)} cells", flush=True)
        for cell in cells:
            all_found.append(measure(cell, sides, options, folder))
            print(line(all_found[-1], options.limit), flush=True)
            if options.out:  # after every cell, so that a run that is cut off keeps what it has
                rows = [{**asdict(found), "ratio": found.ratio} for found in all_found]
                write_results(options.out, settings, cells_compared=rows)
        print(*map(ran, sides), sep="\n")
        if shared := set.intersection(*(side.libraries for side in sides)):
            told = "a change to their sources was not measured; `python -m magi_attention.native.build` in each"
            print(f"Both ran {', '.join(sorted(shared))}, so {told}.")
    print(summary(all_found, options.limit))
    if not any(found.ratio for found in all_found):
        return 2
    return int(any(found.fault(options.limit) for found in all_found))


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """The cells of the records, or of --masks at --seqlens where both are given and no records are."""
    if options.masks and options.seqlens and options.records is None:
        return given_cells(options)
    try:
        runs = stored_runs() if options.records is None else [load(file) for file in options.records]
    except Incomparable as reason:
        raise SystemExit(str(reason)) from None
    if other := [run.benchmark for run in runs if run.benchmark not in (KERNEL, SPARSE)]:
        raise SystemExit(f"Records of {', '.join(other)} hold no cells of attention on one GPU; name others.")
    return recorded_cells(runs, options)
