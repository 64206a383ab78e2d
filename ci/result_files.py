# SPDX-License-Identifier: Apache-2.0
"""Results files of our benchmarks as cells of one form; no GPU and no torch is needed to read them.

A cell is one operation (forward, cast, fill, ...) on one mask or kind of rows, of one size and shape, with the speed of
every implementation: TFLOP/s of attention, GB/s of what moves rows, plans a second, tokens a second of training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

KERNEL, CONTEXT_PARALLEL = "kernel", "context_parallel"  # benchmarks
GROUP_COLLECTIVES, RANGE_OPS = "group_collectives", "range_ops"
PLANNER, TRAIN, SPARSE = "planner", "train", "sparse"
PROGRAMS = {  # of benchmarks/, that write them
    KERNEL: "kernel.py", CONTEXT_PARALLEL: "context_parallel.py", GROUP_COLLECTIVES: "group_collectives.py",
    RANGE_OPS: "group_collectives.py rows", PLANNER: "planner.py", TRAIN: "train.py", SPARSE: "sparse/sparse_bench.py",
}  # fmt: skip
# What is called ours: the first that was measured. Where there is one it is the public function as a user calls it.
OURS = {
    KERNEL: ("magi",), CONTEXT_PARALLEL: ("magi", "magi_fused", "magi_a2av_1"),
    GROUP_COLLECTIVES: ("native", "all-to-all"), RANGE_OPS: ("magi",), PLANNER: ("magi",), TRAIN: ("magi",),
    SPARSE: ("magi",),
}  # fmt: skip
SIZES = {KERNEL: "seqlens", CONTEXT_PARALLEL: "tokens", GROUP_COLLECTIVES: "rows"}  # the setting with the sizes
_SHAPE = ("heads", "head_dim", "dtype")


class Incomparable(Exception):
    """Baseline and run cannot be compared; the text says why and what to do."""


@dataclass(frozen=True, order=True)
class Cell:
    """What was timed. ``samples`` are the draws of documents over which the time is a mean; with several GPUs,
    ``world``, ``seqlen`` is the tokens of one. For rows ``mask`` says what ``seqlen`` counts."""

    direction: str
    mask: str
    seqlen: int
    heads: tuple[int, int]
    head_dim: int
    dtype: str
    samples: int
    world: int = 1

    @property
    def size(self) -> str:
        """``"4K"`` for 4096 tokens."""
        return f"{self.seqlen // 1024}K" if self.seqlen % 1024 == 0 else str(self.seqlen)

    def __str__(self) -> str:
        is_usual = self.heads == (64, 8) or self.mask == "rows"
        heads = "" if is_usual else f", {self.heads[0]} on {self.heads[1]} heads"
        ranks = f" on {self.world} ranks" if self.world > 1 else ""
        return f"{self.direction} {self.mask} {self.size}{heads}{ranks}"


# (cell, implementation, its row: "speed", and "reason" where there is none). "ms" and "noise" are in a row where the
# record has them: milliseconds of one call, and half of what lies between the 10% and the 90% quantile of its repeats,
# as a share of that.
Found = Iterator[tuple[Cell, str, dict]]


def _spread(middle: float | None, low: float | None, high: float | None) -> float | None:
    return (high - low) / 2 / middle if middle and low is not None and high is not None else None


def _attention(rows: list[dict], settings: list[dict], sizes: str, samples: str) -> Found:
    """Rows with mask, seqlen, name, direction, tflops and perhaps a reason."""
    for row in rows:
        found = [s for s in settings if row["mask"] in s["masks"] and row["seqlen"] in s[sizes]]
        if not found:
            raise Incomparable(f"There are no settings for {row['mask']}, {row['seqlen']} tokens; measure it anew.")
        given = found[0] | ({"heads": row["heads"]} if row.get("heads") else {})  # of several, those of the row
        shape = {key: tuple(v) if isinstance(v := given[key], list) else v for key in _SHAPE}
        drawn = found[0][samples] if row["mask"].startswith("varlen") else 1
        world = found[0].get("world", 1)
        cell = Cell(row["direction"], row["mask"], row["seqlen"], samples=drawn, world=world, **shape)
        times = {"ms": row.get("ms"), "noise": row.get("noise")}
        yield cell, row["name"], {"speed": row["tflops"], "reason": row.get("reason"), **times}


def _kernel(data: Mapping, settings: list[dict]) -> Found:
    rows = []
    for row in data["results"]:
        us = row.get("median_us")
        noise = _spread(us, row.get("p10_us"), row.get("p90_us"))
        rows.append({**row, "ms": us / 1e3 if us else None, "noise": noise})
    return _attention(rows, settings, "seqlens", "samples")


def _context_parallel(data: Mapping, settings: list[dict]) -> Found:
    rows = []
    for cell in data["cells"]:
        for direction in ("forward", "backward", "both"):
            times = cell[direction] or {}
            rows.append({
                "mask": cell["mask"], "seqlen": cell["tokens_per_gpu"], "name": cell["name"], "direction": direction,
                "tflops": times.get("tflops", 0.0), "reason": cell["reason"], "ms": times.get("ms"),
                "noise": _spread(times.get("ms"), times.get("ms_p10"), times.get("ms_p90")),
            })  # fmt: skip
    return _attention(rows, settings, "tokens", "packs")


def _group_collectives(data: Mapping, settings: list[dict]) -> Found:
    """Copies between the same GPUs, and the same rows by all-to-all and by collectives of torch, are peers."""
    for row in data["results"]:
        (s,) = settings
        for what, collective in (("cast", "all-gather"), ("reduce", "reduce-scatter")):
            cell = Cell(what, "rows", row["rows"], (s["heads"], s["heads"]), s["head_dim"], "bf16", 1, s["world"])
            ways = {"native": what, "copy": "copy", "all-to-all": f"{what} by all-to-all", "torch": collective}
            for name, timed in ways.items():
                if us := row["us"].get(timed):
                    noise = _spread(us, *row.get("spread_us", {}).get(timed, (None, None)))
                    yield cell, name, {"speed": row["received_bytes"] / us / 1e3, "ms": us / 1e3, "noise": noise}


def _range_ops(data: Mapping, settings: list[dict]) -> Found:
    """A plain copy of rows as wide is a peer of all."""
    copies = {row["width"]: row["gb_per_s"] for row in data["results"] if row["case"] == "copy"}
    for row in data["results"]:
        if row["case"] == "copy":
            continue
        cell = Cell(row["case"], "rows of", row["width"], (0, 0), 0, "bf16", 1)
        yield cell, row["by"], {"speed": row["gb_per_s"]}
        yield cell, "copy", {"speed": copies[row["width"]]}


def _planner(data: Mapping, settings: list[dict]) -> Found:
    """The parts of the time are beside it, as variants of ours."""
    (s,) = settings
    for row in data["results"]:
        cell = Cell("plan", row["mask"], row["tokens"], tuple(s["heads"]), s["head_dim"], "none", 1, row["ranks"])
        noise = _spread(row["ms"], row["p10_ms"], row["p90_ms"])
        yield cell, "magi", {"speed": 1e3 / row["ms"], "ms": row["ms"], "noise": noise}
        for part, ms in row["parts_ms"].items():
            yield cell, f"magi_{part}", {"speed": 1e3 / ms, "ms": ms}


def _train(data: Mapping, settings: list[dict]) -> Found:
    (s,) = settings
    for row in data["results"]:
        shape = (tuple(s["heads"]), s["head_dim"], s["dtype"])
        cell = Cell("step", "varlen_causal", row["seq_len"], *shape, 1, s["world"])
        noise = _spread(row["ms"], row["p10_ms"], row["p90_ms"])
        speed = row["tokens_per_second"] or 0.0
        yield cell, row["name"], {"speed": speed, "reason": row["reason"], "ms": row["ms"], "noise": noise}


_READERS: dict[str, Callable[[Mapping, list[dict]], Found]] = {
    KERNEL: _kernel, CONTEXT_PARALLEL: _context_parallel, GROUP_COLLECTIVES: _group_collectives, RANGE_OPS: _range_ops,
    PLANNER: _planner, TRAIN: _train, SPARSE: _kernel,
}  # fmt: skip
_FIELDS = {
    # ahead of KERNEL, all of whose fields it has
    SPARSE: {"mask", "seqlen", "name", "tflops", "direction", "area", "density"},
    KERNEL: {"mask", "seqlen", "name", "tflops", "direction"},
    GROUP_COLLECTIVES: {"rows", "received_bytes", "us"},
    RANGE_OPS: {"width", "case", "by", "gb_per_s"},
    PLANNER: {"mask", "tokens", "ranks", "ms", "parts_ms"},
    TRAIN: {"name", "seq_len", "tokens_per_second"},
}
_SPEEDS = {
    KERNEL: ("tflops", "TFLOP/s"), CONTEXT_PARALLEL: ("tflops", "TFLOP/s"), GROUP_COLLECTIVES: ("bandwidth", "GB/s"),
    RANGE_OPS: ("bandwidth", "GB/s"), PLANNER: ("speed", "plans/s"), TRAIN: ("speed", "tokens/s"),
    SPARSE: ("tflops", "TFLOP/s"),
}  # fmt: skip


def _benchmark_of(data: object) -> str | None:
    """Which benchmark wrote it; None if none of ours."""
    if not isinstance(data, Mapping):
        return None
    if data.get("cells"):
        return CONTEXT_PARALLEL
    rows = data.get("results")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        return None
    return next((name for name, fields in _FIELDS.items() if all(fields <= set(row) for row in rows)), None)


@dataclass
class Run:
    """Results by cell and implementation; ``settings`` are the command lines of ``benchmark`` that made them."""

    environment: dict
    settings: list[dict]
    results: dict[Cell, dict[str, dict]]
    benchmark: str = KERNEL
    missing: dict[str, str] = field(default_factory=dict)  # peers that were not installed -> how they are had

    @property
    def ours(self) -> str:
        measured = {name for cell in self.results for name in self.speeds(cell)}
        return next((name for name in OURS[self.benchmark] if name in measured), OURS[self.benchmark][0])

    @property
    def world(self) -> int:
        """GPUs that it takes to measure this."""
        return max((cell.world for cell in self.results), default=1)

    @property
    def speed(self) -> tuple[str, str]:
        """What speed is called as a measure, and its unit."""
        return _SPEEDS[self.benchmark]

    def speeds(self, cell: Cell) -> dict[str, float]:
        """The speed of every implementation that could run the cell."""
        found = self.results.get(cell, {})
        return {name: row["speed"] for name, row in found.items() if row["speed"] > 0 and not row.get("reason")}

    def noise(self, cell: Cell, name: str) -> float | None:
        """The spread of its repeats, as a share; None where the record does not tell."""
        return self.results.get(cell, {}).get(name, {}).get("noise")


def parse(data: object, where: str) -> Run:
    """A results file that was read; ``Incomparable`` if it is not one of our benchmarks."""
    benchmark = _benchmark_of(data)
    if benchmark is None:
        names = ", ".join(f"benchmarks/{program}" for program in PROGRAMS.values())
        raise Incomparable(f"{where} holds no results of {names}; give a file that their --out wrote.")
    assert isinstance(data, Mapping)
    settings = data["settings"] if isinstance(data["settings"], list) else [data["settings"]]
    results: dict[Cell, dict[str, dict]] = {}
    try:
        for cell, name, row in _READERS[benchmark](data, settings):
            results.setdefault(cell, {})[name] = row
    except Incomparable as reason:
        raise Incomparable(f"{where}: {reason}") from None
    return Run(dict(data["environment"]), settings, results, benchmark, dict(data.get("missing", {})))


def load(path: Path) -> Run:
    """``parse`` of a file."""
    try:
        return parse(json.loads(path.read_text()), str(path))
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as failure:
        raise Incomparable(f"{path} cannot be read ({failure!r}); measure it anew.") from None
