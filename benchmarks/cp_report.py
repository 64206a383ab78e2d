# SPDX-License-Identifier: Apache-2.0
"""Results of the context-parallel benchmark as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median

from kernel import FLOPS_PER_PAIR
from peers import CP_PEERS, missing
from result_file import write_results

from magi_attention.cli.common import table_text

DIRECTIONS = ("forward", "backward", "both")


@dataclass
class Cell:
    """One implementation on one mask and size. ``packs`` has what was measured on each draw of the documents.

    ``forward``, ``backward`` and ``both`` are means over packs; ``times_of`` of the benchmark says what they hold.
    Without them ``reason`` says why, and ``is_failure`` that it is none which was to be expected of the implementation.
    """

    mask: str
    tokens_per_gpu: int
    name: str
    reason: str | None = None
    is_failure: bool = False
    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)
    both: dict[str, float] = field(default_factory=dict)
    packs: list[dict] = field(default_factory=list)

    def summarise(self) -> None:
        """Means over packs; nothing if a pack is missing, because a mean over some would not compare."""
        if self.reason:
            return
        for direction in DIRECTIONS:
            found = [pack["times"][direction] for pack in self.packs]
            names = [n for n in found[0] if all(f[n] is not None for f in found)]
            setattr(self, direction, {n: fmean(f[n] for f in found) for n in names})


def median_of_rounds(rounds: Sequence[dict]) -> dict:
    """What was measured of one pack in turns with others: medians of its times and rates, the most memory.

    A time that one round could not tell is None. Errors, where results were compared, are those of the first round.
    """
    first = rounds[0]
    times: dict[str, dict[str, float | None]] = {}
    for direction, values in first["times"].items():
        found = {name: [r["times"][direction][name] for r in rounds] for name in values}
        times[direction] = {n: None if None in of else median(of) for n, of in found.items()}
    known = [r["memory"] for r in rounds if r["memory"]]
    memory = {n: max(m[n] for m in known) for n in known[0]} if known else None
    return {**first, "times": times, "memory": memory}


def tflops(direction: str, area: int, heads: int, head_dim: int, world: int, milliseconds: float) -> float:
    """TFLOP/s of one GPU."""
    return FLOPS_PER_PAIR[direction] * area * heads * head_dim / world / milliseconds / 1e9


def mebibytes(cell: Cell) -> float | None:
    """Beyond inputs and results, of a forward and its backward: most over packs, and what came from elsewhere."""
    found = [pack["memory"]["both"] + pack["memory"]["outside"] for pack in cell.packs if pack["memory"]]
    return max(found) / 2**20 if found else None


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


HEADERS = ("forward", "backward", "both", "exposed ms f", "exposed ms b", "host ms f+b", "extra MiB")


def tables(cells: Sequence[Cell]) -> Iterator[str]:
    """For each mask and size a table, and the reasons of its empty cells."""
    for mask, tokens in dict.fromkeys((c.mask, c.tokens_per_gpu) for c in cells):
        size = f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)
        title = f"{mask.replace('_', ' ')}, {size} tokens per GPU: TFLOP/s per GPU (by the wall clock, in a row)"
        rows = [["implementation", *HEADERS]]
        reasons: dict[str, list[str]] = {}
        for cell in cells:
            if (cell.mask, cell.tokens_per_gpu) != (mask, tokens):
                continue
            if not cell.both:
                reasons.setdefault(cell.reason or "not run", []).append(cell.name)
                continue
            ways = [getattr(cell, direction) for direction in DIRECTIONS]
            rates = [f"{_shown(w['tflops'])} ({_shown(w['wall_tflops'])})" for w in ways]
            others = [w.get("exposed_ms_max") for w in ways[:2]] + [cell.both["host_ms"], mebibytes(cell)]
            rows.append([cell.name, *rates, *map(_shown, others)])
        if len(rows) > 1:
            yield table_text(title, rows)
        for reason, names in reasons.items():
            yield f"{mask}, {size}: {', '.join(names)}: {reason}"


def save(cells: Sequence[Cell], environment: dict, settings: dict, out: Path) -> None:
    """Writes OUT.json. ``environment`` is the machine, versions and commit."""
    write_results(out, settings, environment, cells=[asdict(cell) for cell in cells], missing=missing(CP_PEERS))
