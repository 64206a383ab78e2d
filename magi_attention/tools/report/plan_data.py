# SPDX-License-Identifier: Apache-2.0
"""Plans as JSON for the page of `magi explain`; ``web/plan.js`` reads it.

Numbers that ascend are stored as differences, which are short. What does not fit a limit is left out and named.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.slices import K0, K1, Q0, Q1, TYPE, areas, trim
from magi_attention.config.rates import MachineRates
from magi_attention.meta.explain import explain
from magi_attention.meta.plan import Plan
from magi_attention.meta.predict.cost import CostModel, contiguous_areas, stage_areas, stage_rows, timeline
from magi_attention.tools.report.describe import about_rows, overview_table, plan_facts, rank_table, volume_table

# What the page of a large plan goes without, the first one first: keys of a setting, and what they say.
_OPTIONAL = (
    (("stages", "assigned"), "who receives which rows"),
    (("owners",), "who holds which tokens"),
    (("areas", "contiguous", "sent", "received", "times"), "the figures of each rank"),
)
_NAMED = 8  # so many settings that were left out are named


@dataclass(frozen=True)
class Setting:
    """A plan, and the overlap degree that was asked for: a number or a word. One rank gets no stages for any."""

    plan: Plan
    degree: str
    element_bytes: int = 2  # by which bytes are counted

    @property
    def place(self) -> tuple[int, bool, int]:
        """By which settings are sorted; a degree that is a word comes after the numbers."""
        is_number = self.degree.isdecimal()
        return self.plan.cp_size, not is_number, int(self.degree) if is_number else 0


def page_data(settings: Sequence[Setting], limit: int) -> dict[str, Any]:
    """All that the page knows, in about ``limit`` bytes of JSON.

    ``settings`` are plans of one mask. The first one is shown first and always stays, if need be without its details.
    """
    given = settings[0]
    slices, notes = _slices(given.plan, limit // 2)
    is_whole = not notes
    room = limit - _size(slices)
    kept = {given: _reduced(_setting_data(given), room)}
    room -= _size(kept[given])
    left_out = []
    for setting in settings[1:]:
        data = _setting_data(setting)
        if _size(data) > room:
            left_out.append(f"{setting.plan.cp_size} ranks with degree {setting.degree}")
        else:
            kept[setting] = data
            room -= _size(data)
    if left_out:
        more = f" and {len(left_out) - _NAMED} more" if len(left_out) > _NAMED else ""
        notes.append(
            f"To keep this file small, it has no plan for {', '.join(left_out[:_NAMED])}{more}. "
            "magi explain with --cp and --degree makes a page for one of them."
        )
    order = sorted(kept, key=lambda setting: setting.place)
    return {
        "tokens": given.plan.total_tokens,
        "slices": slices,
        "is_whole": is_whole,
        "machine": f"Predicted for {_rates(given.plan).words}, 2 bytes an element, one layer.",
        "notes": notes,
        "settings": [kept[setting] for setting in order],
        "given": order.index(given),
    }


def _size(data: Any) -> int:
    return len(as_json(data))


def as_json(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))


def _slices(plan: Plan, limit: int) -> tuple[list[int], list[str]]:
    """``[step of q0, rows, k0, keys, type, ...]`` by ascending q0, and a note if only the largest slices fit."""
    table = _sorted(plan.slices.array)
    flat = _flat(table)
    size = _size(flat)
    if size <= limit:
        return flat, []
    pairs = areas(table)
    count = max(len(table) * limit // size, 1)
    kept = np.sort(np.argsort(-pairs, kind="stable")[:count])
    share = pairs[kept].sum() / pairs.sum()
    note = (
        f"The picture of the mask has the {count:,} largest of {len(table):,} slices, with {share:.1%} of the allowed "
        "pairs, to keep this file small. All figures are those of the whole mask."
    )
    return _flat(table[kept]), [note]


def _sorted(slices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Trimmed and by ascending q0."""
    table = trim(slices)
    return table[np.argsort(table[:, Q0], kind="stable")]


def _flat(table: NDArray[np.int64]) -> list[int]:
    columns = [
        np.diff(table[:, Q0], prepend=0),
        table[:, Q1] - table[:, Q0],
        table[:, K0],
        table[:, K1] - table[:, K0],
        table[:, TYPE],
    ]
    flat: list[int] = np.stack(columns, axis=1).reshape(-1).tolist()
    return flat


def _reduced(data: dict[str, Any], room: int) -> dict[str, Any]:
    """The data of a setting, without details if they need more than ``room`` bytes."""
    for keys, what in _OPTIONAL:
        if _size(data) <= room:
            break
        data = {key: value for key, value in data.items() if key not in keys}
        data["notes"] = [*data["notes"], f"To keep this file small, it does not say {what}."]
    return data


def _setting_data(setting: Setting) -> dict[str, Any]:
    plan = setting.plan
    numbers = explain(plan, element_bytes=setting.element_bytes)
    sent = [plan.comm_matrix(stage).sum(axis=1) for stage in range(plan.num_stages)]
    return {
        "cp": plan.cp_size,
        "name": setting.degree,
        "degree": plan.degree,
        "chunk": plan.chunk_size,
        "padded": plan.padded_tokens,
        "row_bytes": numbers["row_bytes"],
        "facts": [[fact.value, fact.label] for fact in plan_facts(plan, numbers)],
        "tables": [
            ["Ranks", rank_table(plan, numbers)],
            ["Communication", volume_table(plan, numbers)],
            ["Plan", overview_table(plan, numbers), about_rows(plan, numbers)],
        ],
        "notes": _moves_note(numbers),
        "do_queries_move": numbers["do_queries_move"],
        "assigned": [_flat(_sorted(slices)) for slices in plan.assigned or ()],
        "owners": plan.rank_of_chunk.tolist(),
        "stages": [
            [np.diff(ranges.reshape(-1), prepend=0).tolist() for ranges in stages] for stages in plan.stage_ranges
        ],
        "areas": stage_areas(plan).tolist(),
        "contiguous": contiguous_areas(plan).tolist(),
        "sent": np.stack(sent, axis=1).tolist() if sent else [[]] * plan.cp_size,
        "received": stage_rows(plan).tolist(),
        "times": _times(plan),
    }


def _moves_note(numbers: dict[str, Any]) -> list[str]:
    if not numbers["do_queries_move"]:
        return []
    return [
        f"Queries move in this plan: {sum(numbers['query_rows_sent']):,} rows of them are sent to other ranks, and as "
        "many rows of outputs come back. The charts of who sends show K and V alone; the figure of all bytes has both."
    ]


def _rates(plan: Plan) -> MachineRates:
    """Those that the plan was made for, else assumed ones."""
    return plan.rates or MachineRates()


def _times(plan: Plan) -> list[dict[str, list[float]]]:
    """Per rank, in microseconds: when the rows of each stage are there, and start and end of each computation."""
    times: list[dict[str, list[float]]] = [{"arrive": [], "compute": []} for _ in range(plan.cp_size)]
    for bar in timeline(plan, CostModel.for_plan(plan, _rates(plan))):
        start, end = round(bar["start"] * 1e6, 2), round(bar["end"] * 1e6, 2)
        if bar["lane"] == "comm":
            times[bar["rank"]]["arrive"].append(end)
        else:
            times[bar["rank"]]["compute"] += [start, end]
    return times
