# SPDX-License-Identifier: Apache-2.0
"""ci/lane: what each lane runs, that it installs nothing without a hash, and what it says when something fails."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import lanes
import make_locks
import pytest
from small_wheels import write_wheel

ROOT = Path(__file__).resolve().parents[2]


def lane(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "MAGI_PYTHON": sys.executable}
    return subprocess.run([str(ROOT / "ci" / "lane"), *arguments], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("name", lanes.LANES)
def test_commands(name, capsys):
    assert lanes.main([name, "--dry-run", "--more"]) == 0
    lines = capsys.readouterr().out.splitlines()
    installs = [line for line in lines if " pip install " in line]
    assert all(("--require-hashes" in line) != ("--no-deps --no-build-isolation" in line) for line in installs)
    has_lock = bool(lanes.LANES[name].lock)
    assert any(f"-r ci/lock/{lanes.LANES[name].lock}.txt" in line for line in installs) == has_lock
    steps = lines[-len(lanes.LANES[name].steps) :]
    assert [line.endswith(" --more") for line in steps] == [True] + [False] * (len(steps) - 1)
    python = str(ROOT / "build" / "lanes" / name / "bin" / "python") if has_lock else sys.executable
    assert all(word == python for line in steps for word in line.split() if word.endswith("/python"))
    assert not any(lanes.PYTHON in line for line in lines)


@pytest.mark.parametrize("name", lanes.LANES)
def test_what_lanes_name_is_here(name):
    row = lanes.LANES[name]
    assert not row.lock or row.lock in make_locks.LOCKS
    for word in (word for step in (*row.prepare, *row.steps) for word in step):
        if word == "ci/image" and not (ROOT / "docker").is_dir():
            continue  # both come together
        if word.startswith(("ci/", "./")):
            assert (ROOT / word).is_file(), word


def a_lane(monkeypatch, *steps: tuple[str, ...], **more) -> None:
    monkeypatch.setitem(lanes.LANES, "lint", lanes.Lane("made up", steps, **more))


def test_later_steps_run_and_failures_are_named(monkeypatch, capfd):
    fails, passes = ("false",), (lanes.PYTHON, "-c", "import os; print('here', os.environ['MAGI_PYTHON'])")
    a_lane(monkeypatch, fails, ("ci/none",), passes)
    assert lanes.main(["lint"]) == 1
    out, err = capfd.readouterr()
    assert f"here {sys.executable}\n" in out
    assert "ci/none is not here or cannot be executed" in err and "ci/lane: lint failed: false; ci/none\n" in err
    a_lane(monkeypatch, passes)
    assert lanes.main(["lint"]) == 0


def with_python_as_it_is(monkeypatch) -> None:
    """The environment that a lane has made is not made anew, which takes seconds."""
    real = subprocess.run

    def run(command, **options):
        is_venv = [*command[1:3]] == ["-m", "venv"]
        return subprocess.CompletedProcess(command, 0) if is_venv else real(command, **options)

    monkeypatch.setattr(lanes.subprocess, "run", run)


@pytest.mark.nightly
def test_a_file_with_another_hash_is_refused(monkeypatch, tmp_path, capfd):
    wheel = write_wheel(tmp_path, "magi_lane_test", "1.0")
    (tmp_path / "ci" / "lock").mkdir(parents=True)
    monkeypatch.setattr(lanes, "ROOT", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    a_lane(monkeypatch, ("echo", "ran"), lock="lint")
    lock = tmp_path / "ci" / "lock" / "lint.txt"
    lock.write_text(f"magi-lane-test==1.0 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(SystemExit, match="find out why before you run ci/make_locks"):
        lanes.main(["lint"])
    lock.write_text(f"magi-lane-test==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    with_python_as_it_is(monkeypatch)
    assert lanes.main(["lint"]) == 0
    assert "\nran\n" in capfd.readouterr().out


def test_a_gpu_lane_needs_the_torch_of_the_machine():
    ran = []

    def run(command) -> bool:
        ran.append(list(command))
        return "import torch" not in command

    with pytest.raises(SystemExit, match="no torch; name in MAGI_PYTHON"):
        lanes.make_environment("gpu", lanes.LANES["gpu"], run)
    assert "--system-site-packages" in ran[0] and ran[-1][1:] == ["-c", "import torch"]
    lanes.make_environment("unit", lanes.LANES["unit"], run)
    assert "--system-site-packages" not in ran[3]


def test_lint_is_part_of_the_one_entry():
    entry = (ROOT / ".ci" / "run").read_text()
    assert "ci/lane lint --here\n" in entry and "ci/lane type --here\n" in entry
    rules = {word for step in lanes.LANES["lint"].steps for word in step}
    assert {"ci/check_layers.py", "ci/check_sizes.py", "ci/check_workflows.py"} <= rules
    assert lanes.MYPY in lanes.LANES["unit"].steps


@pytest.mark.parametrize("name", ["lint", "type"])
def test_here_means_this_python_and_no_install(name):
    """And `magi dev` runs it so."""
    expected = [shlex.join(lanes.fill(step, sys.executable)) for step in lanes.LANES[name].steps]
    assert lane(name, "--here", "--dry-run").stdout.splitlines() == [f"$ {line}" for line in expected]
    command = [sys.executable, "-m", "magi_attention.cli", "dev", name, "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.stdout.splitlines() == [f"$ {line}" for line in expected], done.stderr
