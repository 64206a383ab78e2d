# SPDX-License-Identifier: Apache-2.0
"""What the commands share: errors, tables, child processes."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from magi_attention.env import launch as env
from magi_attention.native import install

ROOT = Path(__file__).resolve().parents[2]  # what Python imports the package from


class UsageError(Exception):
    """The request was wrong; the text is a sentence that says what to do."""


def token_count(text: str) -> int:
    """A number of tokens as an option of the command line: 8192, 8K or 1M, where K is 1,024 and M 1,048,576."""
    found = re.fullmatch(r"([+-]?\d+)([KM]?)", text.strip(), re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens; give 8192, 8K (8,192) or 1M (1,048,576)")
    return int(found[1]) * {"": 1, "K": 2**10, "M": 2**20}[found[2].upper()]


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def sources() -> Path:
    """The folder of examples, tests and benchmarks: that of the checkout, or the one that MAGI_SOURCES names."""
    return Path(env.sources()).resolve() if env.sources() else ROOT


def source_file(*parts: str) -> Path:
    path = sources().joinpath(*parts)
    if not path.exists() and env.sources():
        raise UsageError(f"MAGI_SOURCES is {env.sources()}, and there is no {'/'.join(parts)} in it; correct it.")
    if not path.exists():
        raise UsageError(
            f"{'/'.join(parts)} is not beside the package: this command needs the repository, not only the "
            "installed package. Clone it and start ./magi there."
        )
    return path


def make_folder(name: str | Path, option: str) -> Path:
    """The folder with that name, made and tried before any work; ``option`` is where the user named it."""
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"Files cannot be written to {folder} ({error.strerror}); choose another folder with {option}."
        ) from None
    return folder


def add_script_command(
    commands: argparse._SubParsersAction, name: str, text: str, function: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """A command that runs an example, or the script behind its name."""
    usage = f"magi {name} [options]   or   magi {name} [options] SCRIPT [-- ARGUMENTS]"
    parser = commands.add_parser(name, help=text, usage=usage)
    parser.set_defaults(function=function)
    parser.add_argument("script", nargs="?", help="started by torchrun on every rank; the example without it")
    return parser


def need_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"The pictures need matplotlib; run `{install.needs('report')}`.")


def table_text(title: str, rows: Sequence[Sequence[str]], wraps: bool = False) -> str:
    """``rows``, the first of which is the header, under ``title`` if it has one; no line break at the end. With
    ``wraps`` cells are broken where the terminal is too narrow, 80 columns where there is none."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    head, *body = rows
    table = Table(title=title or None, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=index == 0 or not wraps)
    for row in body:
        table.add_row(*row)
    console = Console(width=None if wraps else 10_000, markup=False)
    with console.capture() as text:  # why not printed by it: it ends the program in silence where a pipe is closed
        console.print(table)
    lines = (line.rstrip() for line in text.get().splitlines())
    return "\n".join(line for line in lines if line)


def show_table(title: str, rows: Sequence[Sequence[str]]) -> None:
    """Prints ``table_text``, no wider than the terminal, and an empty line."""
    print(table_text(title, rows, wraps=True), end="\n\n")


def run_child(command: list[str], environment: dict[str, str], log: Path | None = None) -> int:
    """Runs a command to its end and returns its code. Ctrl-C or SIGTERM here ends it and its children too.

    With ``log`` its standard error goes to that file and it gets no standard input; without, it shares both.
    """

    def stop(signum, frame):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    stderr = log.open("wb") if log else None
    # In a session of its own Ctrl-C reaches only this process, which then stops the child in good order.
    child = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL if log else None,
        stderr=stderr,
        start_new_session=log is not None,
    )
    try:
        return child.wait()
    except KeyboardInterrupt:
        child.terminate()  # torchrun passes it on to its ranks
        try:
            child.wait(timeout=30)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            child.kill()
            child.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
        if stderr:
            stderr.close()


def torchrun(ranks: int) -> list[str]:
    """torchrun on this machine, for Python. The ranks meet at the loopback address: torchrun would look the host's name
    up, which waits for ever where there is no network."""
    words = ["-m", "magi_attention.tools.launch.torchrun", "--standalone", "--local-addr", "127.0.0.1"]
    return [*words, "--nproc-per-node", str(ranks)]


def child_environment(threads: int) -> dict[str, str]:
    paths = [str(ROOT)] + [p for p in [os.environ.get("PYTHONPATH")] if p]
    own = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(threads)}
    # Threads that spin while they wait make a busy machine several times slower.
    return {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **own}
