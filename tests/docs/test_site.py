# SPDX-License-Identifier: Apache-2.0
"""The site: its navigation holds each page once, as docs/index.md lists them; its reference has every public name; and
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

NAV = {
    title: pages
    for section in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    for title, pages in section.items()
}
INDEX = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
PUBLIC = ("magi_attention.api", "magi_attention.functional")
FAILURES = ROOT / "docs" / "guides" / "failures.md"


# ---- navigation ------------------------------------------------------------------------------------------


def test_every_page_is_in_the_navigation_once():
    listed = [page for pages in NAV.values() for page in pages]
    own = [page.relative_to(ROOT / "docs").as_posix() for page in OWN if page.parent != LOG]
    outside = [hooks.in_site(source) for source in hooks.OUTSIDE if source != "README.md"]
    assert sorted(listed) == sorted(own + outside)


@pytest.mark.parametrize("section", NAV)
def test_the_index_lists_the_pages_of_a_section_in_their_order(section):
    text = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", INDEX, re.MULTILINE | re.DOTALL)[1]
    rows = [hooks.in_site(f"docs/{target}".replace("docs/../", "")) for target in hooks.descriptions(text)]
    assert rows == [page for page in NAV[section] if page != "index.md"]


def test_every_public_name_is_in_the_reference_once():
    shown = [name for page in REFERENCE for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]
    assert len(shown) == len(set(shown))
    names = [path.rpartition(".")[2] for path in shown if path.rpartition(".")[0] in PUBLIC]
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
