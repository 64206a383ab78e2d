# SPDX-License-Identifier: Apache-2.0
"""Results files of our benchmarks as cells of one form; no GPU and no torch is needed to read them.

A cell is one operation (forward, cast, fill, ...) on one mask or kind of rows, of one size and shape, with the speed of
every implementation: TFLOP/s of attention, GB/s of what moves rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

KERNEL, CONTEXT_PARALLEL = "kernel", "context_parallel"  # benchmarks, by the names of their files
GROUP_COLLECTIVES, RANGE_OPS = "group_collectives", "range_ops"
OURS = {KERNEL: "magi", CONTEXT_PARALLEL: "magi_fused", GROUP_COLLECTIVES: "native", RANGE_OPS: "magi"}
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
        return f"{self.direction} {self.mask} {self.size}" + (f" on {self.world} GPUs" if self.world > 1 else "")


# (cell, implementation, its row: "speed", and "reason" where there is none)
Found = Iterator[tuple[Cell, str, dict]]


def _attention(rows: list[dict], settings: list[dict], sizes: str, samples: str) -> Found:
    """Rows with mask, seqlen, name, direction, tflops and perhaps a reason."""
    for row in rows:
        found = [s for s in settings if row["mask"] in s["masks"] and row["seqlen"] in s[sizes]]
        if not found:
            raise Incomparable(f"There are no settings for {row['mask']}, {row['seqlen']} tokens; measure it anew.")
        shape = {key: tuple(v) if isinstance(v := found[0][key], list) else v for key in _SHAPE}
        drawn = found[0][samples] if row["mask"].startswith("varlen") else 1
        world = found[0].get("world", 1)
        cell = Cell(row["direction"], row["mask"], row["seqlen"], samples=drawn, world=world, **shape)
        yield cell, row["name"], {"speed": row["tflops"], "reason": row.get("reason")}


def _kernel(data: Mapping, settings: list[dict]) -> Found:
    return _attention(data["results"], settings, "seqlens", "samples")


def _context_parallel(data: Mapping, settings: list[dict]) -> Found:
    rows = [
        {
            "mask": cell["mask"], "seqlen": cell["tokens_per_gpu"], "name": cell["name"], "direction": direction,
            "tflops": (cell[direction] or {}).get("tflops", 0.0), "reason": cell["reason"],
        }
        for cell in data["cells"]
        for direction in ("forward", "backward", "both")
    ]  # fmt: skip
    return _attention(rows, settings, "tokens", "packs")


def _group_collectives(data: Mapping, settings: list[dict]) -> Found:
    """Copies between the same GPUs, and the same by all-to-all, are peers."""
    for row in data["results"]:
        (s,) = settings
        for what in ("cast", "reduce"):
            cell = Cell(what, "rows", row["rows"], (s["heads"], s["heads"]), s["head_dim"], "bf16", 1, s["world"])
            for name, us in (("native", what), ("copy", "copy"), ("all-to-all", f"{what} by all-to-all")):
                yield cell, name, {"speed": row["received_bytes"] / row["us"][us] / 1e3}


def _range_ops(data: Mapping, settings: list[dict]) -> Found:
    """A plain copy of rows as wide is a peer of all."""
    copies = {row["width"]: row["gb_per_s"] for row in data["results"] if row["case"] == "copy"}
    for row in data["results"]:
        if row["case"] == "copy":
            continue
        cell = Cell(row["case"], "rows of", row["width"], (0, 0), 0, "bf16", 1)
        yield cell, row["by"], {"speed": row["gb_per_s"]}
        yield cell, "copy", {"speed": copies[row["width"]]}


_READERS: dict[str, Callable[[Mapping, list[dict]], Found]] = {
    KERNEL: _kernel, CONTEXT_PARALLEL: _context_parallel, GROUP_COLLECTIVES: _group_collectives, RANGE_OPS: _range_ops,
}  # fmt: skip
_FIELDS = {
    KERNEL: {"mask", "seqlen", "name", "tflops", "direction"},
    GROUP_COLLECTIVES: {"rows", "received_bytes", "us"},
    RANGE_OPS: {"width", "case", "by", "gb_per_s"},
}


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

    @property
    def ours(self) -> str:
        return OURS[self.benchmark]

    @property
    def world(self) -> int:
        """GPUs that it takes to measure this."""
        return max((cell.world for cell in self.results), default=1)

    @property
    def speed(self) -> tuple[str, str]:
        """What speed is called as a measure, and its unit."""
        is_attention = self.benchmark in (KERNEL, CONTEXT_PARALLEL)
        return ("tflops", "TFLOP/s") if is_attention else ("bandwidth", "GB/s")

    def speeds(self, cell: Cell) -> dict[str, float]:
        """The speed of every implementation that could run the cell."""
        found = self.results.get(cell, {})
        return {name: row["speed"] for name, row in found.items() if row["speed"] > 0 and not row.get("reason")}


def parse(data: object, where: str) -> Run:
    """A results file that was read; ``Incomparable`` if it is not one of our benchmarks."""
    benchmark = _benchmark_of(data)
    if benchmark is None:
        names = ", ".join(f"benchmarks/{name}.py" for name in OURS)
        raise Incomparable(f"{where} holds no results of {names}; give a file that their --out wrote.")
    assert isinstance(data, Mapping)
    settings = data["settings"] if isinstance(data["settings"], list) else [data["settings"]]
    results: dict[Cell, dict[str, dict]] = {}
    try:
        for cell, name, row in _READERS[benchmark](data, settings):
            results.setdefault(cell, {})[name] = row
    except Incomparable as reason:
        raise Incomparable(f"{where}: {reason}") from None
    return Run(dict(data["environment"]), settings, results, benchmark)


def load(path: Path) -> Run:
    """``parse`` of a file."""
    try:
        return parse(json.loads(path.read_text()), str(path))
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as failure:
        raise Incomparable(f"{path} cannot be read ({failure!r}); measure it anew.") from None
