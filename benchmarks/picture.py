# SPDX-License-Identifier: Apache-2.0
"""A record of a benchmark as a PNG: a row for each operation, a panel for each mask, bars over sizes; many masks of one
size are in one panel."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ci"))

from result_files import OURS as OURS_OF  # noqa: E402
from result_files import PLANNER, Cell, Run, load  # noqa: E402

COLOURS = "#e08e36 #59a869 #c4453c #7d5fb2 #8a6245 #d26aa8 #a9a829 #2aa5b5 #5b7083 #b98bd0".split()
BOUNDS = {"one_gpu": "#8b949e", "copy": "#8b949e", "dense": "#8b949e"}  # what cannot be had: no peers
MOST_PANELS = 8  # in a row
OURS, VARIANTS = "#1f4e96", "#6f9fdc #a8c6ee #3f7fb0 #86a9c9 #27648a #c3d4e6".split()


def words(name: str) -> str:
    return name.replace("_", " ")


def short(count: int) -> str:
    """``"4K"`` for 4096."""
    for unit, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if count % unit == 0 and count:
            return f"{count // unit}{letter}"
    return str(count)


def is_variant(run: Run, name: str) -> bool:
    """Another setting of ours."""
    return name != run.ours and (name.startswith("magi") or name in OURS_OF[run.benchmark])


def names_of(run: Run) -> list[str]:
    """Implementations with a figure: the one that is called ours first, then its variants, then peers."""
    found = dict.fromkeys(name for cell in run.results for name in run.speeds(cell))
    return sorted(found, key=lambda name: (name != run.ours, not is_variant(run, name)))


def colours_of(run: Run) -> dict[str, str]:
    """One for each of ``names_of``: blues are ours."""
    names = names_of(run)
    mine = [n for n in names if is_variant(run, n)]
    peers = [n for n in names if n not in mine and n not in BOUNDS and n != run.ours]
    found = {n: VARIANTS[i % len(VARIANTS)] for i, n in enumerate(mine)}
    return found | {n: COLOURS[i % len(COLOURS)] for i, n in enumerate(peers)} | BOUNDS | {run.ours: OURS}


def unit_of(run: Run) -> tuple[str, float]:
    """What is shown, and the factor from the speed of the record to it; milliseconds have none."""
    if run.benchmark == PLANNER:
        return "ms", 1.0
    most = max((speed for cell in run.results for speed in run.speeds(cell).values()), default=1.0)
    return ("GFLOP/s", 1e3) if run.speed[1] == "TFLOP/s" and most < 1 else (run.speed[1], 1.0)


def value_of(run: Run, cell, name: str) -> float:
    """What is shown of a cell, in ``unit_of``."""
    return run.results[cell][name]["ms"] if run.benchmark == PLANNER else run.speeds(cell)[name] * unit_of(run)[1]


def panels_of(run: Run, direction: str) -> list[tuple[str, list[tuple[str, Cell]]]]:
    """Title of each panel of a row, and its cells with what stands under them."""
    cells = sorted(c for c in run.results if c.direction == direction)
    masks = list(dict.fromkeys(c.mask for c in run.results))
    if len({c.seqlen for c in run.results}) == 1 and len(masks) > MOST_PANELS:
        cells.sort(key=lambda c: masks.index(c.mask))
        named = [(words(c.mask).replace(" ", "\n"), c) for c in cells]
        return [(f"{direction}, {short(cells[0].seqlen)} tokens", named)]
    return [(f"{words(m)}, {direction}", [(short(c.seqlen), c) for c in cells if c.mask == m]) for m in masks]


def draw(record: Path) -> bool:
    """Writes the PNG beside ``record``; False without matplotlib, or where nothing was measured."""
    try:
        from matplotlib.patches import Patch

        from magi_attention.tools.report.pictures import new_figure
    except ImportError:
        return False
    run = load(record)
    names, colours = names_of(run), colours_of(run)
    directions = list(dict.fromkeys(c.direction for c in run.results))
    if not names:
        return False
    panels = [panels_of(run, direction) for direction in directions]
    columns = max(len(row) for row in panels)
    most = max(len(cells) for row in panels for _, cells in row)
    size = (max(3.4 * columns, 0.9 * most, 7.2), 3.0 * len(directions) + 1.2)
    figure, rows = new_figure(*size, columns, len(directions), sharey="row")
    width = 1 / (len(names) + 1)
    for axes, row in zip(rows, panels):
        for axis, (title, cells) in zip(axes, row):
            for i, name in enumerate(names):
                at = [
                    (x + i * width, value_of(run, c, name)) for x, (_, c) in enumerate(cells) if name in run.speeds(c)
                ]
                if at:
                    axis.bar(*zip(*at), width * 0.95, align="edge", color=colours[name], zorder=2)
            axis.set_xticks([x + 0.5 - width / 2 for x in range(len(cells))], [label for label, _ in cells], fontsize=8)
            axis.margins(x=0.01)
            axis.set_title(title, fontsize=9)
            axis.grid(axis="y", alpha=0.3, zorder=0)
        axes[0].set_ylabel(unit_of(run)[0])
    handles = [Patch(color=colours[name], label=name) for name in names]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=max(2, int(size[0] / 1.6)), frameon=False, fontsize=8
    )
    where = run.environment.get("gpu") or run.environment.get("cpu") or "CPU"
    figure.suptitle(f"{words(run.benchmark)}: {where}, commit {run.environment.get('commit')}", fontsize=10)
    figure.savefig(record.with_suffix(".png"))
    return True
