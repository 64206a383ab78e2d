# SPDX-License-Identifier: Apache-2.0
"""A library that was cut off or damaged is told in a sentence, and never loaded, which would end the process."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from magi_attention.errors import UnsupportedError
from magi_attention.native import loader, toolchain
from magi_attention.native.intact import sealed, why_damaged

LIBRARIES = {"planner": loader.load, "host": loader.load_host}


def damaged(data: bytes) -> dict[str, bytes]:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    found = {"empty": b"", "text": b"not a library\n"}
    found |= {f"the first {n} bytes": data[:n] for n in (4, 63, 64, *(rng.randrange(65, len(data)) for _ in range(20)))}
    for _ in range(10):
        start = rng.randrange(4, len(data) - 64)
        end = rng.randrange(start + 32, len(data))
        if any(data[start:end]):
            found[f"zeros from {start} to {end}"] = data[:start] + bytes(end - start) + data[end:]
    return found


@pytest.mark.parametrize("name", LIBRARIES)
def test_what_is_wrong_is_said(name: str, tmp_path: Path) -> None:
    source = toolchain.LIB / toolchain.library_file(name)
    assert why_damaged(source) is None
    path = tmp_path / source.name
    for what, data in damaged(source.read_bytes()).items():
        path.write_bytes(data)
        load = LIBRARIES[name]
        with pytest.raises(UnsupportedError, match="is (cut off|damaged|empty|no library).*--force-reinstall"):
            load(tmp_path) if name == "host" else load(name, tmp_path, is_kept=False)
        loader._load_host.cache_clear()
        assert why_damaged(path), what


def test_a_library_without_a_seal_is_judged_by_its_sections(tmp_path: Path) -> None:
    """As one that a distribution has stripped."""
    path = tmp_path / "libmagi_planner.so"
    shutil.copyfile(toolchain.LIB / path.name, path)
    if strip := shutil.which("strip"):
        subprocess.run([strip, str(path)], check=True)
    else:
        path.write_bytes(path.read_bytes()[: -len(sealed(b""))])
    assert why_damaged(path) is None
    loader.load("planner", tmp_path, is_kept=False)
    path.write_bytes(path.read_bytes()[:-1])
    assert why_damaged(path) == "is cut off"


def test_the_doctor_survives(tmp_path: Path) -> None:
    """It is who runs when a library is damaged, so it says so and goes on."""
    package = tmp_path / "magi_attention"
    shutil.copytree(toolchain.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    path = package / "lib" / "libmagi_planner.so"
    path.write_bytes(path.read_bytes()[:100_000])
    command = [sys.executable, "-m", "magi_attention.cli", "doctor"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode >= 0 and "is cut off" in " ".join(done.stdout.split()), (done.stdout, done.stderr)
