# SPDX-License-Identifier: Apache-2.0
"""The parts of a page that explain the plan of a run: pictures with captions, tables. Needs matplotlib.

``numbers`` is everywhere the dict of ``magi_attention.meta.explain.explain``.
"""

from __future__ import annotations

from collections.abc import Sequence

from magi_attention.meta.plan import Plan
from magi_attention.report import pictures
from magi_attention.report.describe import FEW, overview_table, rank_table, volume_table
from magi_attention.report.html import Section


def plan_sections(plan: Plan, numbers: dict, events: Sequence[dict]) -> list[Section]:
    """Page sections that explain a plan. ``events`` are measured stage times in seconds."""
    return [
        Section(
            "Mask by owner rank",
            "Allowed pairs, coloured by the rank that computes the query row.",
            pictures.to_png(pictures.mask_by_owner(plan)),
        ),
        Section(
            "Area per rank, before and after balancing",
            "Before: every rank takes an equal run of neighbouring chunks.",
            pictures.to_png(pictures.areas_before_after(plan, numbers)),
        ),
        Section(
            "Communication",
            "Rows of K and V that one rank sends to another, and the total against schemes that move every "
            "row to every rank. The backward moves the same rows of dK and dV the other way.",
            pictures.to_png(pictures.communication(plan)),
            volume_table(plan, numbers),
        ),
        _timeline_section(plan, events),
        Section("Ranks", "", table=rank_table(plan, numbers)),
        Section("Plan", "", table=overview_table(plan, numbers)),
    ]


def _timeline_section(plan: Plan, events: Sequence[dict]) -> Section:
    text = (
        "The rows of a stage travel while the stage before it is computed. "
        "Measured: forward of the first layer in the last step."
    )
    if plan.cp_size > FEW:
        text += f" Shown are the {FEW} ranks that finish last."
    return Section("Stage timeline", text, pictures.to_png(pictures.timeline(events)))
