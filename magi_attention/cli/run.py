# SPDX-License-Identifier: Apache-2.0
"""`magi run`: train over several ranks, take the same steps in one process, write the report."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
import time
from pathlib import Path

from magi_attention.cli.common import (
    UsageError,
    child_environment,
    make_folder,
    num_cores,
    run_child,
    source_file,
    torchrun,
)
from magi_attention.cli.plans.explain import plan_for
from magi_attention.cli.plans.masks import read_mask
from magi_attention.tools.launch.failure import LINE_PREFIX, FailureReport, describe_code, last_words


def check_data(path: str | None) -> None:
    """Fails before anything is started where there is nothing to read."""
    name = "magi_example_data"
    spec = importlib.util.spec_from_file_location(name, source_file("examples", "llama", "data.py"))
    assert spec is not None and spec.loader is not None
    data = importlib.util.module_from_spec(spec)
    sys.modules[name] = data  # dataclasses look their module up by name
    spec.loader.exec_module(data)
    try:
        next(data.packed_batches(path, 16))
    except (data.DataError, OSError) as error:
        raise UsageError(str(error)) from None


def choose_device(wanted: str, ranks: int | None) -> tuple[str, int]:
    """(device, ranks): the GPUs if there are at least two and enough of them, else processes on the CPU."""
    import torch

    gpus = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if wanted == "cuda" and gpus < (ranks or 1):
        raise UsageError(f"--device cuda with {ranks or 1} ranks, but {gpus} GPUs are visible; lower --ranks.")
    if wanted == "cuda" or (gpus > 1 and gpus >= (ranks or 2)):
        return "cuda", ranks or min(gpus, 4)
    return "cpu", ranks or 4


# Options of the built-in example, which mean nothing to a script that is launched.
EXAMPLE_OPTIONS = {
    "data": None, "ranks": None, "steps": 30, "seq_len": 8192, "max_document": 2048, "seed": 0, "degree": 1,
    "device": "auto", "replay": True,
}  # fmt: skip


def example_options_given(args: argparse.Namespace) -> list[str]:
    given = [name for name, default in EXAMPLE_OPTIONS.items() if getattr(args, name) != default]
    return ["--no-replay" if name == "replay" else f"--{name.replace('_', '-')}" for name in given]


def command_run(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    train = source_file("examples", "llama", "train.py")
    for name in ("steps", "seq_len", "max_document"):
        if getattr(args, name) < 2:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; give at least 2.")
    if args.ranks is not None and args.ranks < 1:
        raise UsageError(f"--ranks is {args.ranks}; give at least 1.")
    check_data(args.data)
    device, ranks = choose_device(args.device, args.ranks)
    folder = Path("runs") / (args.name or time.strftime("%Y%m%d-%H%M%S"))
    if (folder / "losses.json").exists():
        raise UsageError(f"{folder} already holds a run; choose another --name.")

    shared = ["--out", str(folder), "--device", device]
    for name in ("steps", "seq_len", "max_document", "seed", "degree"):
        shared += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    if args.data is not None:
        shared += ["--data", args.data]
    start = torchrun(ranks) + ["--tee", "2", "--log-dir", str(folder / "ranks")]  # each line of the log has its rank
    phases = [("training", [*start, str(train), *shared], max(num_cores() // ranks, 1))]
    if args.replay:
        phases.append(("replay", [str(train), *shared, "--curve", "replay"], num_cores()))
    if args.dry_run:
        for phase, command, threads in phases:
            print(f"# {phase}\nOMP_NUM_THREADS={threads} {shlex.join([sys.executable, *command])}")
        return 0
    where = "GPUs with NCCL" if device == "cuda" else "processes on the CPU with gloo"
    make_folder(folder, "--name")
    texts = {"training": f"training over {ranks} {where}", "replay": "the same steps in one process, to compare losses"}
    for number, (phase, command, threads) in enumerate(phases, 1):
        print(f"Part {number} of {len(phases)}: {texts[phase]}.", flush=True)
        log = folder / f"{phase}.log"
        code = run_child([sys.executable, *command], child_environment(threads) | LINE_PREFIX, log)
        if code != 0:
            print("\n".join(told_failure(phase, code, log)), file=sys.stderr)
            return 1
    return finish_run(folder, args, ranks, started)


def told_failure(phase: str, code: int, log: Path) -> list[str]:
    """The cause in a few lines; the log has the rest, such as torchrun's own report."""
    report, lines = FailureReport(), log.read_text(errors="replace").splitlines()
    for line in lines:
        report.take(line)
    words = report.last_words() if report.sentence else last_words(lines)
    cause = report.sentence or f"it ended with {describe_code(code)}"
    return [f"magi: the {phase} failed: {cause}.", *(f"  {line}" for line in words), f"magi: the whole log: {log}"]


def finish_run(folder: Path, args: argparse.Namespace, ranks: int, started: float) -> int:
    """Writes the page and says how the run went."""
    from magi_attention.tools.report.run import LIMIT, read_run, write_page

    result = read_run(folder)
    unset = dict.fromkeys(("chunk_size", "max_fragments", "plan_rates", "node_size"))
    shape = argparse.Namespace(**result.parallel["heads"], degree=args.degree, **unset)
    # As the training made it.
    page = write_page(folder, result, plan_for(read_mask(folder / "mask.json"), ranks, shape, "locality", "never"))
    for name, curve in ((f"{ranks} ranks", result.parallel), ("one process", result.replay)):
        if curve:
            first, last = curve["losses"][0], curve["losses"][-1]
            print(
                f"{name}: loss {first:.4f} -> {last:.4f} in {len(curve['losses'])} steps, "
                f"{curve['seconds']:.0f} s, {curve['tokens_per_second']:,.0f} tokens/s"
            )
    if result.difference is not None:
        verdict = "equal" if result.is_equal else "NOT equal"
        print(f"Largest relative loss difference: {result.difference:.2e} (limit {LIMIT:.0e}): {verdict}")
    print(f"Report: {page}\nTook {time.perf_counter() - started:.0f} s")
    return 0 if result.is_equal else 1
