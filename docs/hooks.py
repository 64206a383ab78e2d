# SPDX-License-Identifier: Apache-2.0
"""What the site does beyond mkdocs: pages and pictures from outside docs, Markdown as GitHub reads it, a copy of each
page as Markdown, and ``llms.txt``. mkdocs calls the ``on_`` functions.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Pages that lie outside docs -> where they are in the site.
OUTSIDE = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "docker/README.md": "project/containers.md",
    "extensions/README.md": "project/extensions.md",
    "README.md": "index.md",
}
PICTURES = "benchmarks/results"  # its .png files
SECTIONS = "docs/sections"  # a page for each section of the nav, with a row for each of its pages
_FENCED = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"^<!--.*?-->\n?", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_ITEM = re.compile(r" *(?:[-*]|\d+\.) ")
_ROW = re.compile(r"^\| (.*\]\(.*) \| (.*) \|$", re.MULTILINE)
_REFERENCE = re.compile(r"^::: (\S+)\n((?: +.+\n)*)", re.MULTILINE)

_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_BODY_ROW = re.compile(r"<tr>(?:(?!<th).)*?</tr>", re.DOTALL)
_HEAD_CELL = re.compile(r"<th[^>e]*>(.*?)</th>", re.DOTALL)
_CELL = re.compile(r"<td[^>]*>(.*?)</td>", re.DOTALL)
_TAG = re.compile(r"<[^>]*>|\"")
LONG_CELL = 48  # characters of a cell that no phone shows beside others


# ---- text -----------------------------------------------------------------------------------------------


def source_of(site_path: str) -> str:
    """Path in the repository of a file of the site."""
    homes = {to: source for source, to in OUTSIDE.items() if source != "README.md"}
    if site_path.startswith("records/"):
        return f"{PICTURES}/{site_path.removeprefix('records/')}"
    return homes.get(site_path, f"docs/{site_path}")


def in_site(source: str) -> str | None:
    """Path in the site of a file of the repository; None if the site has none of it."""
    if source in OUTSIDE:
        return OUTSIDE[source]
    if source.startswith("docs/") and not source.endswith(".py"):
        return source.removeprefix("docs/")
    if source.startswith(f"{PICTURES}/") and source.endswith(".png"):
        return f"records/{Path(source).name}"
    return None


def with_site_links(text: str, page: str) -> str:
    """Links of the repository as links of the site. A link to what the site does not have becomes its text."""
    here = os.path.dirname(source_of(page))

    def link(match: re.Match) -> str:
        picture, shown, target = match.groups()
        path, mark, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return match[0]
        found = in_site(os.path.normpath(os.path.join(here, path)))
        if found is None:
            return shown
        return f"{picture}[{shown}]({os.path.relpath(found, os.path.dirname(page) or '.')}{mark}{anchor})"

    return outside_fences(text, lambda part: _LINK.sub(link, part))


def outside_fences(text: str, change: Any) -> str:
    parts = _FENCED.split(text)
    return "".join(part if number % 2 else change(part) for number, part in enumerate(parts))


def with_list_breaks(text: str) -> str:
    """A blank line before each list, and four spaces before its inner lists: GitHub needs neither, mkdocs both."""
    lines: list[str] = []
    is_list = False
    for line in text.split("\n"):
        is_item = bool(_ITEM.match(line))
        if is_item and not is_list and lines and lines[-1].strip():
            lines.append("")
        is_list = is_item or (is_list and (line.startswith("  ") or not line.strip()))
        is_inner = is_item and line.startswith("  ")
        lines.append("    " + line.lstrip() if is_inner and not line.startswith("    ") else line)
    return "\n".join(lines)


def as_markdown(text: str, page: str) -> str:
    """A page as the site has it: without comments, which hold what tests run before the code."""
    return outside_fences(with_site_links(_COMMENT.sub("", text), page), with_list_breaks)


def with_narrow_tables(html: str) -> str:
    """Tables in a box, which scrolls by itself where they are wider than the page. Tables of sentences are "words":
    their cells say which column they are of, because on a phone they stand below one another."""

    def boxed(match: re.Match) -> str:
        table = match[0]
        names = [_TAG.sub("", name) for name in _HEAD_CELL.findall(table)]
        cells = [_TAG.sub("", cell) for cell in _CELL.findall(table)]
        is_words = len(names) < 6 and max(map(len, cells), default=0) > LONG_CELL
        rows = _BODY_ROW.sub(lambda row: _labelled(row[0], names), table) if is_words else table
        return f'<div class="table{" words" if is_words else ""}">{rows}</div>'

    return _TABLE.sub(boxed, html.replace("<thead>\n<tr>\n<th></th>\n<th></th>\n</tr>\n</thead>\n", ""))


def _labelled(row: str, names: list[str]) -> str:
    left = iter(names)
    return re.sub(r"<td", lambda _: f'<td data-name="{next(left, "")}"', row)


def descriptions(text: str, folder: str = SECTIONS) -> dict[str, str]:
    """Page of the site -> what the table of a section in ``folder`` says of it, in the table's order."""
    found = {}
    for cells in _ROW.finditer(text):
        for _, _, target in _LINK.findall(cells[1]):
            page = in_site(os.path.normpath(f"{folder}/{target}"))
            found[page] = _LINK.sub(lambda link: link[2], cells[2])
    return found


