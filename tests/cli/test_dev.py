# SPDX-License-Identifier: Apache-2.0
"""`magi dev`: which tests a change asks for, and the hooks of pre-commit."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from magi_attention.cli import dev, main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with a branch: one file changed in a commit, one since, one unknown to git, one deleted."""
    if not shutil.which("git"):
        pytest.skip("There is no git.")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    for name in ("tests/a/test_a.py", "tests/b/test_b.py", "tests/d/test_d.py", "magi_attention/b/b.py", "old.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    git("init", "-b", "main")
    git("add", "-A")
    git("commit", "-m", "1")
    git("checkout", "-b", "mine")
    (tmp_path / "magi_attention/b/b.py").write_text("2\n")
    git("commit", "-am", "2")
    (tmp_path / "tests/a/test_a.py").write_text("2\n")
    (tmp_path / "tests/d/test_new.py").write_text("2\n")
    (tmp_path / "old.md").unlink()
    monkeypatch.setenv("MAGI_SOURCES", str(tmp_path))
    return tmp_path


def test_changes_since_the_branch_began_or_another_state(checkout, capfd):
    assert dev.changed_files(None) == ["magi_attention/b/b.py", "tests/a/test_a.py", "tests/d/test_new.py"]
    assert dev.changed_files("HEAD") == ["tests/a/test_a.py", "tests/d/test_new.py"]
    assert main(["dev", "test", "--dry-run"]) == 0
    printed = capfd.readouterr().out.splitlines()
    assert printed[-1].endswith("tests/a/test_a.py tests/b tests/d/test_new.py") and " -m pytest " in printed[-1]
    assert main(["dev", "test", "--since", "no-such-branch"]) == 2
    assert "git cannot say what has changed" in capfd.readouterr().err


def test_arguments_go_to_pytest(capfd):
    assert main(["dev", "test", "--dry-run", "tests/cli", "-k", "dev"]) == 0
    assert capfd.readouterr().out.strip().endswith("tests/cli -k dev")
    assert main(["dev", "test", "--since", "HEAD", "tests/cli"]) == 2
    assert "--since chooses the tests" in capfd.readouterr().err
