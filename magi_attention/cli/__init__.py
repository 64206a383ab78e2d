# SPDX-License-Identifier: Apache-2.0
"""The command line: `magi run | explain | test | env | version`.

Exit codes: 0 done, 1 the work failed, 2 the request was wrong and nothing was started, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time

from magi_attention.cli.common import (
    ROOT,
    UsageError,
    child_environment,
    num_cores,
    run_child,
    source_file,
)
from magi_attention.cli.explain import command_explain
from magi_attention.cli.run import command_run
from magi_attention.errors import MagiError
from magi_attention.version import __version__

MASKS = ("causal", "full", "sliding-window", "block-causal", "prefix-lm")


def degree(text: str) -> int | str:
    """Value of --degree: a number of stages or the word dynamic."""
    if text == "dynamic":
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of stages; give 0, 1, 2 ... or dynamic")
    return int(text)


def command_test(args: argparse.Namespace) -> int:
    source_file("tests")
    if importlib.util.find_spec("pytest") is None:
        raise UsageError("pytest is not installed; `pip install 'magi_attention[dev]'` brings it.")
    extra = list(args.pytest_arguments)
    workers = []
    if importlib.util.find_spec("xdist") and not any(a.startswith(("-n", "--numprocesses")) for a in extra):
        workers = ["-n", str(min(2, num_cores()))]
    started = time.perf_counter()
    os.chdir(ROOT)
    code = run_child([sys.executable, "-m", "pytest", *workers, *extra], child_environment(1))
    print(f"The tests took {time.perf_counter() - started:.0f} s.")
    return code


def command_env(args: argparse.Namespace) -> int:
    from magi_attention.env import registry

    section = None
    for row in registry.list_table():
        if args.set and not row["value"]:
            continue
        if row["section"] != section:
            section = row["section"]
            print(f"\n{section}")
        value = f"= {row['value']}" if row["value"] else f"unset, default {row['default']}"
        remark = "" if row["effect"] == "yes" else " No effect in this build."
        print(f"  {row['name']}  ({row['type']})  {value}\n      {row['doc']}{remark}")
    registry.check_unknown()
    return 0


def command_version(args: argparse.Namespace) -> int:
    from importlib.metadata import PackageNotFoundError, version

    print(f"magi_attention {__version__}")
    for package in ("torch", "numpy"):
        try:
            print(f"{package} {version(package)}")
        except PackageNotFoundError:
            print(f"{package} is missing")
    print(f"python {sys.version.split()[0]} ({sys.executable})")
    return 0


# ---- the parser ---------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="magi", description="Context-parallel attention: run, explain, test.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="train a small model over several ranks and report")
    run.set_defaults(function=command_run)
    run.add_argument("--data", help="text file or folder; the standard library's sources without it")
    run.add_argument("--ranks", type=int, help="4 on the CPU; all GPUs up to 4 where there are two or more")
    run.add_argument("--steps", type=int, default=30)
    run.add_argument("--seq-len", type=int, default=8192, help="tokens (bytes) per step")
    run.add_argument("--max-document", type=int, default=2048, help="tokens of the longest document")
    run.add_argument("--name", help="folder under runs/; the time of day without it")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--degree", type=int, default=1, help="overlap stages")
    run.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    run.add_argument("--no-replay", dest="replay", action="store_false", help="skip the single-process run")

    explain = commands.add_parser(
        "explain", help="plan a mask for any number of ranks, in tables and pictures"
    )
    explain.set_defaults(function=command_explain)
    explain.add_argument("--mask", choices=MASKS, default="causal", help="inside every document")
    explain.add_argument("--tokens", type=int, help="length of the sequence")
    explain.add_argument("--docs", help="document lengths, such as 1000,4000,3192")
    explain.add_argument("--doc-file", help="text file of document lengths")
    explain.add_argument("--mask-file", help="JSON file of AttnSlices; see the README")
    explain.add_argument("--window", type=int, help="sliding-window: tokens before the query")
    explain.add_argument("--global-prefix", type=int, default=0, help="sliding-window: tokens all can see")
    explain.add_argument("--block", type=int, default=1024, help="block-causal: tokens per block")
    explain.add_argument("--prefix", type=int, default=0, help="prefix-lm: tokens of the prefix")
    explain.add_argument("--cp", type=int, default=8, help="number of ranks")
    explain.add_argument("--degree", type=degree, default=1, help="overlap stages, or 'dynamic'")
    explain.add_argument("--chunk-size", type=int, help="tokens per chunk; chosen without it")
    explain.add_argument("--heads-q", type=int, default=64)
    explain.add_argument("--heads-kv", type=int, default=8)
    explain.add_argument("--head-dim", type=int, default=128)
    explain.add_argument("--out", default="runs/explain", help="folder for pictures and page")
    explain.add_argument("--no-pictures", dest="pictures", action="store_false")

    test = commands.add_parser("test", help="run the test suite; further arguments go to pytest")
    test.set_defaults(function=command_test, pytest_arguments=[])
    env = commands.add_parser("env", help="list the environment variables")
    env.set_defaults(function=command_env)
    env.add_argument("--set", action="store_true", help="only those that are set")
    commands.add_parser("version", help="print versions").set_defaults(function=command_version)
    return top


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    top = parser()
    args, rest = top.parse_known_args(argv)
    if rest and args.command != "test":
        top.error(f"unknown arguments: {' '.join(rest)}")
    args.pytest_arguments = rest
    try:
        return args.function(args)
    except (UsageError, MagiError, ValueError) as error:
        print(f"magi {args.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader went away, as in `magi env | head`; the interpreter must not flush into the pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"\nmagi {args.command}: interrupted; nothing is left running.", file=sys.stderr)
        return 130
