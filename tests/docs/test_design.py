# SPDX-License-Identifier: Apache-2.0
"""Pages of docs/design: what they name exists, they are short and in plain sentences, and each shows one figure."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from pages import DESIGN, ROOT, name_of, without_blocks

FILES = re.compile(r"[\w./-]+\.(?:cuh|cu|cpp|h|py|md)")


@cache
def words_of_sources() -> frozenset[str]:
    """Every word of the sources that a page may name."""
    found: set[str] = set()
    for folder, endings in (("csrc", (".cuh", ".cu", ".cpp", ".h")), ("magi_attention", (".py",))):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in endings:
                found.update(re.findall(r"[A-Za-z_]\w*", file.read_text(encoding="utf-8")))
    return frozenset(found)


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def unknown(text: str, bases: tuple[Path, ...]) -> list[str]:
    """Files and identifiers in spans of code that do not exist. A path is that of the root or of one of ``bases``."""
    missing = []
    for span in spans(text):
        if FILES.fullmatch(span) or "/" in span:
            if not any((base / span).exists() for base in (ROOT, *bases)):
                missing.append(span)
        else:
            missing += [word for word in re.findall(r"[A-Za-z_]\w{2,}", span) if word not in words_of_sources()]
    return missing


def bases_of(text: str) -> tuple[Path, ...]:
    """Folders that the head of a table names as that of its files: "file under `folder`"."""
    return tuple(ROOT / folder for folder in re.findall(r"file under `([^`]+)`", text))


@pytest.mark.parametrize("page", DESIGN, ids=name_of)
def test_names_exist(page):
    text = page.read_text(encoding="utf-8")
    assert unknown(text, bases_of(text)) == []


@pytest.mark.parametrize("page", DESIGN, ids=name_of)
def test_pages_are_short_with_one_figure(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    assert [n for n, line in enumerate(lines, 1) if len(line) > 120] == []
    figures = re.findall(r"!\[[^\]]+\]\((\S+)\)", without_blocks(page))
    assert figures == [f"../pictures/design_{page.stem}.png"]
    assert (page.parent / figures[0]).stat().st_size < 100_000


def test_what_the_checks_find():
    text = "`Mask` `no_such_name` `gone/file.py` `kernel.cuh` `csrc/planner`"
    assert unknown(text, ()) == ["no_such_name", "gone/file.py", "kernel.cuh"]
    assert unknown("`kernel.cuh`", (ROOT / "csrc" / "ffa" / "sm90" / "fwd",)) == []
    assert bases_of("| file under `csrc/planner` |") == (ROOT / "csrc/planner",)
