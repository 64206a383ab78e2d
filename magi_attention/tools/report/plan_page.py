# SPDX-License-Identifier: Apache-2.0
"""A plan as one interactive HTML page that needs nothing outside itself. Neither torch nor matplotlib is needed."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from magi_attention.meta.plan import Plan
from magi_attention.tools.report.colours import as_script
from magi_attention.tools.report.html import STYLE, in_script
from magi_attention.tools.report.plan_data import Setting, as_json, page_data

MOST_BYTES = 1_800_000  # of data on a page
MOST_NOTEBOOK_BYTES = 300_000  # in a notebook, which keeps the output of every cell
_WEB = Path(__file__).with_name("web")
_SCRIPTS = ("plan.js", "colours.js", "mask.js", "charts.js", "run.js", "page.js")


def plan_page(
    settings: Sequence[Setting], lead: str, limit: int = MOST_BYTES, title: str = "Plan explained", run: Any = None
) -> str:
    """The page of one mask under several settings; the first one is shown first. ``run`` is what ``report.run`` says of
    a training run, ready for JSON; the page shows it above the plan.

    What does not fit ``limit`` bytes of data is left out, and the page says so.
    """
    data = in_script(as_json({**page_data(settings, limit), "run": run}))
    parts = {
        "style": STYLE + _resource("page.css"),
        "title": escape(title),
        "lead": escape(lead),
        "plan": data,
        "script": "\n".join([as_script(), *map(_resource, _SCRIPTS)]),
    }
    text = _resource("page.html")
    for name, part in parts.items():
        text = text.replace(f"<!--{name}-->", part)
    return text


def notebook_view(plan: Plan) -> str:
    """The page of one plan as an ``iframe`` for a notebook's output, of bounded size."""
    page = plan_page([Setting(plan, str(plan.degree))], repr(plan), MOST_NOTEBOOK_BYTES)
    return (
        f"<p>{escape(repr(plan))}</p>"
        f'<iframe sandbox="allow-scripts allow-downloads" style="width:100%;height:720px;border:0" '
        f'srcdoc="{escape(page, quote=True)}"></iframe>'
    )


def _resource(name: str) -> str:
    return (_WEB / name).read_text(encoding="utf-8")
