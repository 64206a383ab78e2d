# SPDX-License-Identifier: Apache-2.0
"""What ``simulated.py`` finds, as tables of a page, and as the errors by which the model knows what it supports."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path
from typing import NamedTuple

from masks import make_case

from magi_attention.tools.simulate import support
from magi_attention.tools.simulate.kernels import KINDS, kind_of
from magi_attention.tools.simulate.ways import WAYS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guides" / "simulate-records.md"
SUPPORT = Path(support.__file__)
MARKS = re.compile(r"(<!-- made by benchmarks/simulated.py -->\n)(.*?)(<!-- end -->)", re.DOTALL)
# Implementations of the record that the model has; `torch_cudnn` has kernels of its own.
NAMES = {
    "one_gpu": "one GPU", "magi_fused": "one launch", "magi_a2av_1": "one stage, merged", "magi_a2av_2": "two stages",
    "magi_a2av_0": "fetch, then attend", "all_gather": "all-gather", "ring": "ring", "ulysses": "ulysses",
}  # fmt: skip
# GPUs of a logical node; the names of those by all-to-all-v and of those in one launch end so.
NODE_SIZES = {
    "magi_nodes": 1, "magi_nodes_2": 2, "magi_nodes_4": 4, "magi_nodes_a2av": 1, "magi_nodes_2_a2av": 2,
    "magi_nodes_fused": 1, "magi_nodes_2_fused": 2, "magi_nodes_4_fused": 4,
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
    is_same_plan: bool  # as many rows travel by the modelled plan as by that of the record
    has_blind_rows: bool  # see ``has_blind_rows``; of a backward

    @property
    def error(self) -> float:
        return self.modelled / self.measured - 1


class Choice(NamedTuple):
    """One stage of one cell: ``waits``, what the plan of each case does; milliseconds of both directions, measured,
    where rows are waited for, and where the stage is merged."""

    record: str
    mask: str
    tokens: int
    waits: set[bool]
    waited: float
    merged: float


def node_way(name: str) -> str:
    size = NODE_SIZES[name]
    gpus = "each GPU a node" if size == 1 else f"nodes of {size}"
    if name.endswith("fused"):
        return f"{gpus}, one launch"
    return f"{gpus}, {'all-to-all-v' if name.endswith('a2av') else 'NVSHMEM'}"


def gpus_of(record: str) -> str:
    """"H200 x 2" for a record of that name."""
    return Path(record).name.removesuffix(".json").rsplit("_", 1)[1].upper().replace("X", " x ")


def table(found: Sequence[CellError]) -> str:
    """Markdown: a row for each record, mask and size; errors of each way, forward / backward, in percent. A star is for
    rows whose plan could not be made again."""
    known = (*NAMES.values(), "one stage", *map(node_way, NODE_SIZES))
    ways = [way for way in known if any(c.way == way for c in found)]
    lines = ["| GPUs, mask, tokens per GPU | " + " | ".join(ways) + " |", "|---" * (len(ways) + 1) + "|"]
    by_cell = {(c.record, c.mask, c.tokens, c.way, c.direction): c.error for c in found}
    for record, mask, tokens in dict.fromkeys(cell[:3] for cell in found):
        entries = []
        for way in ways:
            both = [by_cell.get((record, mask, tokens, way, d)) for d in ("forward", "backward")]
            entries.append("-" if None in both else " / ".join(f"{x:+.0%}" for x in both if x is not None))
        gpus = gpus_of(record)
        mark = "" if all(c.is_same_plan for c in found if c[:3] == (record, mask, tokens)) else " *"
        lines.append(f"| {gpus}, {mask.replace('_', ' ')}, {tokens // 1024}K{mark} | " + " | ".join(entries) + " |")
    return "\n".join(lines)


def largest_errors(found: Sequence[CellError]) -> dict[tuple[str, str, int], tuple[float, float, int]]:
    """What ``support`` has of the records. A single stage is one or the other of two columns, so it has the worst."""
    errors: dict[tuple[str, str, int], tuple[float, float, int]] = {}
    for cell in found:
        kind = kind_of(make_case(cell.mask, cell.tokens).mask.slices.array)
        is_one_stage = cell.way in (NAMES["magi_a2av_1"], NAMES["magi_a2av_0"], "one stage")
        for way in {cell.way, "one stage"} if is_one_stage else {cell.way}:
            if way in WAYS:
                key = way, kind, int(gpus_of(cell.record).rpartition(" ")[2])
                forward, backward, tokens = errors.get(key, (0.0, 0.0, 0))
                error = ceil(abs(cell.error) * 100) / 100
                if cell.direction == "backward":
                    backward = max(backward, error)
                else:
                    forward = max(forward, error)
                errors[key] = forward, backward, max(tokens, cell.tokens)
    return errors


def write_support(errors: dict[tuple[str, str, int], tuple[float, float, int]]) -> None:
    """Puts ``errors`` between the marks of ``SUPPORT``."""
    keys = sorted(errors, key=lambda key: (list(WAYS).index(key[0]), KINDS.index(key[1]), key[2]))
    lines = [f'    ("{way}", "{kind}", {ranks}): {errors[way, kind, ranks]},' for way, kind, ranks in keys]
    begin, middle, rest = SUPPORT.read_text(encoding="utf-8").partition("# made by benchmarks/simulated.py\n")
    head = rest.partition("{")[0]
    text = "\n".join([f"{head}{{", *lines, "}\n"])
    SUPPORT.write_text(f"{begin}{middle}{text}{rest[rest.index('# end') :]}", encoding="utf-8")


def share_within(found: Sequence[CellError]) -> str:
    return f"{sum(abs(cell.error) <= 0.1 for cell in found)} of {len(found)}"


def summary(old: Sequence[CellError], new: Sequence[CellError], choices: Sequence[Choice]) -> str:
    found = [*old, *new]
    errors = sorted(abs(cell.error) for cell in found)
    known = [cell for cell in found if not cell.has_blind_rows]
    launches = [cell for cell in new if cell.way.endswith(", one launch")]
    waits = [choice.merged / choice.waited for choice in choices if choice.waits == {True}]
    return (
        f"{share_within(found)} times are within 10%: {share_within(old)} of the first table, {share_within(new)} of "
        f"the second, and there {share_within(launches)} of one launch over nodes. The median error is "
        f"{errors[len(errors) // 2]:.1%}, the largest {errors[-1]:.0%}. Without backwards that have blind rows "
        f"{share_within(known)} are, and the largest error is {max(abs(cell.error) for cell in known):.0%}. "
        f"A single stage is waited for now in {len(waits)} of {len(choices)} cells of the first table that have one; "
        f"in the records that is {min(waits):.2f} to {max(waits):.2f} times as fast as merging."
    )


def write_page(text: str) -> None:
    """Puts ``text`` between the marks of ``PAGE``."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(MARKS.sub(lambda marks: f"{marks[1]}{text}\n{marks[3]}", page), encoding="utf-8")


