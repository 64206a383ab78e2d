# SPDX-License-Identifier: Apache-2.0
"""The distribution: its version, what its wheel has in it, and the code of its page."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import magi_attention
import magi_attn_extensions
from magi_attention.testing.spawn import run_processes
from magi_attention.testing.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
EXTENSIONS = ROOT / "extensions"


def test_the_version_is_that_of_the_package():
    assert magi_attn_extensions.__version__ == magi_attention.__version__


def run_page(rank: int, world: int) -> tuple:
    text = (EXTENSIONS / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    space: dict = {}
    for block in blocks:
        exec(compile(block, "extensions/README.md", "exec"), space)
    return len(blocks), tuple(space["out"].shape), tuple(space["sink"].grad.shape)


def test_the_code_of_the_page_runs_on_two_ranks():
    assert run_processes(2, run_page) == [(3, (256, 8, 16), (1, 8))] * 2


def test_the_wheel_has_every_module(tmp_path):
    # why no import: setuptools refuses to be imported where something has imported distutils before
    found = {d.metadata["Name"]: d.version for d in metadata.distributions()}.get("setuptools", "0")
    if int(found.split(".")[0]) < 77:
        pytest.skip(f"setuptools {found} does not build this wheel; install 77 or later.")
    source = tmp_path / "source"
    for path in EXTENSIONS.rglob("*"):
        parts = path.relative_to(EXTENSIONS).parts
        if path.is_file() and path.suffix in {".py", ".toml", ".md", ""} and parts[0] not in ("build", "dist"):
            (source / path.relative_to(EXTENSIONS)).parent.mkdir(parents=True, exist_ok=True)
            (source / path.relative_to(EXTENSIONS)).write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path]
    done = subprocess.run([*command, source], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"magi_attn_extensions-{magi_attention.__version__}-py3-none-any.whl"
    modules = {p.relative_to(EXTENSIONS).as_posix() for p in (EXTENSIONS / "magi_attn_extensions").rglob("*.py")}
    assert modules == {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
