# SPDX-License-Identifier: Apache-2.0
"""One HTML page without anything outside it: text, tables, pictures inlined as PNG."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2328; background: #f6f7f9; margin: 0 }
main { max-width: 62rem; margin: 0 auto; padding: 2rem 1.5rem 4rem }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; overflow-wrap: anywhere } h2 { font-size: 1.15rem; margin: 0 0 .3rem }
.lead { color: #57606a; margin: 0 0 1.5rem }
.facts { display: flex; flex-wrap: wrap; gap: .8rem; margin: 0 0 1.5rem; padding: 0; list-style: none }
.facts li { background: #fff; border: 1px solid #d9dee3; border-radius: 8px; padding: .6rem 1rem }
.facts b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums }
.facts span { color: #57606a; font-size: .85rem }
.good b { color: #1a7f37 } .bad b { color: #b42318 }
section { background: #fff; border: 1px solid #d9dee3; border-radius: 8px }
section { padding: 1rem 1.3rem; margin: 0 0 1.2rem }
section p { color: #57606a; margin: 0 0 .8rem }
img { max-width: 100%; height: auto; display: block; margin: 0 auto }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .25rem .8rem; border-bottom: 1px solid #e4e8ec; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
th { color: #57606a; font-weight: 600 }
"""


@dataclass(frozen=True)
class Fact:
    """One figure at the head of the page. ``good`` colours it: green, red, or not at all for None."""

    value: str
    label: str
    good: bool | None = None


@dataclass(frozen=True)
class Section:
    """A titled part of the page: a caption, then a table (header first) or a PNG picture or both."""

    title: str
    text: str
    picture: bytes | None = None
    table: Sequence[Sequence[str]] = ()


def _fact(fact: Fact) -> str:
    kind = "" if fact.good is None else ' class="good"' if fact.good else ' class="bad"'
    return f"<li{kind}><b>{escape(fact.value)}</b><span>{escape(fact.label)}</span></li>"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = ["<tr>" + "".join(f"<th>{escape(str(c))}</th>" for c in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{escape(str(c))}</td>" for c in row) + "</tr>" for row in body]
    return '<div class="scroll"><table>' + "\n".join(lines) + "</table></div>"


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>"]
    if section.text:
        parts.append(f"<p>{escape(section.text)}</p>")
    if section.table:
        parts.append(_table(section.table))
    if section.picture is not None:
        data = base64.b64encode(section.picture).decode()
        parts.append(f'<img alt="{escape(section.title, quote=True)}" src="data:image/png;base64,{data}">')
    return "<section>" + "\n".join(parts) + "</section>"


def in_script(data: str) -> str:
    """JSON to stand in the script of a page: no "<" of it may end the script."""
    return data.replace("<", "\\u003c")


def page(title: str, lead: str, facts: Sequence[Fact], sections: Sequence[Section]) -> str:
    """The whole page as text."""
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>",
            f'<h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p>',
            '<ul class="facts">' + "".join(map(_fact, facts)) + "</ul>",
            *map(_section, sections),
            "</main></body></html>\n",
        ]
    )
