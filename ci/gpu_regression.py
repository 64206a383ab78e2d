# SPDX-License-Identifier: Apache-2.0
"""Runs the GPU tests and the benchmarks, and compares the latter with the results that are committed.

    ci/gpu_regression                            tests, then every benchmark with a baseline of this GPU
    ci/gpu_regression --skip-tests               only the benchmarks
    ci/gpu_regression --skip-tests --only ffa_both_h100 --masks causal --seqlens 4K
                                                 less than a minute, while one works on a kernel
    ci/gpu_regression --compare RUN.json ...     only compares results that are there; needs no GPU

Baselines are the files of benchmarks/results whose GPU is the one here, and of no more GPUs than are here: attention,
distributed attention, group collectives, moves of rows. Each is measured anew with its own settings.
What is more than 5% slower is a warning. What is more than 10% slower, or has no result, is measured a second time and
fails if it is so again; a wrong result fails at once. How speed is compared stands in ci/compare_results.py.
Exit codes: 0 passed, perhaps with warnings; 1 tests failed or something became slow; 2 nothing could be compared.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from compare_results import FAILING, Verdict, best_of, compare, merge, narrow, to_repeat
from result_files import (
    CONTEXT_PARALLEL,
    GROUP_COLLECTIVES,
    KERNEL,
    PROGRAMS,
    RANGE_OPS,
    SIZES,
    Cell,
    Incomparable,
    Run,
    load,
)

ROOT = Path(__file__).resolve().parent.parent
BASELINES = ROOT / "benchmarks" / "results"
Measure = Callable[[str, str, dict, str], Run]  # (benchmark, direction, settings, name of the output) -> results


def gpus_here() -> tuple[str, int]:
    """Name of the first GPU as the benchmarks write it, and how many there are; ``Incomparable`` without one."""
    try:
        import torch
    except ImportError:
        raise Incomparable(f"{sys.executable} has no torch; name one that has in MAGI_PYTHON.") from None
    if not torch.cuda.is_available():
        raise Incomparable("torch sees no GPU, so nothing can be tested or measured; `magi doctor` says why.")
    return torch.cuda.get_device_properties(0).name, torch.cuda.device_count()


def baselines(folder: Path, gpu: str | None, count: int | None = None) -> tuple[dict[str, Run], list[str]]:
    """Baselines of ``count`` of this GPU or fewer by name, and why other files are left out."""
    found, notes, other = {}, [], set()
    for path in sorted(folder.glob("*.json")):
        try:
            run = load(path)
        except Incomparable as reason:
            notes.append(f"{path.name} is left out. {reason}")
            continue
        if run.benchmark not in (KERNEL, *_COMMANDS):
            notes.append(f"{path.name} is left out. `magi bench {run.benchmark} --baseline` compares it.")
        elif run.environment.get("gpu") != gpu:
            other.add(run.environment.get("gpu") or "no GPU")
        elif count is not None and run.world > count:
            other.add(f"{run.world} x {gpu}")
            notes.append(f"{path.name} is left out. It takes {run.world} GPUs and here are {count}.")
        else:
            found[path.stem] = run
    if not found:
        raise Incomparable(
            f"{folder} has no baseline of {gpu or 'a machine without a GPU'}, only of "
            f"{', '.join(sorted(other)) or 'nothing'}; measure one with --out of the benchmarks and commit it."
        )
    return found, notes


def chosen(found: dict[str, Run], options: argparse.Namespace) -> dict[str, Run]:
    """What --only, --masks and --seqlens leave of the baselines; ``Incomparable`` if they leave none."""
    only, masks, sizes = (text.split(",") if text else [] for text in (options.only, options.masks, options.seqlens))
    if unknown := [name for name in only if name not in found]:
        raise Incomparable(f"{', '.join(unknown)}: no baseline of this GPU; there are {', '.join(found)}.")
    cells = {cell for run in found.values() for cell in run.results}
    for asked, known in (
        (masks, {c.mask for c in cells}),
        (sizes, {c.size for c in cells} | {str(c.seqlen) for c in cells}),
    ):
        if unknown := [word for word in asked if word not in known]:
            raise Incomparable(f"{', '.join(unknown)}: not in a baseline; there are {', '.join(sorted(known))}.")
    narrowed = {name: narrow(found[name], masks, sizes) for name in only or found}
    if not any(run.results for run in narrowed.values()):
        raise Incomparable(f"{', '.join(narrowed)} have none of these masks at these lengths together; name fewer.")
    return {name: run for name, run in narrowed.items() if run.results}


def command(benchmark: str, direction: str, settings: dict, out: Path) -> list[str]:
    """The benchmark's command line that had these settings; all but one measure all directions at once."""
    if benchmark == KERNEL:
        return _kernel_command(direction, settings, out)
    return _COMMANDS[benchmark](settings, out)


