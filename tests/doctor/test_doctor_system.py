# SPDX-License-Identifier: Apache-2.0
"""How the doctor reads the machine that it is on."""

from __future__ import annotations

import sys
from pathlib import Path

from magi_attention.doctor import gpu_checks
from magi_attention.doctor.system import System
from magi_attention.native import loader, toolchain, wheels


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
