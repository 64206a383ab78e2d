# SPDX-License-Identifier: Apache-2.0
"""How the doctor reads the machine that it is on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from magi_attention.native import install, loader, toolchain, wheels
from magi_attention.testing.waiting import DEADLINE_S
from magi_attention.tools.doctor import gpu_checks, library_checks
from magi_attention.tools.doctor.finding import ERROR
from magi_attention.tools.doctor.system import System

ROOT = Path(__file__).resolve().parents[2]


def test_peers_with_colours():
    assert gpu_checks.parse_peers("\x1b[4m\tGPU0\tGPU1\x1b[0m\nGPU0\tX\tCNS\nGPU1\tOK\tX\n") == {
        (0, 1): "CNS",
        (1, 0): "OK",
    }


def test_kernels_of_a_wheel_are_seen(tmp_path, monkeypatch):
    """The file lies in the folder of its wheel, not in that of the package; the loader says whether it is good."""
    monkeypatch.setattr(toolchain, "LIB", tmp_path / "lib")
    monkeypatch.setattr(loader, "why_absent", lambda name: "told by the loader")
    others = [entry for entry in sys.path if not Path(entry, wheels.NAMESPACE).exists()]  # no wheel that is installed
    monkeypatch.setattr(sys, "path", [str(tmp_path), *others])
    assert System().native_libraries()[toolchain.FFA_SM90] == (False, "told by the loader")
    folder = tmp_path / "magi_attention_kernels" / "sm90_cu13"
    folder.mkdir(parents=True)
    (folder / toolchain.library_file(toolchain.FFA_SM90)).touch()
    assert System().native_libraries()[toolchain.FFA_SM90] == (True, "told by the loader")


def put_placeholder(folder: Path, version: str = install.PLACEHOLDER) -> None:
    """What pip unpacks of the empty package that the public index has under our name."""
    info = folder / f"magi_attention-{version}.dist-info"
    info.mkdir(parents=True)
    (folder / "magi_attention").mkdir()
    (folder / "magi_attention" / "__init__.py").write_text(f'__version__ = "{version}"\n')
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: magi_attention\nVersion: {version}\n")
    names = ["magi_attention/__init__.py", f"{info.name}/METADATA", f"{info.name}/RECORD"]
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))


@pytest.mark.parametrize("version", ["0.0.1", "0.0.2"])
def test_the_empty_package_of_the_index_is_found(tmp_path, monkeypatch, version):
    put_placeholder(tmp_path, version)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert (version, str(tmp_path), True) in System().copies("magi_attention")
    finding = library_checks.check_package(System())
    assert finding.status == ERROR and f"magi_attention {version} in {tmp_path}" in finding.evidence


def test_an_import_names_the_empty_package(tmp_path):
    """Behind ours on the path, and then before it, where the extensions are what still can speak."""
    put_placeholder(tmp_path)

    def run(code: str, *folders: Path, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
        command = [sys.executable, *options, "-c", code]
        return subprocess.run(
            command, env=environment, cwd=tmp_path.parent, capture_output=True, text=True, timeout=DEADLINE_S
        )

    home = Path(toolchain.PACKAGE).parent
    done = run("import magi_attention.errors", home, tmp_path)
    assert done.returncode == 0 and f"magi_attention 0.0.1 in {tmp_path} is an empty package" in done.stderr
    assert "pip uninstall magi_attention" in done.stderr
    assert "empty package" not in run("import magi_attention.errors", home).stderr
    if not (ROOT / "extensions").is_dir():
        return  # an image has no extensions
    done = run("import magi_attn_extensions", tmp_path, ROOT / "extensions", options=("-S",))  # no editable install
    assert done.returncode == 1 and "it is the empty package 0.0.1 of the public index" in done.stderr
