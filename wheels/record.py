# SPDX-License-Identifier: Apache-2.0
"""A committed record of the kernel and comm wheels that were built and checked: which sources they were built from.

``wheels/build.py --record FILE`` leaves out a wheel whose sources and compiler are those of the record, and writes what
it built and found good. So a change that no kernel sees does not wait for nvcc, and one that a kernel sees does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

# What a wheel with device code is made of. A test holds the list to what the builds import.
INPUTS = (
    *("csrc/", "wheels/", "ci/matrix.json", "magi_attention/native/compile/", "magi_attention/version.py"),
    *(f"magi_attention/native/{name}.py" for name in ("abi", "build", "c_struct", "families", "info", "install")),
    *(f"magi_attention/native/{name}.py" for name in ("intact", "toolchain", "wheels")),
    "magi_attention/env/build.py",
)


class Record:
    """What ``path`` says. ``{}`` where there is no such file: everything is built then."""

    def __init__(self, path: Path, root: Path, names: Sequence[str]):
        self.path, self.used = path, False  # used: something was left out for it
        self._built: dict[str, dict[str, str]] = json.loads(path.read_text()) if path.exists() else {}
        digest = hashlib.sha256()
        for name in sorted(names):
            if name.startswith(INPUTS):
                digest.update(name.encode() + b"\0" + (root / name).read_bytes() + b"\0")
        self._sources = digest.hexdigest()[:16]

    def has(self, wheel: str, machine: str, nvcc: str) -> bool:
        """Was this wheel built from the sources of today by an nvcc of that version text?"""
        is_built = self._built.get(f"{wheel} {machine}") == self._row(nvcc)
        self.used = self.used or is_built
        return is_built

    def add(self, wheel: str, machine: str, nvcc: str) -> None:
        self._built[f"{wheel} {machine}"] = self._row(nvcc)
        self.path.write_text(json.dumps(dict(sorted(self._built.items())), indent=1) + "\n")

    def _row(self, nvcc: str) -> dict[str, str]:
        release = next((line.strip() for line in nvcc.splitlines() if "release" in line), "")
        return {"sources": self._sources, "nvcc": release}
