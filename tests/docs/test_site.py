# SPDX-License-Identifier: Apache-2.0
"""The site: its navigation holds each page once, as docs/sections list them; its reference has every public name; and
what docs/hooks.py does to a page. ``ci/site`` builds it, without a warning."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

import pytest
import yaml
from pages import LOG, OWN, ROOT

from magi_attention import api, errors

sys.path.insert(0, str(ROOT / "docs"))

import hooks  # noqa: E402

NAV = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
PUBLIC = ("magi_attention.api", "magi_attention.functional")
LEGACY = "magi_attention.compat.keys.legacy"  # where names of ``api`` are that it has by a table
FAILURES = ROOT / "docs" / "guides" / "failures.md"


# ---- navigation ------------------------------------------------------------------------------------------


def pages_of(item: object) -> list[str]:
    """Pages of a part of the navigation, in their order."""
    if isinstance(item, str):
        return [item]
    parts = item.values() if isinstance(item, dict) else item
    return [page for part in parts for page in pages_of(part)]


SECTIONS = {pages_of(section)[0]: section for section in NAV if pages_of(section) != ["index.md"]}


def test_every_page_is_in_the_navigation_once():
    own = [page.relative_to(ROOT / "docs").as_posix() for page in OWN if page.parent != LOG]
    outside = [hooks.in_site(source) for source in hooks.OUTSIDE if source != "README.md"]
    assert sorted(pages_of(NAV)) == sorted(own + outside)


def test_the_first_page_leads_to_the_few_sections():
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert pages_of(NAV)[0] == "index.md" and len(SECTIONS) <= 7
    assert list(hooks.descriptions(text.partition("## Where to go")[2], "docs")) == list(SECTIONS)


@pytest.mark.parametrize("page", SECTIONS)
def test_the_page_of_a_section_lists_its_pages_in_their_order(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert [page, *hooks.descriptions(text)] == pages_of(SECTIONS[page])
    groups = [group for part in SECTIONS[page].values() for item in part if isinstance(item, dict) for group in item]
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == [group for group in groups if group != "Overview"]


def test_the_search_finds_no_log():
    class Page:
        def __init__(self, path: str) -> None:
            self.meta, self.file = {}, type("File", (), {"src_uri": path})

    for path, is_found in (("log/sparse.md", False), ("masks.md", True)):
        page = Page(path)
        hooks.on_page_markdown("# A", page, None, None)
        assert ("search" not in page.meta) == is_found


def test_every_public_name_is_in_the_reference_once():
    shown = [name for page in REFERENCE for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]
    assert len(shown) == len(set(shown))
    names = [path.rpartition(".")[2] for path in shown if path.rpartition(".")[0] in (*PUBLIC, LEGACY)]
    values = ["GeneralAttnMaskType", "dist_attn_runtime_dict_mgr"]  # a type alias, and the one instance of its class
    assert sorted(names) == sorted(set(api.__all__) - set(values))


def test_every_integration_is_in_the_reference():
    text = (ROOT / "docs" / "reference" / "integrations.md").read_text()
    for file in (ROOT / "magi_attention" / "integrations").glob("[a-z]*.py"):
        assert f"::: magi_attention.integrations.{file.stem}\n" in text


# ---- what failures.md quotes -----------------------------------------------------------------------------


def sentences() -> Iterator[str]:
    """Every text in the package, with three dots for what is filled in."""
    for file in (ROOT / "magi_attention").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_errors_of_the_failure_guide_exist():
    table = FAILURES.read_text(encoding="utf-8").partition("## With an error")[2]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    quoted = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    known = "\0".join(sentences())
    assert len(quoted) > 12
    assert [text for text in quoted if text not in known and not hasattr(errors, text)] == []


# ---- hooks -----------------------------------------------------------------------------------------------


def test_links_of_the_repository_become_links_of_the_site():
    text = (
        "[a](../CONTRIBUTING.md#speed) [b](masks.md) [c](../examples) ![d](../benchmarks/results/x.png) [e](https://z)"
    )
    wanted = "[a](project/contributing.md#speed) [b](masks.md) c ![d](records/x.png) [e](https://z)"
    assert hooks.with_site_links(text, "index.md") == wanted
    assert hooks.with_site_links("[a](../docs/install.md) [b](../README.md)", "project/containers.md") == (
        "[a](../install.md) [b](../index.md)"
    )
    fenced = "```\n[a](../CONTRIBUTING.md)\n```"
    assert hooks.with_site_links(fenced, "index.md") == fenced


def test_lists_are_set_apart():
    text = "Two:\n- a\n  goes on\n   * inner\n- b\n\nEnd\n1. c"
    assert hooks.with_list_breaks(text) == "Two:\n\n- a\n  goes on\n    * inner\n- b\n\nEnd\n\n1. c"


def test_a_page_as_the_site_has_it():
    text = "# A\n<!-- before the code:\nx = 1\n-->\n```python\ny = x\n```\n"
    assert hooks.as_markdown(text, "a.md") == "# A\n```python\ny = x\n```\n"


def table(head: list[str], *rows: list[str]) -> str:
    cells = ["".join(f"<td>{cell}</td>\n" for cell in row) for row in rows]
    head_row = "<tr>\n" + "".join(f"<th>{name}</th>\n" for name in head) + "</tr>\n"
    body = "".join(f"<tr>\n{row}</tr>\n" for row in cells)
    return f"<table>\n<thead>\n{head_row}</thead>\n<tbody>\n{body}</tbody>\n</table>"


def test_cells_of_sentences_say_their_column():
    long = "a sentence that is longer than what a phone can show beside other cells"
    html = hooks.with_narrow_tables(table(["what", "a <code>b</code>"], ["x", long], ["y", "z"]))
    assert html.startswith('<div class="table words">')
    assert re.findall(r'<td data-name="(.*?)">(.*?)</td>', html) == [
        ("what", "x"), ("a b", long), ("what", "y"), ("a b", "z"),
    ]  # fmt: skip
    numbers = table(["ranks", "GB"], ["8", "2.70"])
    assert hooks.with_narrow_tables(numbers) == f'<div class="table">{numbers}</div>'
    assert "<thead>" not in hooks.with_narrow_tables(table(["", ""], ["x", long]))
