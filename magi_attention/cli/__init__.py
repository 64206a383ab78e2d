# SPDX-License-Identifier: Apache-2.0
"""The command line: `magi run | test | explain | bench | env | version | precompile` and the launcher's verbs.

Exit codes: 0 done, 1 the work failed, 2 the request was wrong and nothing was started, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from magi_attention.cli import launch, output
from magi_attention.cli.bench import add_bench
from magi_attention.cli.common import UsageError, add_script_command, token_count
from magi_attention.cli.completion import add_completion
from magi_attention.cli.dev import add_dev
from magi_attention.cli.doctor import command_collect_env, command_doctor
from magi_attention.cli.plans.explain import FOLDER, HEADS, command_explain
from magi_attention.cli.plans.masks import add_mask_options
from magi_attention.cli.plans.memory import add_memory_options
from magi_attention.cli.plans.simulate import add_simulate
from magi_attention.cli.precompile import add_precompile
from magi_attention.cli.profile import add_profile
from magi_attention.cli.run import command_run, example_options_given
from magi_attention.cli.suites import SUITES, command_test
from magi_attention.cli.tune import add_tune
from magi_attention.errors import MagiError
from magi_attention.version import __version__

# A word that may be left out is only seen by argparse in front of the options; behind them it is taken here.
OPTIONAL_WORDS = {"run": "script", "profile": "script", "render": "script", "status": "name", "down": "name"}


def degree(text: str) -> int | str:
    """Value of --degree: a number of stages or the word dynamic."""
    if text == "dynamic":
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of stages; give 0, 1, 2 ... or dynamic")
    return int(text)


def command_run_or_launch(args: argparse.Namespace) -> int:
    """With a script, or a spec or session that has one, the launcher; else the built-in example."""
    if args.script is None and not launch.launch_options_given(args):
        if args.script_arguments:
            raise UsageError("Arguments behind -- belong to a script; name it, as in `magi run train.py -- ...`.")
        return command_run(args)
    if given := example_options_given(args):
        raise UsageError(
            f"{', '.join(given)} {'belongs' if len(given) == 1 else 'belong'} to the built-in example, which runs "
            "without a script; options of a script come behind --."
        )
    command = [args.script, *args.script_arguments] if args.script else args.script_arguments
    return launch.launch(args, command, os.path.basename(args.script or "run").removesuffix(".py"))


def command_render(args: argparse.Namespace) -> int:
    return launch.command_render(args, [args.script, *args.script_arguments] if args.script else [])


def command_env(args: argparse.Namespace) -> int:
    from magi_attention.env import registry

    section = None
    rows = [row for row in registry.list_table() if row["value"] or not args.set]
    if args.json:
        print(json.dumps(rows, indent=1))
        rows = []
    for row in rows:
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

    found: dict[str, str | None] = {"magi_attention": __version__}
    for package in ("torch", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if args.json:
        print(json.dumps({**found, "python": sys.version.split()[0], "executable": sys.executable}, indent=1))
        return 0
    for package, number in found.items():
        print(f"{package} {number or 'is missing'}")
    print(f"python {sys.version.split()[0]} ({sys.executable})")
    return 0


# ---- the parser ---------------------------------------------------------------------------------------


def _add_explain(commands) -> None:
    explain = commands.add_parser("explain", help="plan a mask for any number of ranks, in tables and on a page")
    explain.set_defaults(function=command_explain)
    add_mask_options(explain)
    explain.add_argument("--tokens", type=token_count, help="length of the sequence, such as 131072, 128K or 1M")
    explain.add_argument("--mask-file", help="slices (.json) or a dense mask (.npy, .png); see docs/masks.md")
    explain.add_argument("--cp", type=int, default=8, help="number of ranks")
    explain.add_argument("--node-size", help="ranks per node, 8 or 8,8,4: for the dispatch, and bytes by link")
    explain.add_argument("--degree", type=degree, default=1, help="overlap stages, or 'dynamic'")
    explain.add_argument("--chunk-size", type=token_count, help="tokens per chunk; chosen without it")
    explain.add_argument("--max-fragments", type=int, help="ranges of tokens per rank, at most; any without it")
    explain.add_argument(
        "--dispatch", choices=("locality", "min-heap", "sequential"), default="locality",
        help="how chunks are given to ranks: DispatchConfig's LocalityDispatchAlg, and so on",
    )  # fmt: skip
    explain.add_argument(
        "--query-moves", choices=("never", "auto", "always"), default="never",
        help="may queries travel to the keys, where that is cheaper?",
    )  # fmt: skip
    for name, value in HEADS.items():
        explain.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"of the model; {value} without it")
    explain.add_argument("--budget", action="store_true", help="measure planning here, beside a step's attention")
    explain.add_argument("--layers", type=int, help="with --budget: attention layers of the model; 32 without it")
    explain.add_argument("--recurrent", metavar="LAYER:HxKxV", help="a layer by ways: gated_delta:32x128x128")
    explain.add_argument("--rates", metavar="FILE", help="plan and predict by a file of `magi tune`")
    add_memory_options(explain)
    explain.add_argument("--out", help=f"folder for the page; {FOLDER} without it")
    explain.add_argument("--no-pictures", dest="pictures", action="store_false", help="print the tables only")
    explain.add_argument("--json", action="store_true", help="print the numbers as JSON, and nothing else")


class _Parser(argparse.ArgumentParser):
    """Without a word argparse goes on where its help cannot be written."""

    def print_help(self, file=None) -> None:
        print(self.format_help(), end="", file=file)


def parser() -> argparse.ArgumentParser:
    top = _Parser(prog="magi", description="Context-parallel attention: run, explain, test.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    text = "train a small model over several ranks and report, or launch a script"
    run = add_script_command(commands, "run", text, command_run_or_launch)
    run.add_argument("--data", help="text file or folder; the standard library's sources without it")
    run.add_argument("--ranks", type=int, help="4 on the CPU; all GPUs up to 4 where there are two or more")
    run.add_argument("--steps", type=int, default=30)
    run.add_argument("--seq-len", type=token_count, default=8192, help="tokens (bytes) per step")
    run.add_argument("--max-document", type=token_count, default=2048, help="tokens of the longest document")
    run.add_argument("--name", help="folder under runs/, or session of a launch; by the time without")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--degree", type=int, default=1, help="overlap stages")
    run.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    run.add_argument("--no-replay", dest="replay", action="store_false", help="skip the single-process run")
    run.add_argument("--session", help="launch in this session, which `magi up` made")
    launch.add_dry_run(run)
    launch.add_spec_options(run)

    _add_explain(commands)

    test = commands.add_parser("test", help="run the test suite; further arguments go to pytest")
    test.set_defaults(function=command_test)
    test.add_argument("--suite", choices=SUITES, help="only these tests; multinode is launched over several nodes")
    test.add_argument("--session", help="launch the suite in this session")
    launch.add_dry_run(test)
    launch.add_spec_options(test)
    env = commands.add_parser("env", help="list the environment variables")
    env.set_defaults(function=command_env)
    env.add_argument("--set", action="store_true", help="only those that are set")
    env.add_argument("--json", action="store_true", help="a list of rows, in place of text")
    versions = commands.add_parser("version", help="print versions")
    versions.set_defaults(function=command_version)
    versions.add_argument("--json", action="store_true")
    add_precompile(commands)
    add_profile(commands)
    add_dev(commands)
    add_completion(commands, top)
    add_bench(commands)
    add_tune(commands)
    add_simulate(commands)
    add_launcher(commands)
    return top


def add_launcher(commands: argparse._SubParsersAction) -> None:
    """The verbs of the launcher."""
    up = commands.add_parser("up", help="make a session for runs and see that it can work")
    up.set_defaults(function=launch.command_up)
    up.add_argument("--name", help="of the session; default without it")
    status = commands.add_parser("status", help="sessions and how their runs went")
    status.set_defaults(function=launch.command_status)
    status.add_argument("name", nargs="?", help="only this session, with all its runs")
    status.add_argument("--json", action="store_true")
    logs = commands.add_parser("logs", help="what a run printed")
    logs.set_defaults(function=launch.command_logs)
    logs.add_argument("name")
    logs.add_argument("--run", help="number of the run; the latest without it")
    logs.add_argument("--rank", type=int)
    logs.add_argument("--node", type=int)
    logs.add_argument("--grep", help="regular expression")
    logs.add_argument("--follow", action="store_true", help="until the run has ended")
    down = commands.add_parser("down", help="stop what runs in a session and free what it holds; logs stay")
    down.set_defaults(function=launch.command_down)
    down.add_argument("name", nargs="?")
    down.add_argument("--all", action="store_true")
    down.add_argument("--remove", action="store_true", help="remove the files too")
    render = commands.add_parser("render", help="print the exact commands or manifest of a launch")
    render.set_defaults(function=command_render)
    render.add_argument("target", choices=launch.RENDERED)
    render.add_argument("script", nargs="?")
    render.add_argument("--name", help="of the job")
    render.add_argument("--output", "-o", type=Path, help="folder to write into")
    doctor = commands.add_parser("doctor", help="what keeps this machine from running well, and what mends it")
    doctor.set_defaults(function=command_doctor)
    depth = doctor.add_mutually_exclusive_group()
    depth.add_argument("--static", action="store_true", help="without a GPU, as while an image is built")
    depth.add_argument("--quick", action="store_true", help="within two seconds, nothing is allocated on a GPU")
    doctor.add_argument("--pairwise", action="store_true", help="also all ranks against one another, over nodes")
    doctor.add_argument("--json", action="store_true")
    doctor.add_argument("--problems", action="store_true", help="print only what needs mending")
    doctor.add_argument("--strict", action="store_true", help="exit with 1 for a warning, not only for an error")
    doctor.add_argument("--session", help="for --pairwise")
    collect = commands.add_parser("collect-env", help="what a bug report needs, as JSON")
    collect.set_defaults(function=command_collect_env)
    collect.add_argument("--session", help="pack the files of its latest run with it into a tar file")
    collect.add_argument("--run", help="number of the run")
    collect.add_argument("--output", help="name of the tar file")
    for parser in (up, render, doctor):
        launch.add_spec_options(parser)
    for parser in (up, status, logs, down, render, doctor, collect):
        launch.add_dry_run(parser)


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code. What follows ``--`` goes to what is run."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _carry_out(words)
        output.flush()
        return code
    except SystemExit:  # of argparse, which has told what is wrong, or printed the help
        output.flush_or_exit()
        raise
    except OSError as error:
        if (why := output.trouble(error)) is None:
            raise
        output.tell(f"magi: {why}")
        return 1


def _carry_out(words: list[str]) -> int:
    top = parser()
    words, behind = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    args, rest = top.parse_known_args(words)
    optional = OPTIONAL_WORDS.get(args.command)
    if optional and rest and not rest[0].startswith("-") and getattr(args, optional) is None:
        setattr(args, optional, rest.pop(0))
    if rest and "test" not in (args.command, getattr(args, "task", None)):
        hint = "; what is for the script goes behind --" if getattr(args, "script", None) else ""
        top.error(f"unknown arguments: {' '.join(rest)}{hint}")
    args.script_arguments, args.pytest_arguments = behind, [*rest, *behind]
    try:
        return args.function(args)
    except (UsageError, MagiError, ValueError) as error:
        output.tell(f"magi {args.command}: {error}")
        return 2
    except OSError as error:
        if error.filename is None:
            raise  # nothing that the user named
        output.tell(f"magi {args.command}: {error.filename} cannot be used ({error.strerror}).")
        return 1
    except KeyboardInterrupt:
        output.tell(f"\nmagi {args.command}: interrupted; nothing is left running.")
        return 130
