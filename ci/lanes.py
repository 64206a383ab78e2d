# SPDX-License-Identifier: Apache-2.0
"""Runs one lane of the CI: makes its environment from locked files, then its steps. Workflows do nothing else.

    ci/lane                       the lanes
    ci/lane lint                  build/lanes/lint gets what ci/lock/lint.txt says, hashes checked, and the steps run
    ci/lane wheels --only NAME    arguments that are left go to the first step
    ci/lane lint --here           the same steps with this Python and what it has; nothing is installed
    ci/lane lint --dry-run        prints the commands

Every step runs, also after one that failed, so that one run shows every problem. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = "{python}"  # in a step: the interpreter of the lane's environment
MYPY = (PYTHON, "-m", "mypy")
OURS = (PYTHON, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--editable", ".")


@dataclass(frozen=True)
class Lane:
    """``lock`` of ci/lock; ``prepare`` must pass before ``steps`` begin. ``is_beside_system``: sees the torch that the
    machine has. A lane without a lock installs nothing."""

    text: str
    steps: tuple[tuple[str, ...], ...]
    lock: str = ""
    prepare: tuple[tuple[str, ...], ...] = ()
    is_beside_system: bool = False
    environment: dict[str, str] = field(default_factory=dict)


LANES = {
    "lint": Lane(
        "style, layers, sizes, ci/matrix.json, workflows",
        (
            (PYTHON, "-m", "ruff", "check", "."),
            (PYTHON, "ci/check_format.py"),
            (PYTHON, "ci/check_layers.py"),
            (PYTHON, "ci/check_sizes.py"),
            (PYTHON, "ci/matrix.py"),
            (PYTHON, "ci/check_workflows.py"),
        ),
        lock="lint",
    ),
    "type": Lane(
        "types, which the lane unit checks, too",
        (MYPY,),
        lock="test",
        prepare=(OURS,),
        environment={"MAGI_ATTENTION_PREBUILD_FFA": "0"},
    ),
    "unit": Lane(
        "the tests that need no GPU, and types, which need torch's",
        (("./magi", "test", "--suite", "cpu"), MYPY),
        lock="test",
        prepare=(OURS,),
        environment={"MAGI_ATTENTION_PREBUILD_FFA": "0"},
    ),
    "multinode": Lane(
        "the tests on two nodes of two ranks, as processes",
        (("./magi", "test", "--suite", "multinode"),),
        lock="test",
        prepare=(OURS,),
        environment={"MAGI_HOME": "build/launch", "MAGI_ATTENTION_PREBUILD_FFA": "0"},
    ),
    "integrations": Lane(
        "all tests with the packages of the frameworks, those for the night, too",
        (("ci/integrations", "tests/integrations"),),
        lock="test",
        prepare=(OURS,),
        environment={"MAGI_ATTENTION_PREBUILD_FFA": "0"},
    ),
    "transformers-457": Lane(
        "the tests of transformers with the oldest release that is taken",
        (("ci/transformers_457",),),
        lock="test",
        prepare=(OURS,),
        environment={"MAGI_ATTENTION_PREBUILD_FFA": "0"},
    ),
    "strangers": Lane(
        "programs of transformers and TRL, as they are, on one rank and on two",
        (("ci/strangers",),),
        lock="test",
        prepare=(OURS,),
        environment={"MAGI_ATTENTION_PREBUILD_FFA": "0"},
    ),
    "clusters": Lane(
        "the launcher with a real Slurm of two nodes, sshd and dockerd on this machine",
        (("ci/clusters",),),
        lock="test",
        prepare=(OURS,),
        environment={"MAGI_ATTENTION_PREBUILD_FFA": "0"},
    ),
    "site": Lane("the documentation site, without a warning", (("ci/site",),)),
    "wheels": Lane(
        "wheels in manylinux images by cibuildwheel, each held to ci/check_wheel.py",
        (("ci/build_wheels", "--engine", "cibuildwheel", "--out", "dist"),),
        lock="wheels",
    ),
    "image": Lane("the images of docker/", (("ci/image",),)),
    "gpu": Lane(
        "the GPU tests, with the machine's own torch",
        (("./magi", "test", "--suite", "gpu"),),
        lock="gpu",
        prepare=(OURS,),
        is_beside_system=True,
    ),
    "perf": Lane(
        "the GPU tests, then the kernel benchmark against the committed results",
        (("ci/gpu_regression",),),
        lock="gpu",
        prepare=(OURS,),
        is_beside_system=True,
    ),
}


def make_environment(name: str, lane: Lane, run) -> str:
    """The interpreter to use; ``run`` is called with each command and says whether it passed."""
    if not lane.lock:
        return sys.executable
    folder = ROOT / "build" / "lanes" / name
    python = str(folder / "bin" / "python")
    flags = ["--clear", *(["--system-site-packages"] if lane.is_beside_system else [])]
    install = ["--require-hashes", "--only-binary", ":all:", "-r", f"ci/lock/{lane.lock}.txt"]
    if not run([sys.executable, "-m", "venv", *flags, str(folder)]):
        raise SystemExit(f"ci/lane: {sys.executable} has no working venv; on Debian and Ubuntu install python3-venv.")
    if not run([python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *install]):
        raise SystemExit(
            f"ci/lane: ci/lock/{lane.lock}.txt could not be installed (pip's words are above). If a file has another "
            "hash than the lock, find out why before you run ci/make_locks; if none fits this Python, run it."
        )
    if lane.is_beside_system and not run([python, "-c", "import torch"]):
        raise SystemExit(
            f"ci/lane: {sys.executable} gives {name} no torch; name in MAGI_PYTHON the machine's own Python that has "
            "one. What a virtual environment has is not seen from another."
        )
    return python


def runner(environment: dict[str, str], is_dry: bool):
    """A function that runs one command in the repository and says whether it passed."""

    def run(command: Sequence[str]) -> bool:
        print(f"$ {shlex.join(command)}", flush=True)
        if is_dry:
            return True
        started = time.monotonic()
        program = command[0] if "/" not in command[0] or command[0].startswith("/") else str(ROOT / command[0])
        if not shutil.which(program):
            print(f"ci/lane: {command[0]} is not here or cannot be executed.", file=sys.stderr)
            return False
        code = subprocess.run([program, *command[1:]], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL).returncode
        print(f"= exit code {code} after {time.monotonic() - started:.0f} s", flush=True)
        return code == 0

    return run


def run_lane(name: str, extra: Sequence[str], is_dry: bool, is_here: bool = False) -> int:
    """0 if every step passed. ``is_here``: in the environment of this interpreter, as it is."""
    lane = LANES[name]
    if is_here:
        environment = dict(os.environ)
        return run_steps(name, extra, runner(environment, is_dry), sys.executable, environment)
    environment = {**os.environ, **lane.environment}
    # An option of the user's that sends packages elsewhere, or modules from there, would leave the lock without effect.
    for key in ("PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PYTHONPATH"):
        environment.pop(key, None)
    run = runner(environment, is_dry)
    python = make_environment(name, lane, run)
    for step in lane.prepare:
        if not run(fill(step, python)):
            print(f"ci/lane: {name} could not be prepared; the reason is above.", file=sys.stderr)
            return 1
    return run_steps(name, extra, run, python, environment)


def fill(step: Sequence[str], python: str) -> list[str]:
    return [python if word == PYTHON else word for word in step]


def run_steps(name: str, extra: Sequence[str], run, python: str, environment: dict[str, str]) -> int:
    environment["MAGI_PYTHON"] = python  # that of ./magi and of the programs of ci/
    steps = [fill(step, python) for step in LANES[name].steps]
    steps[0] += extra
    if failed := [step for step in steps if not run(step)]:
        print(f"ci/lane: {name} failed: {'; '.join(map(shlex.join, failed))}", file=sys.stderr)
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ci/lane", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("name", nargs="?", metavar="LANE", choices=LANES, help=", ".join(LANES))
    parser.add_argument("--here", action="store_true", help="with this Python and what it has")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    options, extra = parser.parse_known_args(arguments)
    if options.name is None:
        for name, lane in LANES.items():
            print(f"  {name:10} {lane.text}")
        return 0
    return run_lane(options.name, extra, options.dry_run, options.here)


if __name__ == "__main__":
    sys.exit(main())
