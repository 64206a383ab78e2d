# SPDX-License-Identifier: Apache-2.0
"""The model of `magi simulate` beside the records of two and four GPUs, cell by cell.

    python benchmarks/simulated.py [--cells] [--write]

``--cells`` prints milliseconds, measured and modelled, of every cell. ``--write`` puts the table and its summary into
docs/guides/simulate.md.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from cp_layout import make_cases  # noqa: E402

from magi_attention.simulate.machine import Cluster  # noqa: E402
from magi_attention.simulate.ways import WAYS, Case, share_seconds  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results"
PAGE = RESULTS.parents[1] / "docs" / "guides" / "simulate.md"
MARKS = re.compile(r"(<!-- made by benchmarks/simulated.py -->\n)(.*?)(<!-- end -->)", re.DOTALL)
RECORDS = ("context_parallel_h100x2.json", "context_parallel_h200x4.json")
# Implementations of the record that the model has; `torch_cudnn` has kernels of its own.
NAMES = {
    "one_gpu": "one GPU", "magi_fused": "one launch", "magi_a2av_1": "one stage", "magi_a2av_2": "two stages",
    "magi_a2av_0": "fetch, then attend", "all_gather": "all-gather", "ring": "ring", "ulysses": "ulysses",
}  # fmt: skip


class CellError(NamedTuple):
    """Milliseconds of one cell and direction, measured and modelled; ``kernel`` is measured, of its kernels alone."""

    record: str
    mask: str
    tokens: int
    way: str
    direction: str
    measured: float
    modelled: float
    kernel: float
    is_same_plan: bool  # as many rows travel by today's plan as by that of the record

    @property
    def error(self) -> float:
        return self.modelled / self.measured - 1


@cache
def cases_of(mask: str, tokens: int, cluster: Cluster, packs: int, seed: int) -> tuple[Case, ...]:
    """Cases of a record; the GPUs of ``cluster`` are one node."""
    cases = make_cases(mask, tokens * cluster.node, packs, seed)
    return tuple(Case(case.mask, cluster.node, cluster) for case in cases)


def errors_of(record: str) -> Iterator[CellError]:
    """Every cell of a record that has times and a way of the model."""
    data = json.loads((RESULTS / record).read_text(encoding="utf-8"))
    settings = data["settings"]
    cluster = Cluster(node=settings["world"], heads_q=settings["heads"][0], heads_kv=settings["heads"][1],
                      head_dim=settings["head_dim"])  # fmt: skip
    for cell in data["cells"]:
        way = NAMES.get(cell["name"])
        if way is None or cell["reason"]:
            continue
        cases = cases_of(cell["mask"], cell["tokens_per_gpu"], cluster, settings["packs"], settings["seed"])
        for direction in ("forward", "backward"):
            is_backward, found = direction == "backward", cell[direction]
            modelled = [
                share_seconds(case, cluster, is_backward) * pack["area"] / case.mask.area if way == "one GPU"
                else WAYS[way](case, cluster, is_backward).seconds
                for case, pack in zip(cases, cell["packs"])
            ]  # fmt: skip
            mean = sum(modelled) / len(modelled) * 1e3
            rows = [pack["details"].get("rows_received_max") for pack in cell["packs"]]
            is_same = all(r is None or r == max(c.plan_work(1).traffic[0].rows) for r, c in zip(rows, cases))
            yield CellError(
                record, cell["mask"], cell["tokens_per_gpu"], way, direction, found["ms"], mean,
                found.get("kernel_ms_max", float("nan")), is_same,
            )  # fmt: skip


def table(found: Sequence[CellError]) -> str:
    """Markdown: a row for each record, mask and size; errors of each way, forward / backward, in percent. A star is for
    rows where today's plan moves another number of rows than that of the record."""
    ways = list(NAMES.values())
    lines = ["| GPUs, mask, tokens per GPU | " + " | ".join(ways) + " |", "|---" * (len(ways) + 1) + "|"]
    by_cell = {(c.record, c.mask, c.tokens, c.way, c.direction): c.error for c in found}
    for record, mask, tokens in dict.fromkeys(cell[:3] for cell in found):
        entries = []
        for way in ways:
            both = [by_cell.get((record, mask, tokens, way, d)) for d in ("forward", "backward")]
            entries.append("-" if None in both else " / ".join(f"{x:+.0%}" for x in both if x is not None))
        gpus = record.removesuffix(".json").rsplit("_", 1)[1].upper().replace("X", " x ")
        mark = "" if all(c.is_same_plan for c in found if c[:3] == (record, mask, tokens)) else " *"
        lines.append(f"| {gpus}, {mask.replace('_', ' ')}, {tokens // 1024}K{mark} | " + " | ".join(entries) + " |")
    return "\n".join(lines)


def summary(found: Sequence[CellError]) -> str:
    errors = sorted(abs(cell.error) for cell in found)
    within = sum(error <= 0.1 for error in errors)
    return (
        f"{within} of {len(errors)} times are within 10%; the median error is {errors[len(errors) // 2]:.1%}, "
        f"the largest {errors[-1]:.0%}."
    )


def table_of(page: str) -> str:
    """What stands between the marks of a page."""
    return MARKS.search(page)[2]


def numbers(text: str) -> dict[tuple[str, str, int], int]:
    """Percents of a table, by row, column and direction."""
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    head, *body = [row for row in rows if not row[0].startswith("-")]
    return {
        (row[0].rstrip(" *"), name, place): int(word.rstrip("%"))
        for row in body
        for name, entry in zip(head[1:], row[1:]) if entry != "-"
        for place, word in enumerate(entry.split(" / "))
    }  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cells", action="store_true", help="print milliseconds of every cell")
    parser.add_argument("--write", action="store_true", help="write the table into docs/guides/simulate.md")
    options = parser.parse_args(arguments)
    found = [cell for record in RECORDS for cell in errors_of(record)]
    text = f"{table(found)}\n\n{summary(found)}"
    print(text)
    for cell in found if options.cells else ():
        where = f"{cell.record}, {cell.mask}, {cell.tokens} tokens, {cell.way}, {cell.direction}"
        kernel = f"slowest rank's kernels alone {cell.kernel:.2f}"
        print(f"{where}: measured {cell.measured:.2f} ms ({kernel}), modelled {cell.modelled:.2f}, {cell.error:+.0%}")
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(MARKS.sub(lambda marks: f"{marks[1]}{text}\n{marks[3]}", page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
