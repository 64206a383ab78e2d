# SPDX-License-Identifier: Apache-2.0
"""Standard output that cannot be written: a sentence and exit code 1, and nothing that runs is lost by it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from magi_attention.cli.common import table_text
from magi_attention.testing.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "tests" / "launch" / "rank_script.py")
FULL = Path("/dev/full")  # writing to it fails as on a full disk
COMMANDS = (["env"], ["env", "--json"], ["--help"], ["run", "--help"], ["status"], ["render", "local", "a"])


def magi(words, home, stdout, buffered=True) -> subprocess.CompletedProcess:
    environment = {**os.environ, "MAGI_HOME": str(home), "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONUNBUFFERED", None)
    if not buffered:
        environment["PYTHONUNBUFFERED"] = "1"
    argv = [sys.executable, "-m", "magi_attention.cli", *words]
    return subprocess.run(
        argv, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S, cwd=ROOT
    )


def check(done: subprocess.CompletedProcess, words: str) -> None:
    assert done.returncode == 1 and "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"magi: {words}"), done.stderr


@pytest.mark.parametrize("number, words", enumerate(COMMANDS), ids=str)
def test_output_that_cannot_be_written(number, words, tmp_path):
    """On a full disk and in a closed pipe; each command with a buffer in one of the two, and without in the other."""
    is_buffered = number % 2 == 0
    if FULL.exists():
        with FULL.open("w") as full:
            check(magi(words, tmp_path, full, is_buffered), "the output cannot be written (No space left on device)")
    read, write = os.pipe()
    os.close(read)
    try:
        check(magi(words, tmp_path, write, not is_buffered), "the reader of the output ended before it")
    finally:
        os.close(write)


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("buffered", [True, False])
def test_a_run_goes_on(buffered, tmp_path):
    """Its ranks end by themselves, and its log is whole."""
    with FULL.open("w") as full:
        done = magi(["run", SCRIPT, "--name", "one", "--no-preflight", "--", "hello"], tmp_path, full, buffered)
    check(done, "the output cannot be written")
    log = (tmp_path / "sessions" / "one" / "runs" / "001" / "output.log").read_text()
    assert "[rank 0]: rank 0 of 1 says hello" in log and "[rank 0]: rank 0 on stderr" in log
    status = subprocess.run(
        [sys.executable, "-m", "magi_attention.cli", "status", "one"],
        env={**os.environ, "MAGI_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, cwd=ROOT, timeout=DEADLINE_S,
    )  # fmt: skip
    assert "001 done" in status.stdout


def test_no_output_at_all(tmp_path):
    """Nobody asked for any, as with `>&-`."""
    line = f"{shlex.quote(sys.executable)} -m magi_attention.cli version >&-"
    done = subprocess.run(
        ["sh", "-c", line], env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert done.returncode == 0 and done.stderr == ""


def test_a_table_has_a_line_for_each_row_whatever_is_in_it():
    """Also where no terminal is as wide; ``[x]`` is no markup."""
    rows = [["name", *(f"column {n}" for n in range(40))]]
    rows += [[f"row {r} [x]", *(f"[{r}.{n}]" for n in range(40))] for r in range(3)]
    title, head, rule, *lines = table_text("A table [b]", rows).splitlines()
    assert title == "A table [b]" and head.split() == " ".join(rows[0]).split()
    assert [line.split() for line in lines] == [" ".join(row).split() for row in rows[1:]]
    assert table_text("", rows).splitlines() == [head, rule, *lines]
