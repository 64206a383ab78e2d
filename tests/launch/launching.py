# SPDX-License-Identifier: Apache-2.0
"""Starting `magi` for the tests of this folder, and looking for processes that it left."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from magi_attention.testing.waiting import DEADLINE_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(Path(__file__).resolve().parent / "rank_script.py")


class Magi:
    """The command line with its sessions in ``home``, which every process that it starts has in its environment."""

    def __init__(self, home: Path):
        self.home = home
        self.environment = {**os.environ, "MAGI_HOME": str(home), "PYTHONPATH": str(ROOT)}

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "magi_attention.cli", *words]

    def __call__(self, *words: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            self.argv(*words), env=self.environment, capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT
        )

    def start(self, *words: str) -> subprocess.Popen:
        return subprocess.Popen(
            self.argv(*words),
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            # a shell that runs things in the background has them ignore Ctrl-C
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def folder(self, name: str, run: int = 1) -> Path:
        return self.home / "sessions" / name / "runs" / f"{run:03d}"

    def output(self, name: str, run: int = 1) -> str:
        path = self.folder(name, run) / "output.log"
        return path.read_text() if path.exists() else ""

    def wait_for(self, name: str, words: str, count: int = 1, run: int = 1) -> None:
        """Until ``words`` stand ``count`` times in the log."""
        wait_until(
            lambda: self.output(name, run).count(words) >= count,
            lambda: f"{count} times {words!r} in {self.output(name, run)}",
        )

    def status(self, name: str) -> dict:
        done = self("status", name, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)[0]


def wait_for_end(name: str) -> None:
    """Until no process of session ``name`` is left."""
    wait_until(lambda: not processes_of(name), lambda: f"the end of {processes_of(name)}")


def processes_of(name: str) -> list[str]:
    """Command lines of living processes that carry the mark of a run of session ``name``."""
    return list(processes_with(f"MAGI_RUN_ID={name}-").values())


def processes_with(variable: str) -> dict[int, str]:
    """Living processes whose environment holds ``variable``, without this one: numbers and command lines."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        try:
            environment = (folder / "environ").read_bytes()
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if variable.encode() in environment and words:
            found[int(folder.name)] = words
    return found


def stand_in(folder: Path, name: str, text: str) -> None:
    """A program ``name`` in Python for a PATH that starts with ``folder``. ``__file__`` in ``text`` is its path."""
    folder.mkdir(exist_ok=True)
    script = folder / f".{name}.py"
    script.write_text(text.replace("__file__", repr(str(folder / name))))
    words = shlex.join([sys.executable, str(script)])  # a path with a space cannot stand behind #!
    (folder / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    (folder / name).chmod(0o755)
