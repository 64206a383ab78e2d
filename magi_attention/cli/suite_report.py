# SPDX-License-Identifier: Apache-2.0
"""The report of `magi test --suite gpu`: one file that says on what the tests ran and how they went, to be sent."""

from __future__ import annotations

import json
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from magi_attention.cli.doctor import collected

_MAX_TEXT = 4000  # characters of a failure


def new_folder(root: Path) -> Path:
    """``root/gpu-suite-<time>``, made."""
    folder = root / time.strftime("gpu-suite-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def results_of(junits: Sequence[Path]) -> dict[str, Any]:
    """Counts over all tests and by file, reasons of skips with their counts, and the failures. Files may be missing,
    where pytest ended before it wrote any."""
    counts: Counter[str] = Counter()
    files: dict[str, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    failures = []
    cases = [case for junit in junits if junit.is_file() for case in ET.parse(junit).getroot().iter("testcase")]
    for case in cases:
        parts = [child for child in case if child.tag in ("failure", "error", "skipped")]
        outcome = {"failure": "failed", "error": "failed", "skipped": "skipped"}[parts[0].tag] if parts else "passed"
        file = (case.get("classname") or "").replace(".", "/")
        counts[outcome] += 1
        files.setdefault(file, Counter())[outcome] += 1
        if outcome == "skipped":
            reasons[parts[0].get("message") or ""] += 1
        elif outcome == "failed":
            failures.append({"test": f"{file}::{case.get('name')}", "text": (parts[0].text or "")[-_MAX_TEXT:]})
    return {
        "counts": dict(counts),
        "files": {name: dict(found) for name, found in sorted(files.items())},
        "skipped": dict(reasons.most_common()),
        "failures": failures,
    }


def write_report(folder: Path, junits: Sequence[Path], status: int) -> Path:
    """``report.json`` in ``folder``, of the tests in ``junits``."""
    results = results_of(junits)
    path = folder / "report.json"
    path.write_text(json.dumps({"status": status, "tests": results, "machine": collected()}, indent=1) + "\n")
    return path


def summary(path: Path) -> str:
    """Lines for the end of the run: what ran on which GPUs, and where the report is."""
    report = json.loads(path.read_text())
    counts = report["tests"]["counts"]
    said = ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped") if name in counts)
    lines = [f"{said or 'No test ran'}. The report is {path}: attach it to an issue, whatever it says."]
    lines += [f"  {failure['test']}" for failure in report["tests"]["failures"][:20]]
    return "\n".join(lines)
