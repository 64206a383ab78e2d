# SPDX-License-Identifier: Apache-2.0
"""The JSON file that a benchmark writes: where it ran, with which settings, and what it measured."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peers import installed_peers

from magi_attention.cli.common import num_cores
from magi_attention.native.info import read_info
from magi_attention.native.loader import find
from magi_attention.native.toolchain import PLANNER
from magi_attention.tools.launch.provenance import output_of

ROOT = Path(__file__).resolve().parents[1]


def described(checkout: Path) -> str | None:
    """Its commit, ``-dirty`` with changes; None if it is no checkout of git."""
    return output_of(["git", "-C", str(checkout), "describe", "--always", "--dirty"]) or None


def commit() -> str | None:
    """The commit of this checkout; or of what the installed libraries were built from; None if neither is known."""
    if found := described(ROOT):
        return found
    library = find(PLANNER)
    record = read_info(library) if library else None
    return record.revision or None if record else None


def cpu_model() -> str:
    """Its name and the cores that this process may use."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    name = next((text.partition(":")[2].strip() for text in lines if text.startswith("model name")), platform.machine())
    return f"{name}, {num_cores()} cores"


def environment() -> dict[str, Any]:
    """Machine, versions and commit, so that a number can be traced."""
    found = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "host": platform.platform(),
        "cpu": cpu_model(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "peers": installed_peers(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "sms": properties.multi_processor_count, "memory": properties.total_memory}
        found["cudnn"] = torch.backends.cudnn.version()
        fields = "driver_version,power.limit,clocks.max.sm"
        query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-i", "0"]
        found["nvidia_smi"] = output_of(query, timeout_s=20)
    return found


def plain_settings(options: argparse.Namespace, left_out: Sequence[str] = ()) -> dict[str, Any]:
    """All options but ``out`` and those of ``left_out``."""
    return {name: value for name, value in vars(options).items() if name not in {"out", *left_out}}


def record_text(data: dict[str, Any]) -> str:
    """``data`` as JSON: an entry a line, and of an entry that is a list of rows each row a line, so that a new
    measurement is a diff of the rows that it measured."""
    entries = []
    for name, value in data.items():
        text = json.dumps(value)
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        entries.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def write_results(
    out: Path, settings: dict[str, Any] | list[dict[str, Any]], machine: dict[str, Any] | None = None, **measured: Any
) -> dict[str, Any]:
    """Writes OUT.json (OUT may end so already), makes its folder and returns what is in the file.

    ``machine``: what ``environment`` gave, which is asked now if None. ``measured``: the entries beside it and the
    settings.
    """
    data = {"environment": machine or environment(), "settings": settings, **measured}
    out.parent.mkdir(parents=True, exist_ok=True)
    file = out if out.suffix == ".json" else Path(f"{out}.json")
    file.write_text(record_text(data))
    return data
