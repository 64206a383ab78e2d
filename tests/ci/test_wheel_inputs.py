# SPDX-License-Identifier: Apache-2.0
"""What wheels of a release are built and tried with can be installed together."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from small_wheels import write_wheel

from magi_attention.testing.waiting import DEADLINE_S

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


import index
import matrix

ROOT = Path(__file__).resolve().parents[2]


def pins(path: Path) -> dict[str, str]:
    """Version by name of the lines NAME==VERSION, of a lock with hashes as well."""
    lines = re.findall(r"^([\w.-]+)(?:\[\w+\])?==([\w.]+)", path.read_text(), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in lines}


def test_the_triton_beside_torch_is_torchs():
    """torch pins it, and the resolved lock of the tests holds what the pinned torch asks for."""
    tools, lock = pins(ROOT / "wheels" / "fa4_tools.txt"), pins(ROOT / "ci" / "lock" / "test.txt")
    assert tools["torch"] == lock["torch"] == matrix.load()["torch"]["development"]
    assert tools["triton"] == lock["triton"]


def test_the_main_wheel_is_tried_beside_torch(tmp_path):
    """What cibuildwheel runs before the test, under the constraints of the build, with PyTorch's index as it is: it has
    torch and an older setuptools than the one of the constraints."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    constraints = ROOT / settings["environment"]["PIP_CONSTRAINT"].removeprefix("/project/")
    wanted = pins(constraints)["setuptools"]
    write_wheel(tmp_path / "torchs", "torch", "2.13.0", metadata="Requires-Dist: setuptools>=77.0.3\n")
    write_wheel(tmp_path / "torchs", "setuptools", "78.1.0")
    write_wheel(tmp_path / "public", "setuptools", wanted)
    for name in ("torchs", "public"):
        index.write(tmp_path / name, tmp_path / f"{name}_index")
    if not find_spec("pip"):
        pytest.skip("This Python has no pip.")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(tmp_path / "venv" / "bin" / "python")]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "PYTHON"))}
    own = {"PIP_INDEX_URL": (tmp_path / "public_index").as_uri(), "PIP_CONFIG_FILE": os.devnull}
    shutil.copy(constraints, tmp_path / "constraints.txt")  # pip takes a path with a space for two
    environment = {**kept, **own, "PIP_CONSTRAINT": str(tmp_path / "constraints.txt")}
    for line in settings["before-test"]:
        words = shlex.split(re.sub(r"https://download\.pytorch\.org\S*", (tmp_path / "torchs_index").as_uri(), line))
        assert words[0] == "pip"
        done = subprocess.run([*pip, *words[1:]], env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
        assert done.returncode == 0, done.stderr
    site = [path.name for path in (tmp_path / "venv").glob("lib/python*/site-packages/*.dist-info")]
    assert {"torch-2.13.0.dist-info", f"setuptools-{wanted}.dist-info"} <= set(site)
