# SPDX-License-Identifier: Apache-2.0
"""The launcher `./magi`, as far as it can be tested without installing anything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from magi_attention.testing.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]


def start(*arguments: str, root: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(root / "magi"), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def copy_of_the_launcher(tmp_path: Path) -> Path:
    for name in ("magi", "pyproject.toml", "setup.py", "ci/constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_magi_python_skips_the_bootstrap(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "magi"), "version"],
        env={**os.environ, "MAGI_PYTHON": sys.executable},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0 and done.stdout.startswith("magi_attention 1."), done.stderr


def test_magi_python_that_does_not_exist():
    done = start("version", MAGI_PYTHON="/no/such/python")
    assert done.returncode == 1 and "MAGI_PYTHON is '/no/such/python'" in done.stderr


def test_a_foreign_venv_is_left_alone(tmp_path):
    root = copy_of_the_launcher(tmp_path)
    (root / ".venv").mkdir()
    (root / ".venv" / "mine.txt").write_text("keep")
    done = start("version", root=root, MAGI_PYTHON="")
    assert done.returncode == 1 and "was not made by ./magi" in done.stderr
    assert (root / ".venv" / "mine.txt").read_text() == "keep"


def test_pip_failure_is_a_sentence_and_the_half_made_venv_goes(tmp_path):
    root = copy_of_the_launcher(tmp_path)
    (root / "ci" / "constraints.txt").write_text("this is no requirement ~~\n")
    done = start("version", root=root, MAGI_PYTHON="", PIP_NO_INDEX="1")
    assert done.returncode == 1 and "pip could not install" in done.stderr
    assert not (root / ".venv" / "magi-ready.json").exists() and (root / ".venv" / "bin").exists()
    # The second start finds what the first left behind. Its Python has a venv module that does not work.
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "venv.py").write_text("raise SystemExit('there is no ensurepip')")
    done = start("version", root=root, MAGI_PYTHON="", PYTHONPATH=str(tmp_path / "broken"))
    assert done.returncode == 1 and "half-made" in done.stderr and not (root / ".venv" / "bin").exists()
    assert "there is no ensurepip" in done.stderr and "Python's venv module did not work" in done.stderr


def test_readme_names_commands_that_exist():
    text = (ROOT / "README.md").read_text()
    commands = {line.split()[1] for line in text.splitlines() if line.startswith("./magi ")}
    assert {"run", "test"} <= commands
    for command in sorted(commands):
        done = start(command, "--help", MAGI_PYTHON=sys.executable)
        assert done.returncode == 0, f"./magi {command} --help: {done.stderr}"