def tables_of(page: str) -> list[str]:
    """The tables between the marks of a page."""
    return [part for part in MARKS.search(page)[2].split("\n\n") if part.startswith("|")]


def numbers(table: str) -> dict[tuple[str, str, int], int]:
    """Percents of a table, by row, column and direction."""
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in table.splitlines()]
    head, *body = [row for row in rows if not row[0].startswith("-")]
    return {
        (row[0].rstrip(" *"), name, place): int(word.rstrip("%"))
        for row in body
        for name, entry in zip(head[1:], row[1:]) if entry != "-"
        for place, word in enumerate(entry.split(" / "))
    }  # fmt: skip


def cell_lines(found: Sequence[CellError]) -> Iterator[str]:
    """Milliseconds of every cell, and whether the modelled plan moves as many rows as the measured one."""
    for cell in found:
        where = f"{Path(cell.record).name}, {cell.mask}, {cell.tokens} tokens, {cell.way}, {cell.direction}"
        kernel = f"slowest rank's kernels alone {cell.kernel:.2f}"
        mark = "" if cell.is_same_plan else ", by another plan"
        times = f"measured {cell.measured:.2f} ms ({kernel}), modelled {cell.modelled:.2f}, {cell.error:+.0%}"
        yield f"{where}: {times}{mark}"
