# SPDX-License-Identifier: Apache-2.0
"""Pages: their links lead somewhere, the files that they name exist, their commands are taken by the command line."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from pages import OWN, PAGES, README, ROOT, anchors, blocks, commands, links, name_of, without_blocks

from magi_attention.cli import OPTIONAL_WORDS, parser

FOLDERS = "benchmarks|ci|csrc|docker|docs|examples|magi_attention|tests|wheels"
SECTIONS = sorted((ROOT / "docs" / "sections").glob("*.md"))
MADE = ("magi_attention/lib",)  # what a build makes


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in links(page):
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{name_of(page)} links to {target}, which is not there"
        if anchor:
            assert anchor in anchors(path), f"{name_of(page)} links to {target}; headings are {sorted(anchors(path))}"


@pytest.mark.parametrize("page", [README, *OWN, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_named_files_exist(page):
    text = without_blocks(page) + "\n".join(block.text for block in blocks(page))
    for name in re.findall(rf"(?<![\w/.-])((?:{FOLDERS})/[\w./-]*\w)", text):
        if "build/" in name or name.startswith(MADE):
            continue
        assert (ROOT / name).exists(), f"{name_of(page)} names {name}, which is not there"


def words_of(line: str) -> list[str] | None:
    """Arguments of a `magi` command line, None for another program."""
    words = shlex.split(line)
    if not words or words[0] not in ("./magi", "magi"):
        return None
    return words[1 : words.index("--")] if "--" in words else words[1:]


@pytest.mark.parametrize("page", [README, *OWN], ids=name_of)
def test_commands_are_taken(page):
    for line in commands(page):
        if (words := words_of(line)) is None:
            continue
        given, rest = parser().parse_known_args(words)
        if rest and given.command in OPTIONAL_WORDS and not rest[0].startswith("-"):
            rest = rest[1:]
        assert not rest or given.command == "test", f"{name_of(page)}: {line}: unknown arguments {rest}"


@pytest.mark.parametrize("page", [README, *OWN], ids=name_of)
def test_programs_of_commands_exist_and_know_the_options(page):
    sources = "".join(file.read_text() for file in (ROOT / "benchmarks").glob("*.py"))
    for line in commands(page):
        for word in shlex.split(line):
            if re.match(r"(benchmarks|ci|docs|examples)/", word):
                assert (ROOT / word).exists(), f"{name_of(page)}: {line}: there is no {word}"
        script = re.search(r"benchmarks/\w+\.py (.*)", line)
        for option in re.findall(r"--[a-z-]+", script[1]) if script else []:
            assert f'"{option}"' in sources, f"{name_of(page)}: {line}: no benchmark has {option}"


def test_the_first_page_is_short_and_has_the_two_commands():
    assert len(README.read_text().splitlines()) <= 150
    assert "./magi run\n./magi test" in [block.text.strip() for block in blocks(README)]


@pytest.mark.parametrize("page", OWN, ids=name_of)
def test_pages_are_short_and_listed(page):
    assert len(page.read_text().splitlines()) <= 150
    docs = ROOT / "docs"
    listed = [(path.parent / target).resolve() for path in (docs / "index.md", *SECTIONS) for target in links(path)]
    assert page == docs / "index.md" or page in listed


def test_what_the_checks_find(tmp_path):
    """The functions above see what they are for."""
    page = Path(tmp_path / "page.md")
    page.write_text("# A b: `c`\n\n[x](gone.md#a) [y](https://z)\n\n```\n./magi run # no\n# no heading\n```\n")
    assert anchors(page) == {"a-b-c"} and links(page) == ["gone.md#a"] and words_of("torchrun x") is None
