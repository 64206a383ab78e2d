# SPDX-License-Identifier: Apache-2.0
"""`magi test`: the whole suite, or one of its parts; the multinode part is launched over several nodes."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import sys
import time
from pathlib import Path

from magi_attention.cli import launch, suite_report
from magi_attention.cli.common import UsageError, child_environment, num_cores, run_child, source_file, sources

# suite -> marker expression of pytest
SUITES = {"cpu": "not gpu and not multinode", "gpu": "gpu", "multinode": "multinode", "nightly": "nightly"}
BY_DAY = "not nightly"
BESIDE_OTHERS, ALONE = "gpu and not whole_gpu", "gpu and whole_gpu"
WORKERS_PER_GPU = 8
NO_TESTS = 5  # pytest's exit code where nothing was collected
NODES, RANKS_PER_NODE = 2, 2  # of the multinode suite where nothing else is asked for


def command_test(args: argparse.Namespace) -> int:
    source_file("tests")
    if importlib.util.find_spec("pytest") is None:
        raise UsageError("pytest is not installed; run `pip install pytest pytest-xdist hypothesis`.")
    if args.suite == "multinode" or launch.launch_options_given(args):
        return launch_suite(args)
    if args.suite == "gpu" and not args.dry_run:
        need_gpu()
    extra, is_on_gpus = list(args.pytest_arguments), args.suite == "gpu"
    workers = []
    if importlib.util.find_spec("xdist") and not any(a.startswith(("-n", "--numprocesses")) for a in extra):
        # Who has none left takes from others.
        workers = ["-n", str(num_workers(is_on_gpus)), "--dist", "worksteal"]
    pytest = [sys.executable, "-m", "pytest"]
    chooses = any(a.startswith("-m") or "::" in a for a in extra)  # the caller, who names marks or tests
    marks = SUITES[args.suite] if args.suite else "" if chooses else BY_DAY
    commands = [[*pytest, *workers, *(["-m", marks] if marks else []), *extra]]
    if is_on_gpus:
        commands = [[*pytest, *workers, "-m", BESIDE_OTHERS, *extra], [*pytest, "-m", ALONE, *extra]]
    if args.dry_run:
        print(*map(shlex.join, commands), sep="\n")
        return 0
    started = time.perf_counter()
    os.chdir(sources())
    code = run_gpu_suite(commands) if is_on_gpus else run_child(commands[0], test_environment())
    print(f"The tests took {time.perf_counter() - started:.0f} s.")
    return code


def test_environment() -> dict[str, str]:
    """Bytecode is kept, because tests start many hundred processes, which import the same modules."""
    return {name: value for name, value in child_environment(1).items() if name != "PYTHONDONTWRITEBYTECODE"}


def num_workers(is_on_gpus: bool) -> int:
    """Processes of pytest at a time. Tests on GPUs wait for the CPU as much as for the GPU, which they share."""
    if not is_on_gpus:
        return min(2, num_cores()) + 1  # one more than cores, because many tests wait for processes of their own
    import torch

    return max(1, min(WORKERS_PER_GPU * torch.cuda.device_count(), num_cores() - 1))


def run_gpu_suite(commands: list[list[str]]) -> int:
    """The tests, those that share a GPU and then those that need all of it; and one report beside the machine's."""
    folder = suite_report.new_folder(Path("runs"))
    files, codes = [], []
    for number, command in enumerate(commands):
        files.append(folder / f"junit{number}.xml")
        codes.append(run_child([*command, f"--junitxml={files[-1]}"], test_environment()))
    ran = [code for code in codes if code != NO_TESTS] or [NO_TESTS]
    code = max(ran)
    print(suite_report.summary(suite_report.write_report(folder, files, code)))
    return code


def need_gpu() -> None:
    """Without a GPU every test would be skipped and the suite would look as if it had passed."""
    import torch

    if not torch.cuda.is_available():
        raise UsageError("No GPU can be used here, so no test of the gpu suite would run; `magi doctor` says why.")


def launch_suite(args: argparse.Namespace) -> int:
    """pytest on every rank of a launch; each rank writes a JUnit file beside its log."""
    suite = args.suite or "multinode"
    if not args.session and not args.spec:
        args.nodes = args.nodes or NODES
        args.ranks_per_node = args.ranks_per_node or RANKS_PER_NODE
    names_tests = any((sources() / word.partition("::")[0]).exists() for word in args.pytest_arguments)
    where = [] if names_tests else ["tests/multinode" if suite == "multinode" else "tests"]
    command = ["-m", "magi_attention.testing.rank_pytest", "-m", SUITES[suite], *where, *args.pytest_arguments]
    return launch.launch(args, command, f"test-{suite}")