def _kernel_command(direction: str, settings: dict, out: Path) -> list[str]:
    line = [sys.executable, str(ROOT / "benchmarks" / "kernel.py"), "--direction", direction, "--out", str(out)]
    for key in ("masks", "seqlens", "only"):
        if settings.get(key):
            line += [f"--{key}", ",".join(map(str, settings[key]))]
    line += ["--heads", *map(str, settings["heads"])]
    for key in ("head_dim", "dtype", "samples", "repeats", "documents", "window"):
        if settings.get(key) is not None:
            line += [f"--{key.replace('_', '-')}", str(settings[key])]
    return line + [f"--{key.replace('_', '-')}" for key in ("no_peers", "graph", "host") if settings.get(key)]


def _range_ops_command(settings: dict, out: Path) -> list[str]:
    line = [sys.executable, str(ROOT / "benchmarks" / "group_collectives.py"), "rows", "--out", str(out)]
    return line + [f"--{key}={settings[key]}" for key in ("megabytes", "repeats")]


def _on_ranks(settings: dict, script: str, out: Path) -> list[str]:
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(settings["world"])]
    ranks += ["--local-addr", "127.0.0.1"]
    return [sys.executable, *ranks, str(ROOT / "benchmarks" / script), "--out", str(out)]


def _group_command(settings: dict, out: Path) -> list[str]:
    line = _on_ranks(settings, "group_collectives.py", out) + ["--rows", ",".join(map(str, settings["rows"]))]
    given = {key: settings.get(key) for key in ("heads", "head_dim", "num_sms", "repeats", "beside")}
    return line + [f"--{key.replace('_', '-')}={value}" for key, value in given.items() if value is not None]


def _several_command(settings: dict, out: Path) -> list[str]:
    line = _on_ranks(settings, "context_parallel.py", out)
    for key in ("masks", "tokens", "only"):
        line += [f"--{key}", ",".join(map(str, settings[key]))]
    line += ["--heads", *map(str, settings["heads"])]
    given = (
        "head_dim", "dtype", "packs", "seed", "chunk_size", "warm_up", "heat_up", "rounds", "repeats",
        "wall_repeats", "wall_layers", "kernel_repeats", "timeout", "time_limit",
    )  # fmt: skip
    for key in given:
        if settings.get(key) is not None:
            line += [f"--{key.replace('_', '-')}", str(settings[key])]
    return line + [f"--{key.replace('_', '-')}" for key in ("no_check", "no_flush") if settings.get(key)]


_COMMANDS = {CONTEXT_PARALLEL: _several_command, GROUP_COLLECTIVES: _group_command, RANGE_OPS: _range_ops_command}


