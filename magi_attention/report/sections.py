# SPDX-License-Identifier: Apache-2.0
"""The parts of a page that explain a plan: facts, pictures with captions, tables. Needs matplotlib.

``numbers`` is everywhere the dict of ``magi_attention.meta.explain.explain``.
"""

from __future__ import annotations

from collections.abc import Sequence

from magi_attention.meta.cost import timeline
from magi_attention.meta.plan import Plan
from magi_attention.report import pictures
from magi_attention.report.describe import FEW, overview_table, rank_table, readable_bytes, volume_table
from magi_attention.report.html import Fact, Section


def plan_facts(plan: Plan, numbers: dict) -> list[Fact]:
    """The figures for the head of a page."""
    share = numbers["bytes_total"] / max(numbers["all_gather_bytes"], 1)
    return [
        Fact(f"{plan.total_tokens:,}", "tokens"),
        Fact(f"{plan.cp_size}", "ranks"),
        Fact(f"{numbers['imbalance']:.4f}", "imbalance, max/mean"),
        Fact(readable_bytes(numbers["bytes_total"]), "moved per forward"),
        Fact(f"{share:.1%}", "of all-gather's volume"),
    ]


def plan_sections(plan: Plan, numbers: dict, events: Sequence[dict] = ()) -> list[Section]:
    """Page sections that explain a plan.

    ``events`` are measured stage times in seconds; without them the cost model's are drawn.
    """
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
        _timeline_section(plan, list(events)),
        Section("Ranks", "", table=rank_table(plan, numbers)),
        Section("Plan", "", table=overview_table(plan, numbers)),
    ]


def _timeline_section(plan: Plan, events: list[dict]) -> Section:

    text = "The rows of a stage travel while the stage before it is computed. "
    if events:
        text += "Measured: forward of the first layer in the last step."
    else:
        text += "Predicted for a GPU at 593 TFLOP/s and a link of 300 GB/s, bf16, one layer forward."
        events = timeline(plan)
    if plan.cp_size > FEW:
        text += f" Shown are the {FEW} ranks that finish last."
    return Section("Stage timeline", text, pictures.to_png(pictures.timeline(events)))
