# SPDX-License-Identifier: Apache-2.0
"""What a trace of torch's profiler says about one rank: when it computed, communicated, and did neither.

The trace is the JSON of ``torch.profiler.profile.export_chrome_trace``, in the Chrome trace event format: complete
events (``ph`` "X") with ``ts`` and ``dur`` in microseconds. On a GPU, kernels (``cat`` "kernel") and copies
("gpu_memcpy", "gpu_memset") are what counts, each on its ``args.device``, and ``args.correlation`` names the call of
"cuda_runtime" or "cuda_driver" that launched it. On a CPU, operators count ("cpu_op"), and gloo's collectives, which
are annotations of its own threads ("user_annotation" with a name "gloo:..."). Times here are int64 nanoseconds on the
clock of the trace.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from magi_attention.common.intervals import intersect_intervals, merge_intervals, subtract_intervals, total_length
from magi_attention.errors import ContractError
from magi_attention.kernels.instruments import BACKWARD_RANGE, FORWARD_RANGE

Event = dict[str, Any]
STEP = re.compile(r"ProfilerStep#\d+$|magi::whole$")
ANCHOR = "magi::anchor"
OWN_KEY = "magi"  # of what `record` adds to the trace
STAGES_PID = "magi attention"  # process of the events that `record` adds
_DIRECTIONS = {"forward": FORWARD_RANGE, "backward": BACKWARD_RANGE}
# Kernels that move rows between ranks: NCCL's, ours over NVLink, NVSHMEM's, torch's symmetric memory.
_COMMUNICATION = re.compile(
    r"nccl|nvshmem|symm_(put|unpack|recv_reduce|reduce)\b|(put|wait)_signal\b|one_shot_|two_shot_|multimem_"
)
_BETWEEN_GPUS = re.compile(r"PtoP|Peer", re.IGNORECASE)
_CPU_COMMUNICATION = re.compile(r"(gloo|mpi|ucc):")
# Operators that wait for others, or hold operators that do.
_NO_COMPUTE = ("c10d", "_c10d_functional", "autograd", "torch", "profiler", "magi_attention", "symm_mem")


@dataclass(frozen=True)
class Profile:
    """One rank on one device. Intervals are int64 ``(n, 2)``, merged.

    ``window`` is from the start of the first step to the end of the last, or of the last kernel. ``names``: kernels or
    operators with nanoseconds and count, longest first. ``attention`` has, for each direction, the number of calls of
    this rank and the merged intervals of their compute and communication, and ``stages`` the stages of
    ``attend(trace=)`` as dicts of lane, stage, start, end. ``predicted`` is what ``record`` noted of the plans.
    """

    rank: int
    world: int
    device: str
    is_gpu: bool
    steps: int
    window: tuple[int, int]
    compute: np.ndarray
    communication: np.ndarray
    copies: np.ndarray
    names: list[tuple[str, int, int]]
    attention: dict[str, tuple[int, np.ndarray, np.ndarray]] = field(default_factory=dict)
    stages: list[dict[str, Any]] = field(default_factory=list)
    predicted: list[dict[str, Any]] = field(default_factory=list)

    @property
    def exposed(self) -> np.ndarray:
        """When the rank communicated and computed nothing."""
        return subtract_intervals(self.communication, self.compute)

    @property
    def gaps(self) -> np.ndarray:
        """When it did nothing that is seen: on a GPU the host gave it no work, on a CPU Python ran."""
        busy = np.concatenate([self.compute, self.communication, self.copies])
        return subtract_intervals(np.array([self.window], dtype=np.int64), busy)


def read_trace(path: Path) -> dict[str, Any]:
    """The JSON of a trace file, also if it is compressed; ``ContractError`` if it is none."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            trace = json.load(file)
        if isinstance(trace, list):  # the format allows the bare list
            trace = {"traceEvents": trace}
        trace["traceEvents"]
    except (ValueError, KeyError, TypeError, EOFError, gzip.BadGzipFile) as error:
        raise ContractError(
            f"{path} is no trace of torch's profiler ({error}); give what export_chrome_trace wrote."
        ) from None
    return trace