def measurer(folder: Path, timeout_s: float) -> Measure:
    """Runs the benchmark in a process of its own and reads what it wrote."""

    def measure(benchmark: str, direction: str, settings: dict, name: str) -> Run:
        out = folder / name
        file = Path(f"{out}.json")
        file.unlink(missing_ok=True)  # what an earlier run left must not pass for this one
        line = command(benchmark, direction, settings, out)
        print(f"$ {shlex.join(line)}", flush=True)
        try:
            subprocess.run(line, cwd=ROOT, stdin=subprocess.DEVNULL, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            print(f"The benchmark took over {timeout_s:.0f} s and was stopped; --timeout allows more.", flush=True)
        if not file.is_file():
            raise Incomparable(f"The benchmark wrote no {file.name}; its own words above say why.")
        return load(file)

    return measure


def _parts(baseline: Run, cells: Sequence[Cell] | None) -> list[tuple[str, dict]]:
    """(direction, settings) that measure the whole baseline, or at least ``cells``."""
    out, wanted = [], list(baseline.results if cells is None else cells)
    sizes = SIZES.get(baseline.benchmark)
    directions = ["all"]
    if baseline.benchmark == KERNEL:
        directions = list(dict.fromkeys(cell.direction for cell in baseline.results))
    for settings in baseline.settings:
        for direction in directions:
            here = [
                c
                for c in wanted
                if direction in ("all", c.direction)
                and ("masks" not in settings or c.mask in settings["masks"])
                and (sizes is None or c.seqlen in settings[sizes])
            ]
            if here:
                masks, lengths = {c.mask for c in here}, {c.seqlen for c in here}
                less = {"masks": [m for m in settings["masks"] if m in masks]} if "masks" in settings else {}
                less |= {sizes: [n for n in settings[sizes] if n in lengths]} if sizes else {}
                out.append((direction, settings | less))
    return out


def check(name: str, baseline: Run, measure: Measure) -> tuple[list[Verdict], list[str]]:
    """Verdicts on one baseline after up to two tries, and notes."""

    def attempt(number: int, cells: Sequence[Cell] | None) -> Run:
        parts = _parts(baseline, cells)
        names = [f"{name}-try{number}-part{i}" for i in range(1, len(parts) + 1)]
        return merge([measure(baseline.benchmark, *part, out) for part, out in zip(parts, names)])

    verdicts, notes = compare(baseline, attempt(1, None))
    if again := to_repeat(verdicts):
        print(f"{name}: {len(again)} results are slow or missing; measuring these a second time", flush=True)
        verdicts = best_of(verdicts, compare(baseline, attempt(2, again))[0])
    return verdicts, notes


def report(name: str, verdicts: Sequence[Verdict], notes: Sequence[str]) -> bool:
    """Prints what is not ok, writes a runner's summary and annotations; True if nothing fails."""
    counts = {s: sum(v.status == s for v in verdicts) for s in dict.fromkeys(v.status for v in verdicts)}
    head = f"{name}: " + ", ".join(f"{n} {status}" for status, n in counts.items())
    lines = [v.line() for v in verdicts if v.status != "ok" or v.notes]
    print("\n".join([head, *(f"  {line}" for line in [*notes, *lines])]), flush=True)
    if os.environ.get("GITHUB_ACTIONS"):
        for v in verdicts:
            if v.status in (*FAILING, "warn"):
                print(f"::{'warning' if v.status == 'warn' else 'error'} title={name}::{v.line()}", flush=True)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a", encoding="utf-8") as file:
            file.write("\n".join([f"### {head}", "", *(f"- {line}" for line in [*notes, *lines]), ""]))
    return not any(v.status in FAILING for v in verdicts)


def compare_files(options: argparse.Namespace) -> bool:
    """One try, with results that were measured elsewhere; they may cover a baseline in several files."""
    now = merge([load(path) for path in options.compare])
    found, notes = baselines(options.baselines, now.environment.get("gpu"))
    found = chosen(found, options)
    directions = {cell.direction for cell in now.results}
    passed = True
    asked = {
        n: b
        for n, b in found.items()
        if b.benchmark == now.benchmark and directions & {cell.direction for cell in b.results}
    }
    if not asked:
        raise Incomparable(
            f"No baseline has {', '.join(sorted(directions))} of benchmarks/{PROGRAMS[now.benchmark]}; the baselines "
            f"are {', '.join(found)}."
        )
    for name, baseline in asked.items():
        verdicts, more = compare(baseline, now)
        passed &= report(name, verdicts, [*notes, *more])
    return passed


def run_tests() -> bool:
    """The GPU suite by this interpreter; False if it failed."""
    line = [str(ROOT / "magi"), "test", "--suite", "gpu"]
    print(f"$ {shlex.join(line)}", flush=True)
    return subprocess.run(line, cwd=ROOT, env={**os.environ, "MAGI_PYTHON": sys.executable}).returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="ci/gpu_regression", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--baselines", type=Path, default=BASELINES, metavar="DIR", help="baselines (benchmarks/results)")
    add("--out", type=Path, default=ROOT / "build" / "regression", metavar="DIR", help="results (build/regression)")
    add("--only", metavar="A,B", help="these baselines, by file name without .json")
    add("--masks", metavar="A,B", help="these masks alone")
    add("--seqlens", metavar="4K,32K", help="these lengths alone")
    add("--skip-tests", action="store_true", help="only the benchmarks")
    add("--compare", type=Path, nargs="+", metavar="RUN.json", help="compare these instead of measuring")
    add("--timeout", type=float, default=1800, metavar="SECONDS", help="for one benchmark (1800)")
    options = parser.parse_args(arguments)
    try:
        if options.compare:
            return 0 if compare_files(options) else 1
        found, notes = baselines(options.baselines, *gpus_here())
        found = chosen(found, options)
        print("\n".join(notes), end="\n" if notes else "")
        failed = [] if options.skip_tests or run_tests() else ["tests"]
        measure = measurer(options.out, options.timeout)
        options.out.mkdir(parents=True, exist_ok=True)
        failed += [name for name, baseline in found.items() if not report(name, *check(name, baseline, measure))]
    except Incomparable as reason:
        print(f"ci/gpu_regression: {reason}", file=sys.stderr)
        return 2
    print(f"failed: {', '.join(failed)}" if failed else "passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
