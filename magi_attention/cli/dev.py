# SPDX-License-Identifier: Apache-2.0
"""`magi dev lint | type | test | bench`: what one runs while one changes the code, with this Python and as it is."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import PurePosixPath

from magi_attention.cli.common import UsageError, child_environment, num_cores, run_child, source_file, sources
from magi_attention.cli.suites import command_test

BENCH = "planner"  # runs in a minute, without a GPU
# folder of a change -> folder under tests/, where the names differ
_TESTS_OF = {".ci": "ci", ".github": "ci", "wheels": "ci", "csrc": "native"}


def add_dev(commands: argparse._SubParsersAction) -> None:
    dev = commands.add_parser("dev", help="lint, type, test, bench: checks for who changes the code")
    tasks = dev.add_subparsers(dest="task", required=True, metavar="TASK")
    for name, text in (("lint", "style, layers, sizes, the matrix, workflows"), ("type", "mypy")):
        task = tasks.add_parser(name, help=text)
        task.set_defaults(function=command_lane)
    test = tasks.add_parser("test", help="the tests of what has changed; with arguments, as `magi test`")
    test.set_defaults(function=command_dev_test)
    test.add_argument("--since", help="commit or branch; where this branch left main without it")
    bench = tasks.add_parser("bench", help=f"`magi bench {BENCH}`; its arguments go behind --")
    bench.set_defaults(function=command_dev_bench)
    for task in tasks.choices.values():
        task.add_argument("--dry-run", action="store_true", help="print what would be run, and run nothing")


def command_lane(args: argparse.Namespace) -> int:
    command = [sys.executable, str(source_file("ci", "lanes.py")), args.task, "--here"]
    return 1 if run_child([*command, *(["--dry-run"] if args.dry_run else [])], child_environment(num_cores())) else 0


def command_dev_bench(args: argparse.Namespace) -> int:
    command = [sys.executable, "-m", "magi_attention.cli", "bench", BENCH, *(["--dry-run"] if args.dry_run else [])]
    return run_child([*command, "--", *args.script_arguments], child_environment(num_cores()))


def command_dev_test(args: argparse.Namespace) -> int:
    args.suite = None
    if args.pytest_arguments:
        if args.since:
            raise UsageError("--since chooses the tests, and so do arguments of pytest; drop one of them.")
        return command_test(args)
    files = changed_files(args.since)
    chosen = tests_of(files)
    if not chosen:
        print("No file has changed since then; `magi dev test --since COMMIT` looks further back.")
        return 0
    print(f"{len(files)} files have changed: pytest {shlex.join(chosen)}", flush=True)
    args.pytest_arguments = chosen
    return command_test(args)


def changed_files(since: str | None) -> list[str]:
    """Files under the checkout that differ from that state, those that git does not know yet included."""
    since = since or (_git("merge-base", "main", "HEAD", may_fail=True) or ["HEAD"])[0]
    known = _git("diff", "--name-only", "--relative", "--diff-filter=d", since)
    return sorted({*known, *_git("ls-files", "--others", "--exclude-standard")})


def _git(*words: str, may_fail: bool = False) -> list[str]:
    command = ["git", "-C", str(sources()), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise UsageError("git is not installed, which knows what has changed; name tests.") from None
    if done.returncode and not may_fail:
        raise UsageError(f"git cannot say what has changed ({done.stderr.strip().splitlines()[0]}); name tests.")
    return done.stdout.splitlines() if done.returncode == 0 else []


def tests_of(files: Iterable[str]) -> list[str]:
    """What pytest is to run for these files: changed tests, and folders that mirror changed modules."""
    found = set()
    for name in files:
        path = PurePosixPath(name)
        if path.parts[0] == "tests" and path.name.startswith("test_") and path.suffix == ".py":
            found.add(name)
            continue
        folder = f"tests/{_mirror(path)}".rstrip("/")
        found.add(folder if (sources() / folder).is_dir() else "tests")
    return sorted(name for name in found if not any(str(above) in found for above in PurePosixPath(name).parents))


def _mirror(path: PurePosixPath) -> str:
    """Folder under tests/ for a file; empty for all of them."""
    first, *rest = path.parts
    if first in ("magi_attention", "tests"):
        return rest[0] if len(rest) > 1 else ""
    if not rest:
        return "docs" if path.suffix == ".md" else "ci"
    return _TESTS_OF.get(first, first)