def profiles_of(trace: dict[str, Any], source: str = "The trace") -> list[Profile]:
    """One profile for each GPU that the trace has kernels of, else one of the CPU.

    Raises:
        ContractError: no step is in the trace, so nobody knows what to look at.
    """
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    steps = [e for e in events if e.get("cat") == "user_annotation" and STEP.match(e["name"])]
    if not steps:
        raise ContractError(f"{source} has no ProfilerStep#N; call profiler.step() after every step.")
    by_device: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            by_device[int(event["args"]["device"])].append(event)
    own, info = trace.get(OWN_KEY, {}), trace.get("distributedInfo", {})
    common = {
        "rank": int(own.get("rank", info.get("rank", 0))),
        "world": int(own.get("world", info.get("world_size", 1))),
        "steps": len(steps),
        "predicted": own.get("predicted", []),
    }
    window = (int(intervals_of(steps)[:, 0].min()), int(intervals_of(steps)[:, 1].max()))
    if not by_device:
        return [_cpu_profile(events, window, own.get("device", "CPU"), common)]
    names = {p.get("id"): p.get("name") for p in trace.get("deviceProperties", [])}
    launches = {e["args"]["correlation"]: e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    ranges = _ranges(events)
    return [
        _gpu_profile(work, launches, ranges, window, f"{names.get(gpu) or 'GPU'} ({gpu})", common)
        for gpu, work in sorted(by_device.items())
    ]


def intervals_of(events: Iterable[Event]) -> np.ndarray:
    """int64 ``(n, 2)``, one a row; not merged."""
    times = [(e["ts"], e["ts"] + e["dur"]) for e in events]
    return np.rint(np.array(times, dtype=np.float64).reshape(-1, 2) * 1e3).astype(np.int64)


def _merged(events: Iterable[Event], window: tuple[int, int]) -> np.ndarray:
    return intersect_intervals(merge_intervals(intervals_of(events)), np.array([window], dtype=np.int64))


def _ranges(events: Sequence[Event]) -> dict[str, list[Event]]:
    """The ranges of distributed calls on the host, by direction."""
    return {
        direction: [e for e in events if e.get("cat") == "user_annotation" and e["name"] == name]
        for direction, name in _DIRECTIONS.items()
    }


def _gpu_profile(
    work: list[Event], launches: dict[Any, Event], ranges: dict[str, list[Event]], window: tuple[int, int],
    device: str, common: dict[str, Any],
) -> Profile:  # fmt: skip
    # A kernel belongs to the steps if its launch does: the GPU is behind the host.
    work = [e for e in work if _is_inside(launches.get(e["args"].get("correlation"), e), window)]
    if work:
        window = (window[0], max(window[1], int(intervals_of(work)[:, 1].max())))
    kinds = {"compute": [], "communication": [], "copies": []}
    for event in work:
        kinds[_kind(event)].append(event)
    attention = {}
    for direction, calls in ranges.items():
        inside = [e for e in work if _is_launched_in(launches.get(e["args"].get("correlation")), calls)]
        parts = [[e for e in inside if _kind(e) == kind] for kind in ("compute", "communication")]
        attention[direction] = (len(calls), *(_merged(part, window) for part in parts))
    return Profile(
        **common, device=device, is_gpu=True, window=window, attention=attention, names=_sums(kinds["compute"], False),
        **{kind: _merged(found, window) for kind, found in kinds.items()},
    )  # fmt: skip


def _kind(event: Event) -> str:
    if event["cat"] == "kernel":
        return "communication" if _COMMUNICATION.search(event["name"]) else "compute"
    return "communication" if _BETWEEN_GPUS.search(event["name"]) else "copies"


def _is_inside(event: Event, window: tuple[int, int]) -> bool:
    return window[0] <= event["ts"] * 1e3 < window[1]


def _is_launched_in(launch: Event | None, calls: Sequence[Event]) -> bool:
    if launch is None:
        return False
    thread = (launch.get("pid"), launch.get("tid"))
    return any(c["ts"] <= launch["ts"] <= c["ts"] + c["dur"] and (c.get("pid"), c.get("tid")) == thread for c in calls)


def _cpu_profile(events: list[Event], window: tuple[int, int], device: str, common: dict[str, Any]) -> Profile:
    computing = [e for e in events if e.get("cat") == "cpu_op" and _is_compute(e["name"])]
    gloo = [e for e in events if e.get("cat") == "user_annotation" and _CPU_COMMUNICATION.match(e["name"])]
    lanes = [e for e in events if e.get("pid") == STAGES_PID]
    stages = [
        {"lane": e["args"]["lane"], "stage": e["args"]["stage"], "start": a, "end": b}
        for e, (a, b) in zip(lanes, intervals_of(lanes).tolist())
    ]
    compute, communication = _merged(computing, window), _merged(gloo, window)
    attention = {}
    for direction, calls in _ranges(events).items():
        spans = _merged(calls, window)
        attention[direction] = (len(calls), *(intersect_intervals(x, spans) for x in (compute, communication)))
    return Profile(
        **common, device=device, is_gpu=False, window=window, compute=compute, communication=communication,
        copies=np.zeros((0, 2), dtype=np.int64), attention=attention, names=_sums(computing, True), stages=stages,
    )  # fmt: skip


def _is_compute(name: str) -> bool:
    space, colons, _ = name.partition("::")
    return bool(colons) and space not in _NO_COMPUTE


def _sums(events: Iterable[Event], is_nested: bool) -> list[tuple[str, int, int]]:
    """Kernels or operators by name. An operator that calls others (``is_nested``) has the time that is left to it."""
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    stack: list[tuple[Any, float, str]] = []
    for event in sorted(events, key=lambda e: (str(e.get("pid")), str(e.get("tid")), e["ts"], -e["dur"])):
        thread, end = (event.get("pid"), event.get("tid")), event["ts"] + event["dur"]
        nanoseconds, name = round(event["dur"] * 1e3), event["name"]
        while stack and (stack[-1][0] != thread or stack[-1][1] <= event["ts"]):
            stack.pop()
        if stack and is_nested:
            found[stack[-1][2]][0] -= nanoseconds
        stack.append((thread, end, name))
        found[name][0] += nanoseconds
        found[name][1] += 1
    return sorted(((name, total, count) for name, (total, count) in found.items()), key=lambda x: (-x[1], x[0]))


def milliseconds(intervals: np.ndarray) -> float:
    return total_length(intervals) / 1e6


def summary_of(profile: Profile) -> dict[str, Any]:
    """The profile in plain numbers: milliseconds of a step, and shares of the window.

    Keys: ``rank, device, steps, step_ms, compute_ms, communication_ms, exposed_ms, copies_ms, gaps_ms,
    hidden_share`` (of the communication; None without any), ``attention``: for each direction ``calls`` of a step, and
    ``compute_ms, communication_ms, exposed_ms`` of a step, and ``top``: the ten longest names with ``ms`` of a step.
    """
    per_step = 1 / profile.steps
    communication, exposed = milliseconds(profile.communication), milliseconds(profile.exposed)
    attention = {}
    for direction, (calls, compute, moved) in profile.attention.items():
        attention[direction] = {
            "calls": calls * per_step,
            "compute_ms": milliseconds(compute) * per_step,
            "communication_ms": milliseconds(moved) * per_step,
            "exposed_ms": milliseconds(subtract_intervals(moved, profile.compute)) * per_step,
        }
    return {
        "rank": profile.rank,
        "device": profile.device,
        "steps": profile.steps,
        "step_ms": (profile.window[1] - profile.window[0]) / 1e6 * per_step,
        "compute_ms": milliseconds(profile.compute) * per_step,
        "communication_ms": communication * per_step,
        "exposed_ms": exposed * per_step,
        "copies_ms": milliseconds(profile.copies) * per_step,
        "gaps_ms": milliseconds(profile.gaps) * per_step,
        "hidden_share": 1 - exposed / communication if communication else None,
        "attention": attention,
        "top": [{"name": n, "ms": t / 1e6 * per_step, "count": c} for n, t, c in profile.names[:10]],
    }
