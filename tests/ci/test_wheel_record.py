# SPDX-License-Identifier: Apache-2.0
"""The record of wheels that were built: a change that they see is built, and nothing else is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from record import INPUTS, Record

import build

ROOT = Path(__file__).resolve().parents[2]
KERNELS, COMM = "magi-attention-kernels-sm90-cu13", "magi-attention-comm-cu13"
NVCC = "nvcc: NVIDIA\nCuda compilation tools, release 13.0, V13.0.88\n"
# What a build imports and does not depend on: paths of the published package, variables that it does not read.
UNREAD = ("magi_attention/__init__.py", "magi_attention/compat/", "magi_attention/env/", "magi_attention/errors.py")
UNREAD += ("magi_attention/native/__init__.py",)


@pytest.fixture
def checkout(tmp_path):
    names = ["csrc/ffa/kernel.cu", "magi_attention/native/build.py", "docs/page.md", "tests/test_a.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path, names


def test_what_is_on_record(checkout):
    root, names = checkout
    path = root / "built.json"
    assert not Record(path, root, names).has(KERNELS, build.HERE, NVCC)
    Record(path, root, names).add(KERNELS, build.HERE, NVCC)
    assert Record(path, root, names).has(KERNELS, build.HERE, NVCC)
    assert not Record(path, root, names).has(COMM, build.HERE, NVCC)
    assert not Record(path, root, names).has(KERNELS, "riscv64", NVCC)
    assert not Record(path, root, names).has(KERNELS, build.HERE, NVCC.replace("13.0", "13.1"))
    for name in names:
        text = (root / name).read_text()
        (root / name).write_text("changed")
        is_seen = name.startswith(("csrc", "magi_attention"))
        assert Record(path, root, names).has(KERNELS, build.HERE, NVCC) == (not is_seen)
        (root / name).write_text(text)
    assert not Record(path, root, names[1:]).has(KERNELS, build.HERE, NVCC)  # a file that is gone
    assert Record(path, root, names).has(KERNELS, build.HERE, NVCC)


def test_the_inputs_are_what_builds_import():
    code = (
        "import sys; sys.path[:0] = ['wheels', 'ci']; import project\n"
        "for m in list(sys.modules.values()): print(getattr(m, '__file__', None) or '')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    ours = {Path(line).resolve() for line in done.stdout.split("\n") if line}
    names = {path.relative_to(ROOT).as_posix() for path in ours if path.is_relative_to(ROOT)}
    read = {name for name in names if name.startswith(("magi_attention/", "wheels/", "ci/"))}
    assert "magi_attention/native/build.py" in read and "wheels/project.py" in read
    assert sorted(n for n in read if not n.startswith((*INPUTS, *UNREAD, "ci/matrix.py"))) == []
    known = build.sources()
    assert [given for given in INPUTS if not any(name.startswith(given) for name in known)] == []
