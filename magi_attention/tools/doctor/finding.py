# SPDX-License-Identifier: Apache-2.0
"""Findings and reports: text, JSON and exit codes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

OK, SKIPPED, WARNING, ERROR = "ok", "skipped", "warning", "error"
EXIT_OK, EXIT_PROBLEM, EXIT_NOT_RUN = 0, 1, 3  # 2 is a wrong request, as of every command
_MARKS = {OK: "ok     ", SKIPPED: "skipped", WARNING: "WARNING", ERROR: "ERROR  "}


@dataclass(frozen=True)
class Finding:
    """``evidence`` is what was seen; for a skipped check, why. ``remedy`` is the one command or flag that mends a
    warning or error, and empty otherwise."""

    check: str
    status: str
    evidence: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if bool(self.remedy) != (self.status in (WARNING, ERROR)):
            raise ValueError(f"{self.check}: a {self.status} finding and the remedy {self.remedy!r} do not go together")


def worst(findings: Sequence[Finding]) -> str:
    """The gravest status among them; skipped checks count as ok."""
    found = {f.status for f in findings}
    return ERROR if ERROR in found else WARNING if WARNING in found else OK


def exit_code(findings: Sequence[Finding], is_strict: bool = False) -> int:
    """1 where there are errors, with ``is_strict`` also where there are warnings; else 0."""
    return EXIT_PROBLEM if worst(findings) in ((WARNING, ERROR) if is_strict else (ERROR,)) else EXIT_OK


def as_text(findings: Sequence[Finding], only_problems: bool = False) -> str:
    lines = []
    for finding in findings:
        if only_problems and not finding.remedy:
            continue
        lines.append(f"{_MARKS[finding.status]} {finding.check:6} {finding.evidence}")
        if finding.remedy:
            lines.append(f"               -> {finding.remedy}")
    counts = [f"{n} {s}" for s in (OK, WARNING, ERROR, SKIPPED) if (n := sum(f.status == s for f in findings))]
    return "\n".join([*lines, ", ".join(counts)]) + "\n"


def as_json(findings: Sequence[Finding]) -> str:
    return json.dumps({"status": worst(findings), "findings": [asdict(f) for f in findings]}, indent=1) + "\n"
