# SPDX-License-Identifier: Apache-2.0
"""The page of a training run: what happened, does it agree with one process, the plan of the last step.

A run folder holds ``losses.json``, ``mask.json`` and ``trace.json`` of the run over several ranks and, if it
was replayed, ``replay.json`` of the same steps in one process.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from magi_attention.meta.explain import explain
from magi_attention.meta.plan import Plan
from magi_attention.report.describe import relative_differences

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
    """Writes ``report.html`` into the run folder; ``plan`` is the one of the run's last step."""
    from magi_attention.report import pictures
    from magi_attention.report.describe import plan_facts
    from magi_attention.report.html import Fact, Section, page
    from magi_attention.report.sections import plan_sections

    parallel, replay = result.parallel, result.replay
    ranks = f"{parallel['world']} ranks"
    curves = {ranks: parallel["losses"]}
    facts = [
        Fact(f"{parallel['losses'][0]:.3f} to {parallel['losses'][-1]:.3f}", "loss, first and last step"),
        Fact(f"{parallel['tokens_per_second']:,.0f}", f"tokens/s on {ranks} ({parallel['device']})"),
        Fact(f"{parallel['seconds']:.0f} s", f"for {len(parallel['losses'])} steps"),
    ]
    text = "Both runs begin with the same weights and take the same steps on the same documents in float32."
    if replay is not None:
        curves["one process"] = replay["losses"]
        facts.insert(0, Fact(f"{result.difference:.1e}", f"largest loss difference (<= {LIMIT:.0e})", result.is_equal))
        facts.append(Fact(f"{replay['tokens_per_second']:,.0f}", "tokens/s in one process"))
    else:
        text = "The run was not replayed in one process."
    numbers = explain(plan, element_bytes=4)
    trace = json.loads((folder / "trace.json").read_text())
    arguments = parallel["arguments"]
    source = arguments["data"] or "the sources of the Python standard library"
    lead = (
        f"A Llama-style model of {parallel['parameters'] / 1e6:.1f} M parameters, "
        f"{arguments['seq_len']:,} bytes a step packed from {source}, every document causal on its own, "
        f"attention spread over {ranks}. "
        "The pictures of the plan show the last step."
    )
    sections = [Section("Loss", text, pictures.to_png(pictures.losses(curves)))]
    sections += plan_sections(plan, numbers, trace)
    path = folder / "report.html"
    path.write_text(page(f"Run {folder.name}", lead, facts + plan_facts(plan, numbers), sections), encoding="utf-8")
    return path
