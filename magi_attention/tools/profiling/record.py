# SPDX-License-Identifier: Apache-2.0
"""Runs a script under torch's profiler, on every rank: `torchrun ... -m magi_attention.tools.profiling.record`.

    torchrun --nproc-per-node 2 -m magi_attention.tools.profiling.record --out FOLDER --skip 2 --steps 2 train.py WORDS

Steps are those of the first optimizer that takes one. Each rank writes ``FOLDER/rank<N>.trace.json``: what the profiler
exports, the stages of every ``attend`` as lanes of a process of their own, and under the key "magi" the rank and what
its plans predict. With ``--nvtx`` the ranks emit NVTX ranges for Nsight Systems in its place and write nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, schedule

from magi_attention.api.planning.rates import device_name
from magi_attention.common.intervals import subtract_intervals, total_length
from magi_attention.config.rates import MachineRates, find_rates, rates_file, read_rates
from magi_attention.kernels.registry import default_registry
from magi_attention.meta.plan import Plan
from magi_attention.meta.predict.cost import CostModel, timeline
from magi_attention.tools.profiling.nvtx import switch_profile
from magi_attention.tools.profiling.trace import ANCHOR, OWN_KEY, STAGES_PID

SKIP, STEPS = 2, 2


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the traces")
    parser.add_argument("--skip", type=int, default=SKIP, help="optimizer steps before the first that is profiled")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps that are profiled")
    parser.add_argument("--whole", action="store_true", help="profile the script from its begin to its end")
    parser.add_argument("--nvtx", action="store_true", help="NVTX ranges for nsys in place of torch's profile")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(argv)


def predicted(plan: Plan, rank: int, element_bytes: int, rates: MachineRates) -> dict[str, Any]:
    """What the cost model says of one forward of ``plan`` on ``rank``; seconds on the machine of ``rates``."""
    model = CostModel.for_plan(plan, rates, element_bytes)
    bars = [bar for bar in timeline(plan, model) if bar["rank"] == rank]
    compute, comm = (  # picoseconds
        np.array([[b["start"], b["end"]] for b in bars if b["lane"] == lane]).reshape(-1, 2) * 1e12
        for lane in ("compute", "comm")
    )
    exposed = subtract_intervals(comm.astype(np.int64), compute.astype(np.int64))
    return {
        "share": float(plan.areas[rank] / max(int(plan.areas.sum()), 1)),
        "compute_s": total_length(compute) / 1e12,
        "communication_s": total_length(comm) / 1e12,
        "exposed_s": total_length(exposed) / 1e12,
        "rates": rates.words,
        "is_measured": rates.is_measured,
    }


class Recorder:
    """The profile of this process. ``step`` is called after every optimizer step."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.taken = options, 0
        self.path: Path | None = None  # once the trace is written
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.anchor_s = 0.0
        self.calls: list[tuple[Plan, int, int, list[dict]]] = []  # plan, rank in it, bytes of an element, stages
        self._first: Any = None
        self._instruments = default_registry().instruments
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        steps = None
        if not options.whole:  # the last step before the profiled ones starts the profiler up
            steps = schedule(wait=options.skip - 1, warmup=1, active=options.steps, repeat=1)
        self.profiler = profile(activities=activities, schedule=steps, on_trace_ready=self.write)

    def run(self) -> None:
        """Runs the script to its end as if it had been started itself. ``SystemExit`` if too few steps were taken."""
        script = self.options.script
        sys.argv = [script, *self.options.arguments]
        sys.path[0] = str(Path(script).resolve().parent)
        hook = register_optimizer_step_post_hook(self._after)
        try:
            if self.options.nvtx:
                switch_profile(0, self.options.skip, self._last, [self.rank])
                self._script()
            else:
                self._profiled()
        finally:
            hook.remove()
            self._instruments.observe = None
        if self.path is None and not self.options.whole and self.taken < self._last:
            raise SystemExit(
                f"magi profile: the script took {self.taken} optimizer steps and {self._last} were asked for; lower "
                "--skip and --steps, or give --whole."
            )

    def _profiled(self) -> None:
        self.profiler.start()
        if self.options.whole:
            self._anchor()
            with record_function("magi::whole"):
                self._script()
        else:
            self._script()
        if self.path is None and self._is_recording:
            self.profiler.stop()

    def _script(self) -> None:
        try:
            runpy.run_path(self.options.script, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise

    @property
    def _last(self) -> int:
        return self.options.skip + self.options.steps

    @property
    def _is_recording(self) -> bool:
        active = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
        return self.options.whole or self.profiler.current_action in active

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._first is None:
            self._first = optimizer
        if optimizer is self._first:
            self.step()

    def step(self) -> None:
        self.taken += 1
        if self.options.nvtx:
            switch_profile(self.taken, self.options.skip, self._last, [self.rank])
        elif not self.options.whole and self.taken <= self._last:
            self.profiler.step()
            if self._is_recording and not self.anchor_s:
                self._anchor()

    def _anchor(self) -> None:
        """Notes the host clock beside an event of the trace, and from here on every distributed call."""
        self.anchor_s = time.perf_counter()
        with record_function(ANCHOR):
            self._instruments.observe = self._observe

    def _observe(self, plan: Plan, rank: int, q: torch.Tensor) -> list[dict]:
        events: list[dict] = []
        self.calls.append((plan, rank, q.element_size(), events))
        return events

    def write(self, profiler: profile) -> None:
        """Exports the trace and adds what is ours."""
        self._instruments.observe = None
        path = self.options.out / f"rank{self.rank}.trace.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        profiler.export_chrome_trace(str(part))
        trace = json.loads(part.read_text(encoding="utf-8"))
        trace["traceEvents"] += self._stage_events(trace["traceEvents"])
        forwards: dict[tuple[str, int, int], dict[str, Any]] = {}
        # The GPU is asked for here, because the script chose it after this process had begun.
        device, entries = device_name(), read_rates(rates_file())
        for plan, rank, element_bytes, _ in self.calls:
            key = (plan.fingerprint, rank, element_bytes)
            if key not in forwards:
                rates = find_rates(entries, device, plan.cp_size) or MachineRates()
                forwards[key] = {"calls": 0, **predicted(plan, rank, element_bytes, rates)}
            forwards[key]["calls"] += 1
        own = {"rank": self.rank, "world": self.world, "device": device, "predicted": list(forwards.values())}
        trace[OWN_KEY] = own
        part.write_text(json.dumps(trace), encoding="utf-8")
        self.path = part.rename(path)

    def _stage_events(self, events: list[dict]) -> list[dict]:
        """The stages of all calls on the clock of the trace, in lanes of their own.

        The times of `attend(trace=)` are those of the host: on a GPU they say when work was launched, not when it ran.
        """
        anchor = next((e for e in events if e.get("name") == ANCHOR and e.get("ph") == "X"), None)
        if anchor is None:
            return []
        kind = "launched" if torch.cuda.is_available() else "ran"
        return [
            {
                "ph": "X", "cat": "magi_stage", "pid": STAGES_PID, "tid": f"{e['lane']} ({kind})",
                "name": "local keys" if e["stage"] < 0 else f"stage {e['stage']}",
                "ts": anchor["ts"] + (e["start"] - self.anchor_s) * 1e6, "dur": (e["end"] - e["start"]) * 1e6,
                "args": {"lane": e["lane"], "stage": e["stage"]},
            }
            for *_, entries in self.calls for e in entries
        ]  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    if options.skip < 1 or options.steps < 1:
        raise SystemExit("magi profile: --skip and --steps must be 1 or more; the profiler starts up in the first.")
    if options.nvtx and not torch.cuda.is_available():
        raise SystemExit("magi profile: --nvtx marks the timeline of a GPU, and there is none; leave it out.")
    Recorder(options).run()


if __name__ == "__main__":
    main()
