# SPDX-License-Identifier: Apache-2.0
"""Profiles as pictures, tables, one JSON file and one HTML page without anything outside it. Needs matplotlib."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from magi_attention.errors import ContractError
from magi_attention.tools.profiling.trace import Profile, profiles_of, read_trace, summary_of
from magi_attention.tools.report import pictures
from magi_attention.tools.report.describe import FEW, Table
from magi_attention.tools.report.html import Fact, Section, page

_COLOURS = {
    "compute": "#3b6fb6", "communication": "#d9822b", "exposed": "#c4453c", "copies": "#2aa5b5", "host gaps": "#6e7780",
}  # fmt: skip
_NARROW = 1 / 2000  # of the window: nearer intervals are drawn as one


def read_folder(folder: Path) -> list[Profile]:
    """The profiles of all trace files of a folder, by rank; ``ContractError`` if there are none."""
    files = sorted((*folder.glob("*.json"), *folder.glob("*.json.gz")))
    files = [file for file in files if file.name != "summary.json"]
    if not files:
        raise ContractError(f"{folder} holds no trace; `magi profile` or torch's export_chrome_trace writes some.")
    profiles = [p for file in files for p in profiles_of(read_trace(file), str(file))]
    return sorted(profiles, key=lambda p: (p.rank, p.device))


def missing_ranks(profiles: Sequence[Profile]) -> list[int]:
    """Ranks of the run whose trace is not there, as where they wrote on another machine."""
    return sorted(set(range(max(p.world for p in profiles))) - {p.rank for p in profiles})


def lanes_of(profile: Profile) -> dict[str, np.ndarray]:
    """What the picture shows, from top to bottom."""
    lanes = {"compute": profile.compute, "communication": profile.communication, "exposed": profile.exposed}
    if len(profile.copies):
        lanes["copies"] = profile.copies
    return {**lanes, "host gaps": profile.gaps}


def timeline(profile: Profile) -> Figure:
    """The lanes of one rank over the profiled steps; on a CPU the stages of attention below them."""
    lanes, (start, end) = lanes_of(profile), profile.window
    attention = [lane for lane in ("compute", "comm") if any(s["lane"] == lane for s in profile.stages)]
    labels = [*lanes, *(f"attention, {lane}" for lane in attention)]
    figure, (axis,) = pictures.new_figure(9.6, 0.9 + 0.34 * len(labels))
    for line, (name, found) in enumerate(lanes.items()):
        bars = [((a - start) / 1e6, (b - a) / 1e6) for a, b in _drawn(found, end - start)]
        axis.broken_barh(bars, (line - 0.38, 0.76), color=_COLOURS[name])
    for line, lane in enumerate(attention, len(lanes)):
        for stage in (s for s in profile.stages if s["lane"] == lane):
            bar = [((stage["start"] - start) / 1e6, (stage["end"] - stage["start"]) / 1e6)]
            shade = 0.95 if stage["stage"] < 0 or stage["stage"] % 2 else 0.6  # the host, stage -1, is dark
            colour = _COLOURS["compute" if lane == "compute" else "communication"]
            axis.broken_barh(bar, (line - 0.38, 0.76), color=colour, alpha=shade)
    axis.set_yticks(range(len(labels)), labels)
    axis.set_ylim(len(labels) - 0.4, -0.6)
    axis.set_xlim(0, (end - start) / 1e6)
    axis.set_xlabel("time (ms)")
    return figure


def _drawn(intervals: np.ndarray, span: int) -> list[tuple[int, int]]:
    """Fewer intervals that look the same: those that nothing visible parts are one."""
    out: list[list[int]] = []
    for a, b in intervals.tolist():
        if out and a - out[-1][1] < span * _NARROW and b - a < span * _NARROW:
            out[-1][1] = b
        else:
            out.append([a, b])
    return [(a, b) for a, b in out]


def lanes_table(summaries: Sequence[dict]) -> Table:
    """One row for each rank and device, milliseconds of a step."""
    rows = [["rank", "device", "step", "compute", "communication", "exposed", "host gaps", "hidden"]]
    for s in summaries:
        times = [f"{s[f'{k}_ms']:,.2f}" for k in ("step", "compute", "communication", "exposed", "gaps")]
        hidden = "none sent" if s["hidden_share"] is None else f"{s['hidden_share']:.0%}"
        rows.append([str(s["rank"]), s["device"], *times, hidden])
    return rows


def predictions(profiles: Sequence[Profile], summaries: Sequence[dict]) -> list[dict]:
    """Attention forward as the plans predict it beside what was measured, for each rank that called it.

    Keys: ``rank, is_comparable, calls`` of a step, ``predicted_share`` and ``measured_share`` (of the compute of all
    ranks), ``rates``: whose rates predict, and ``predicted_compute_ms, measured_compute_ms, ..., measured_exposed_ms``
    of a step. Times are comparable on a GPU, and on a CPU that `magi tune` has measured: assumed rates are a GPU's.
    """
    everyone = sum(s["attention"].get("forward", {}).get("compute_ms", 0.0) for s in summaries)
    out = []
    for p, s in zip(profiles, summaries):
        measured = s["attention"].get("forward")
        if not measured or not p.predicted or not measured["calls"]:
            continue
        calls = sum(plan["calls"] for plan in p.predicted)
        row = {
            "rank": p.rank,
            "is_comparable": p.is_gpu or all(plan.get("is_measured") for plan in p.predicted),
            "rates": p.predicted[0].get("rates", "rates that the trace does not name"),
            "calls": measured["calls"],
            "predicted_share": sum(plan["calls"] * plan["share"] for plan in p.predicted) / calls,
            "measured_share": measured["compute_ms"] / everyone if everyone else 0.0,
        }
        for key in ("compute", "communication", "exposed"):
            seconds = sum(plan["calls"] * plan[f"{key}_s"] for plan in p.predicted)
            row[f"predicted_{key}_ms"] = seconds * 1e3 / p.steps
            row[f"measured_{key}_ms"] = measured[f"{key}_ms"]
        out.append(row)
    return out


def prediction_section(rows: Sequence[dict]) -> Section:
    title = "Attention forward, predicted beside measured"
    if not rows:
        return Section(title, "No distributed attention call of this package ran in the profiled steps.")
    is_comparable, machine = all(row["is_comparable"] for row in rows), rows[0]["rates"]
    text = (
        f"Milliseconds of a step. Predicted for {machine}."
        if is_comparable
        else f"Milliseconds of a step. Times are not comparable, because predictions are for {machine} and this was a "
        "CPU, which `magi tune` measures; the shares of the ranks in the work are."
    )
    kinds = ("predicted", "measured") if is_comparable else ("measured",)
    columns = [(key, which) for key in ("compute", "communication", "exposed") for which in kinds]
    head = ["rank", "calls a step", "share, predicted", "share, measured"]
    table: Table = [head + [f"{key}, {which}" for key, which in columns]]
    for row in rows:
        line = [str(row["rank"]), f"{row['calls']:g}", f"{row['predicted_share']:.1%}", f"{row['measured_share']:.1%}"]
        table.append(line + [f"{row[f'{which}_{key}_ms']:,.3f}" for key, which in columns])
    return Section(title, text, table=table)


def top_section(summaries: Sequence[dict]) -> Section:
    busiest = max(summaries, key=lambda s: s["compute_ms"])
    what = "kernels" if busiest["device"] != "CPU" else "operators, without what they call"
    table: Table = [["name", "ms a step", "count"]]
    for row in busiest["top"]:
        name = row["name"] if len(row["name"]) <= 90 else row["name"][:87] + "..."
        table.append([name, f"{row['ms']:,.3f}", str(row["count"])])
    return Section("Where compute goes", f"Rank {busiest['rank']}, the longest {what}.", table=table)


def write_report(folder: Path, profiles: Sequence[Profile]) -> dict:
    """Writes ``summary.json``, a PNG for each rank and ``report.html``; returns what the JSON holds."""
    summaries = [summary_of(p) for p in profiles]
    compared = predictions(profiles, summaries)
    result = {"ranks": summaries, "attention_forward": compared, "missing_ranks": missing_ranks(profiles)}
    (folder / "summary.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    slowest = max(summaries, key=lambda s: s["step_ms"])
    exposed = max(summaries, key=lambda s: s["exposed_ms"])
    gaps = max(summaries, key=lambda s: s["gaps_ms"])
    facts = [
        Fact(f"{slowest['step_ms']:,.1f} ms", f"a step, rank {slowest['rank']}"),
        Fact(f"{exposed['exposed_ms'] / exposed['step_ms']:.0%}", f"exposed communication, rank {exposed['rank']}"),
        Fact(f"{gaps['gaps_ms'] / gaps['step_ms']:.0%}", f"host gaps, rank {gaps['rank']}"),
    ]
    sections = [Section("Ranks", "Milliseconds of a step. " + _words(profiles), table=lanes_table(summaries))]
    sections.append(prediction_section(compared))
    for number, profile in enumerate(profiles):
        picture = pictures.to_png(timeline(profile))
        name = f"rank{profile.rank}" + (f"-{number}" if _has_several(profiles, profile.rank) else "")
        (folder / f"{name}.png").write_bytes(picture)
        if number < FEW:
            sections.append(Section(f"Rank {profile.rank}, {profile.device}", "", picture))
    sections.append(top_section(summaries))
    lead = f"{len(profiles)} of {max(p.world for p in profiles)} ranks, {profiles[0].steps} steps each. "
    lead += "The traces beside this page open in ui.perfetto.dev and chrome://tracing."
    (folder / "report.html").write_text(page("Profile", lead, facts, sections), encoding="utf-8")
    return result


def _has_several(profiles: Sequence[Profile], rank: int) -> bool:
    return sum(p.rank == rank for p in profiles) > 1


def _words(profiles: Sequence[Profile]) -> str:
    if profiles[0].is_gpu:
        return (
            "Exposed: a kernel moves rows and none computes on the same GPU. Host gaps: the GPU has nothing to do. In "
            "one launch over NVLink rows travel inside the attention kernel, which counts as compute."
        )
    return (
        "On a CPU, compute is what torch's operators take and communication what gloo takes, waiting included. Host "
        "gaps: neither, which is mostly Python."
    )
