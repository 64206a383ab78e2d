# SPDX-License-Identifier: Apache-2.0
"""The page of a training run: what happened, does it agree with one process, the plan of the last step.

A run folder holds ``losses.json``, ``mask.json`` and ``trace.json`` of the run over several ranks and, if it
was replayed, ``replay.json`` of the same steps in one process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magi_attention.meta.plan import Plan
from magi_attention.tools.report.describe import relative_differences
from magi_attention.tools.report.plan_data import Setting
from magi_attention.tools.report.plan_page import plan_page

LIMIT = 1e-4  # largest relative loss difference between float32 runs that counts as equal


@dataclass(frozen=True)
class RunResult:
    """What the files of a run folder say. ``difference`` is None without a replay."""

    parallel: dict
    replay: dict | None
    difference: float | None

    @property
    def is_equal(self) -> bool:
        return self.difference is None or self.difference <= LIMIT


def read_run(folder: Path) -> RunResult:
    parallel = json.loads((folder / "losses.json").read_text())
    replay_file = folder / "replay.json"
    if not replay_file.exists():
        return RunResult(parallel, None, None)
    replay = json.loads(replay_file.read_text())
    # A difference of nan (a loss that is no number) must count as unequal, hence no max() over it.
    difference = relative_differences(parallel["losses"], replay["losses"])
    return RunResult(parallel, replay, float(difference.max()))


def write_page(folder: Path, result: RunResult, plan: Plan) -> Path:
    """Writes ``report.html`` into the run folder, the page of the plan of the run's last step with what happened above;
    ``plan`` is that plan."""
    parallel = result.parallel
    ranks = f"{parallel['world']} ranks"
    arguments = parallel["arguments"]
    source = arguments["data"] or "the sources of the Python standard library"
    lead = (
        f"A Llama-style model of {parallel['parameters'] / 1e6:.1f} M parameters, "
        f"{arguments['seq_len']:,} bytes a step packed from {source}, every document causal on its own, "
        f"attention spread over {ranks}. The plan shown is that of the last step."
    )
    events = json.loads((folder / "trace.json").read_text())
    path = folder / "report.html"
    run = run_data(result, ranks, measured_times(plan, events))
    text = plan_page([Setting(plan, str(plan.degree), element_bytes=4)], lead, title=f"Run {folder.name}", run=run)
    path.write_text(text, encoding="utf-8")
    return path


def run_data(result: RunResult, ranks: str, times: list[dict[str, list[float]]]) -> dict[str, Any]:
    """What the page says of the run, ready for JSON."""
    parallel, replay = result.parallel, result.replay
    facts = [
        [f"{parallel['losses'][0]:.3f} to {parallel['losses'][-1]:.3f}", "loss, first and last step"],
        [f"{parallel['tokens_per_second']:,.0f}", f"tokens/s on {ranks} ({parallel['device']})"],
        [f"{parallel['seconds']:.0f} s", f"for {len(parallel['losses'])} steps"],
    ]
    curves, differences = [[ranks, _finite(parallel["losses"])]], None
    text = "The run was not replayed in one process."
    if replay is not None:
        text = "Both runs begin with the same weights and take the same steps on the same documents in float32."
        curves.append(["one process", _finite(replay["losses"])])
        differences = _finite(relative_differences(parallel["losses"], replay["losses"]))
        kind = "good" if result.is_equal else "bad"
        facts.insert(0, [f"{result.difference:.1e}", f"largest loss difference (<= {LIMIT:.0e})", kind])
        facts.append([f"{replay['tokens_per_second']:,.0f}", "tokens/s in one process"])
    return {
        "facts": facts, "text": text, "curves": curves, "differences": differences, "limit": LIMIT, "times": times,
    }  # fmt: skip


def _finite(values: Sequence[float]) -> list[float | None]:
    """JSON has no nan."""
    return [float(value) if math.isfinite(value) else None for value in values]


def measured_times(plan: Plan, events: Sequence[dict]) -> list[dict[str, list[float]]]:
    """Per rank, in microseconds from the first event of all: start and arrival of the rows of each stage, and start and
    end of each computation, that of its own keys first. What did not happen takes no time.

    ``events`` hold rank, lane ("compute" or "comm"), stage (-1 is the host), start and end in seconds.
    """
    origin = min((event["start"] for event in events), default=0.0)
    stages = plan.num_stages
    times: list[dict[str, list[float]]] = [
        {"starts": [0.0] * stages, "arrive": [0.0] * stages, "compute": [0.0] * (2 * stages + 2)}
        for _ in range(plan.cp_size)
    ]
    for event in events:
        of_rank, stage = times[event["rank"]], event["stage"]
        start, end = (round((event[name] - origin) * 1e6, 2) for name in ("start", "end"))
        if event["lane"] == "comm":
            of_rank["starts"][stage], of_rank["arrive"][stage] = start, end
        else:
            of_rank["compute"][2 * stage + 2 : 2 * stage + 4] = [start, end]
    return times