@cache
def _package() -> Any:
    import griffe

    return griffe.load("magi_attention", search_paths=[str(ROOT)])


def reference_text(path: str, options: str = "") -> str:
    """Signatures and docstrings of what ``::: path`` with its options shows, as Markdown."""
    thing = _package()[path.partition(".")[2]]
    thing = thing.final_target if thing.is_alias else thing
    shown = {path: thing}
    if thing.is_module or thing.is_class:
        members = thing.all_members if "inherited_members: true" in options else thing.members
        wanted = (m for m in members.values() if m.is_public and (m.inherited or not m.is_alias) and m.docstring)
        shown |= {f"{path}.{m.name}": m for m in wanted}
    return "\n".join(_entry(name, member) for name, member in shown.items())


def _entry(name: str, member: Any) -> str:
    signature = member.signature(name=name) if member.is_function else name
    docstring = member.docstring.value if member.docstring else ""
    return f"## {member.name}\n\n```\n{signature}\n\n{docstring}\n```\n"


# ---- called by mkdocs -------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for source in [*OUTSIDE, *(str(p.relative_to(ROOT)) for p in sorted((ROOT / PICTURES).glob("*.png")))]:
        if source != "README.md":
            files.append(File.generated(config, in_site(source), abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if page.file.src_uri.startswith("log/"):
        page.meta["search"] = {"exclude": True}
    return as_markdown(markdown, page.file.src_uri)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    return with_narrow_tables(html)


def on_nav(nav: Any, config: Any, files: Any) -> Any:
    config.extra["nav"] = nav
    return nav


def on_post_build(config: Any) -> None:
    site, nav = Path(config.site_dir), config.extra["nav"]
    said: dict[str, str] = {}
    for section in sorted((ROOT / SECTIONS).glob("*.md")):
        said |= descriptions(section.read_text(encoding="utf-8"))
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for section in nav.items:
        if section.is_section:
            lines += [f"## {section.title}", "", *_lines_of(section, said), ""]
    (site / "llms.txt").write_text("\n".join(lines), encoding="utf-8")
    for page in nav.pages:
        text = _REFERENCE.sub(lambda match: reference_text(*match.groups()), page.markdown)
        path = site / page.file.src_uri
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _lines_of(section: Any, said: dict[str, str]) -> list[str]:
    """A line for each page of a section and of the groups in it, but for the section's own page."""
    lines = []
    for item in section.children:
        if item.is_section:
            lines += _lines_of(item, said)
        elif item.file.src_uri in said:
            lines.append(f"- [{item.title}]({item.file.src_uri}): {said[item.file.src_uri]}")
    return lines
