# SPDX-License-Identifier: Apache-2.0
"""What was run with what: versions, git revision, image. For run.json and `magi collect-env`."""

from __future__ import annotations

import platform
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from magi_attention.version import __version__

PACKAGES = (
    *("torch", "numpy", "rich", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
    *("nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13"),
)


def output_of(argv: Sequence[str], timeout_s: float = 10, cwd: Path | None = None) -> str | None:
    """What a command prints, stripped; None if it fails or is not there."""
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, cwd=cwd
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def package_versions() -> dict[str, str]:
    """Installed ones of ``PACKAGES`` and this package."""
    found = {"magi_attention": __version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_revision(folder: Path) -> dict[str, Any] | None:
    """Commit of the checkout that holds ``folder`` and whether files differ from it; None outside of one."""
    commit = output_of(["git", "rev-parse", "HEAD"], cwd=folder)
    if not commit:
        return None
    changes = output_of(["git", "status", "--porcelain", "--untracked-files=no"], cwd=folder)
    return {"commit": commit, "has_changes": bool(changes)}


def facts(argv: Sequence[str]) -> dict[str, Any]:
    """Everything that run.json holds besides the run's own state."""
    return {
        "argv": list(argv),
        "folder": str(Path.cwd()),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": f"{platform.python_version()} ({sys.executable})",
        "versions": package_versions(),
        "git": git_revision(Path.cwd()),
        "package_git": git_revision(Path(__file__).resolve().parent),
    }
