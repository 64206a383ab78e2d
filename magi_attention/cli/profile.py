# SPDX-License-Identifier: Apache-2.0
"""`magi profile`: some training steps under torch's profiler on every rank, then pictures and a page."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from magi_attention.cli import launch
from magi_attention.cli.common import (
    UsageError,
    add_script_command,
    make_folder,
    need_matplotlib,
    show_table,
    source_file,
    token_count,
)

FOLDER = "runs/profile"
MODULE = "magi_attention.tools.profiling.record"
_EXAMPLE = {"ranks": None, "seq_len": 8192, "device": "auto", "degree": 1}  # options of the example, with defaults


def add_profile(commands: argparse._SubParsersAction) -> None:
    text = "where the time of a training step goes, on every rank"
    parser = add_script_command(commands, "profile", text, command_profile)
    parser.add_argument("--out", help=f"folder for traces, pictures and page; {FOLDER} without it")
    parser.add_argument("--skip", type=int, default=2, help="optimizer steps before the profiled ones; 2 without it")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps that are profiled; 2 without it")
    parser.add_argument("--whole", action="store_true", help="profile all of a script that has no optimizer")
    parser.add_argument("--nvtx", action="store_true", help="NVTX ranges for nsys in place of traces")
    parser.add_argument("--read", metavar="FOLDER", help="make the page of traces that are there, and run nothing")
    parser.add_argument("--json", action="store_true", help="with --read: print summary.json in place of the table")
    parser.add_argument("--ranks", type=int, help="of the example; 2 on the CPU, all GPUs up to 4")
    tokens = "of the example: tokens of a step"
    parser.add_argument("--seq-len", type=token_count, default=_EXAMPLE["seq_len"], help=tokens)
    parser.add_argument("--degree", type=int, default=_EXAMPLE["degree"], help="of the example: overlap stages")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of the example")
    parser.add_argument("--session", help="launch it in this session")
    launch.add_dry_run(parser)
    launch.add_spec_options(parser)


def command_profile(args: argparse.Namespace) -> int:
    if args.read:
        return read(args)
    if args.json:
        raise UsageError("--json goes with --read, because ranks print, too; a run leaves summary.json in its folder.")
    for name in ("skip", "steps"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} is {getattr(args, name)}; give at least 1.")
    if not args.nvtx:
        need_matplotlib()
    folder = Path(args.out or FOLDER)
    if list(folder.glob("rank*.trace.json")):
        raise UsageError(f"{folder} already holds traces; choose another folder with --out, or remove it.")
    script, arguments = own_script(args) if args.script else example(args, folder)
    command = ["-m", MODULE, "--out", str(folder.resolve()), "--skip", str(args.skip), "--steps", str(args.steps)]
    command += [f"--{name}" for name in ("whole", "nvtx") if getattr(args, name)]
    if not args.dry_run:
        make_folder(folder, "--out")
    code = launch.launch(args, [*command, script, *arguments], "profile")
    if code or args.dry_run or args.nvtx:
        return code
    return report(folder, as_json=False)


def own_script(args: argparse.Namespace) -> tuple[str, list[str]]:
    if given := [name for name, default in _EXAMPLE.items() if getattr(args, name) != default]:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"{options}: for the built-in example alone; options of a script come behind --.")
    if not Path(args.script).is_file():
        raise UsageError(f"{args.script} is not there; name the script to profile.")
    return args.script, args.script_arguments


def example(args: argparse.Namespace, folder: Path) -> tuple[str, list[str]]:
    """`examples/llama/train.py` for just as many steps; also chooses the ranks."""
    from magi_attention.cli.run import choose_device

    if args.script_arguments:
        raise UsageError("Arguments behind -- belong to a script; name it, as in `magi profile train.py -- ...`.")
    if args.ranks is not None and args.ranks < 1:
        raise UsageError(f"--ranks is {args.ranks}; give at least 1.")
    device, ranks = choose_device(args.device, args.ranks)
    if not args.session and args.ranks_per_node is None:
        args.ranks_per_node = 2 if device == "cpu" and args.ranks is None else ranks
    options = {"out": folder.resolve() / "run", "steps": args.skip + args.steps + 1, "device": device}
    for name in ("seq_len", "degree"):
        options[name.replace("_", "-")] = getattr(args, name)
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    return str(source_file("examples", "llama", "train.py")), words


def read(args: argparse.Namespace) -> int:
    if args.script or launch.launch_options_given(args) or args.nvtx or args.whole or args.out:
        raise UsageError("--read makes a page of traces that are there and runs nothing; leave the other options out.")
    folder = Path(args.read)
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder; name the one that holds the traces.")
    need_matplotlib()
    return report(make_folder(folder, "--read"), args.json)


def report(folder: Path, as_json: bool) -> int:
    """Writes the page and prints the table, or the summary."""
    from magi_attention.tools.profiling import page

    profiles = page.read_folder(folder)
    result = page.write_report(folder, profiles)
    if as_json:
        print(json.dumps(result, indent=1))
        return 0
    show_table("Milliseconds of a step", page.lanes_table(result["ranks"]))
    if result["missing_ranks"]:
        ranks = ", ".join(map(str, result["missing_ranks"]))
        print(f"The traces of ranks {ranks} are not in {folder}: they wrote on other machines. Copy them here, then")
        print(f"  magi profile --read {folder}")
    print(f"Pictures, traces and page: {folder / 'report.html'}")
    return 0
