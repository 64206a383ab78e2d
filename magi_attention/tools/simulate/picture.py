# SPDX-License-Identifier: Apache-2.0
"""Estimates as a picture: TFLOP/s of a GPU, and efficiency, over numbers of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from magi_attention.tools.report.pictures import new_figure
from magi_attention.tools.simulate.ways import OURS, Estimate

_COLOURS = "#1f4e96 #4f86cf #8db4e6 #6e7780 #3f9c5a #d9822b #c4453c #7d5fb2 #8a6245".split()


def draw(path: Path, estimates: Sequence[Estimate], title: str, goal: float) -> None:
    """Writes a PNG file with a line at the efficiency ``goal``; a way has no point where it has no time. Ours are solid
    lines."""
    figure, axes = new_figure(11, 4.6, 2)
    figure.suptitle(title, fontsize=11)
    ways = list(dict.fromkeys(one.way for one in estimates))
    ticks = sorted({one.ranks for one in estimates})
    for axis, name, label in zip(axes, ("tflops", "efficiency"), ("TFLOP/s of a GPU", "efficiency")):
        for way, colour in zip(ways, _COLOURS):
            points = [(one.ranks, getattr(one, name)) for one in estimates if one.way == way and one.reason is None]
            style = "-" if way in OURS else "--"
            axis.plot(*zip(*points) if points else ((), ()), style, color=colour, marker="o", ms=3, label=way)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [f"{n:,}" for n in ticks], rotation=45 if len(ticks) > 8 else 0)
        axis.set_xlabel("GPUs")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(color="#dde2e8", linewidth=0.6)
    axes[1].axhline(goal, color="#6e7780", linewidth=0.8, linestyle=":")
    axes[1].legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path)
