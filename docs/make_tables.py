# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of pages that the code knows best, between their marks.

    python docs/make_tables.py
"""

from __future__ import annotations

import re
from pathlib import Path

from magi_attention.compat.paths import MODULES
from magi_attention.env.registry import list_table
from magi_attention.native.families import gpu_table, install_table

ROOT = Path(__file__).resolve().parents[1]
_MARKS = re.compile(r"(<!-- made by docs/make_tables.py -->\n).*?(<!-- end -->)", re.DOTALL)


def environment_table() -> str:
    """Every variable of the registry, by section."""
    head = ["| variable | type | default | effect |", "|---|---|---|---|"]
    lines, rows = [], list_table({})
    for section in dict.fromkeys(row["section"] for row in rows):
        lines += [f"## {section[0].upper()}{section[1:]}", "", *head]
        for row in (row for row in rows if row["section"] == section):
            doc = row["doc"] if row["effect"] == "yes" else f"None. {row['doc']}"
            kind = row["type"].replace("|", ", ")
            lines.append(f"| `{row['name']}` | {kind} | {row['default']} | {doc} |")
        lines.append("")
    return "\n".join(lines[:-1])


def paths_table() -> str:
    """Every published module path that is no file here."""
    rows = (f"| `magi_attention.{path}` | `magi_attention.{home}` |" for path, home in sorted(MODULES.items()))
    return "\n".join(["| published | here |", "|---|---|", *rows])


def tables() -> dict[str, str]:
    """Path of each page -> its table."""
    return {
        "README.md": install_table(), "docs/install.md": install_table(), "docs/gpus.md": gpu_table(),
        "docs/reference/environment.md": environment_table(), "docs/reference/published-paths.md": paths_table(),
    }  # fmt: skip


def with_table(page: str, table: str) -> str:
    """The text of a page with ``table`` between its marks."""
    text, count = _MARKS.subn(lambda marks: f"{marks[1]}{table}\n{marks[2]}", page)
    if count != 1:
        raise SystemExit("The page has no marks for its table, or several; see docs/gpus.md.")
    return text


if __name__ == "__main__":
    for name, table in tables().items():
        page = ROOT / name
        page.write_text(with_table(page.read_text(encoding="utf-8"), table), encoding="utf-8")
        print(page)
