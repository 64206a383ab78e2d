# SPDX-License-Identifier: Apache-2.0
"""Size budget: a file or function that outgrows it is split, or waived below with a reason.

    python ci/check_sizes.py [repository folder]

Over a soft limit is reported, over a hard limit fails.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

PYTHON_FILE = (400, 600)  # soft, hard; lines
CUDA_FILE = (500, 900)
PYTHON_FUNCTION = (60, 120)
CUDA_SUFFIXES = {".cu", ".cuh", ".h", ".hpp", ".c", ".cc", ".cpp"}
FOLDERS = ("magi_attention", "csrc", "ci", "docker", "docs", "wheels", "examples", "extensions", "benchmarks", "tests")

# "path" or "path::function" -> why it may exceed the hard limit
WAIVERS: dict[str, str] = {}


def functions(tree: ast.AST) -> list[tuple[str, int]]:
    """(name, lines) of every function, from `def` to its end, docstring included, decorators not."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [(n.name, n.end_lineno - n.lineno + 1) for n in ast.walk(tree) if isinstance(n, kinds)]


def measure(root: Path) -> list[tuple[str, int, tuple[int, int]]]:
    """(what, lines, (soft, hard)) of everything that has a limit."""
    out = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix != ".py" and path.suffix not in CUDA_SUFFIXES:
                continue
            name = path.relative_to(root).as_posix()
            text = path.read_text(encoding="utf-8")
            lines = len(text.splitlines())
            out.append((name, lines, PYTHON_FILE if path.suffix == ".py" else CUDA_FILE))
            if path.suffix == ".py":
                for function, length in functions(ast.parse(text)):
                    out.append((f"{name}::{function}", length, PYTHON_FUNCTION))
    return out


def check(root: Path, waivers: dict[str, str] = WAIVERS) -> tuple[list[str], list[str]]:
    """(failures, notes) as sentences."""
    failures, notes = [], []
    measured = measure(root)
    for what, lines, (soft, hard) in measured:
        if lines > hard and what not in waivers:
            failures.append(f"{what}: {lines} lines, the limit is {hard}; split it or waive it with a reason")
        elif lines > soft:
            waived = f"; waived: {waivers[what]}" if what in waivers else ""
            notes.append(f"{what}: {lines} lines, aim at {soft}{waived}")
    over = {what for what, lines, (_, hard) in measured if lines > hard}
    for what in waivers:
        if what not in over:
            failures.append(f"{what}: is waived in ci/check_sizes.py and no longer needs it; remove the line")
    return failures, notes


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    failures, notes = check(root)
    for line in notes + failures:
        print(line)
    print(f"sizes: {len(failures)} over a hard limit, {len(notes)} over a soft one")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
