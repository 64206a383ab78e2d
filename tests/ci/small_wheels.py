# SPDX-License-Identifier: Apache-2.0
"""Wheels that pip can install, of a few lines. A checkout of a test may take this file along."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path


def write_wheel(folder, name: str, version: str, files: Mapping[str, str] | None = None, metadata: str = "") -> Path:
    """A wheel for any Python with these files; ``metadata`` are further lines of METADATA."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    info, tag = f"{name}-{version}.dist-info", "py3-none-any"
    files = {
        **(files or {}),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name.replace('_', '.')}\nVersion: {version}\n{metadata}",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    record = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record.append(f"{path},sha256={digest},{len(text.encode())}\n")
    made = Path(folder, f"{name}-{version}-{tag}.whl")
    with zipfile.ZipFile(made, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": "".join([*record, f"{info}/RECORD,,\n"])}.items():
            archive.writestr(path, text)
    return made
