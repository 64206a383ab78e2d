# SPDX-License-Identifier: Apache-2.0
"""The pictures of a plan or a run, as matplotlib figures. Nothing here opens a window.

Up to `FEW` ranks are drawn one by one with a legend; more become heatmaps and lines, so that 256 ranks stay
legible.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import hsv_to_rgb, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from magi_attention.meta.cost import contiguous_areas, ring_rows
from magi_attention.meta.plan import Plan
from magi_attention.report.describe import FEW, relative_differences
from magi_attention.report.raster import coverage

_TEN = "#3b6fb6 #d9822b #3f9c5a #c4453c #7d5fb2 #8a6245 #d26aa8 #6e7780 #a9a829 #2aa5b5".split()
FLOOR = 1e-9  # smaller loss differences are drawn at it, down to none at all
_GREY, _BEFORE, _AFTER = "#6e7780", "#d9822b", "#3b6fb6"


def rank_colours(count: int) -> np.ndarray:
    """RGB in 0..1, (count, 3); neighbours differ clearly."""
    if count <= len(_TEN):
        return np.array([to_rgb(c) for c in _TEN[:count]])
    hue = (np.arange(count) * 0.618034) % 1.0  # steps of the golden ratio spread any number of hues
    return hsv_to_rgb(np.stack([hue, 0.55 + 0.25 * (np.arange(count) % 2), np.full(count, 0.8)], axis=1))


def new_figure(width: float, height: float, panels: int = 1):
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _short(number: float) -> str:
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{suffix}"
    return f"{number:.3g}"


def _tokens(axis, which: str, cells: int, total: int) -> None:
    """Labels an image axis of `cells` cells with token positions."""
    ticks = np.linspace(0, cells, 5)
    labels = [_short(t / max(cells, 1) * total) for t in ticks]
    (axis.set_xticks if which == "x" else axis.set_yticks)(ticks - 0.5, labels)


def paint_mask(axis, plan: Plan, size: int = 512) -> None:
    """Draws the mask on a matplotlib axis, rows coloured by the rank that computes them."""
    image, rows = coverage(plan.slices.array, plan.padded_tokens, plan.padded_tokens, size)
    owner = plan.owner_of(rows)
    ink = image[:, :, None] ** 0.6  # thin structures stay visible
    picture = 1.0 - ink * (1.0 - rank_colours(plan.cp_size)[owner][:, None, :])
    axis.imshow(picture, interpolation="nearest", aspect="auto")
    axis.set_xlabel("key token")
    axis.set_ylabel("query token")
    _tokens(axis, "x", image.shape[1], plan.padded_tokens)
    _tokens(axis, "y", image.shape[0], plan.padded_tokens)


def mask_by_owner(plan: Plan, size: int = 512) -> Figure:
    """The mask, rows coloured by the rank that computes them; next to it who owns which tokens."""
    figure, (axis,) = new_figure(6.4, 5.6)
    paint_mask(axis, plan, size)
    if plan.cp_size <= FEW:
        handles = [Patch(color=c, label=f"rank {r}") for r, c in enumerate(rank_colours(plan.cp_size))]
        figure.legend(handles=handles, loc="outside right upper", frameon=False)
    return figure


def areas_before_after(plan: Plan, numbers: dict) -> Figure:
    """Area per rank for the contiguous split and for this plan; ``numbers`` of ``meta.explain``."""
    before, after = contiguous_areas(plan), np.array(numbers["areas"], dtype=float)
    figure, (axis,) = new_figure(6.4, 3.4)
    ranks = np.arange(plan.cp_size)
    labels = (
        f"contiguous split, max/mean {numbers['imbalance_contiguous']:.3f}",
        f"this plan, max/mean {numbers['imbalance']:.3f}",
    )
    if plan.cp_size <= FEW:
        axis.bar(ranks - 0.2, before, 0.4, color=_BEFORE, label=labels[0])
        axis.bar(ranks + 0.2, after, 0.4, color=_AFTER, label=labels[1])
        axis.set_xticks(ranks)
    else:
        axis.step(ranks, before, where="mid", color=_BEFORE, lw=1.2, label=labels[0])
        axis.step(ranks, after, where="mid", color=_AFTER, lw=1.2, label=labels[1])
    axis.axhline(after.mean(), color=_GREY, lw=0.8, ls="--")
    axis.set_ylim(0, max(before.max(), after.max(), 1) * 1.25)
    axis.set_xlabel("rank")
    axis.set_ylabel("allowed pairs")
    axis.yaxis.set_major_formatter(lambda value, _: _short(value))
    axis.legend(frameon=False, loc="upper right", fontsize=9)
    return figure


def communication(plan: Plan) -> Figure:
    """Rows of K and V from rank to rank, and the total against ring P2P and all-gather."""
    matrix = plan.comm_matrix()
    figure, (left, right) = new_figure(9.6, 4.0, 2)
    shown = np.where(matrix > 0, matrix, np.nan)
    image = left.imshow(shown, cmap="Blues", vmin=0, vmax=max(int(matrix.max()), 1), interpolation="nearest")
    left.set_xlabel("receiving rank")
    left.set_ylabel("sending rank")
    if plan.cp_size <= 8:
        left.set_xticks(range(plan.cp_size))
        left.set_yticks(range(plan.cp_size))
        for i, j in np.argwhere(matrix > 0):
            shade = "white" if matrix[i, j] > matrix.max() * 0.6 else "black"
            left.text(j, i, _short(matrix[i, j]), ha="center", va="center", color=shade, fontsize=8)
    figure.colorbar(image, ax=left, shrink=0.8, label="rows", format=lambda v, _: _short(v))
    # Ring and all-gather both bring every row to every other rank.
    everything = ring_rows(plan)
    names, volumes = ["this plan", "ring P2P", "all-gather"], [int(matrix.sum()), everything, everything]
    bars = right.barh(names, volumes, color=[_AFTER, _GREY, _GREY])
    right.bar_label(bars, [_short(v) for v in volumes], padding=4)
    right.invert_yaxis()
    right.set_xlim(0, max(everything, 1) * 1.2)
    right.set_xlabel("rows moved, all ranks together")
    right.xaxis.set_major_formatter(lambda value, _: _short(value))
    return figure


def _ranks_to_draw(events: Sequence[dict]) -> list[int]:
    """All ranks if they are few, otherwise those that finish last."""
    finish: dict[int, float] = {}
    for event in events:
        finish[event["rank"]] = max(finish.get(event["rank"], 0.0), event["end"])
    slowest = sorted(finish, key=lambda rank: (-finish[rank], rank))[:FEW]
    return sorted(slowest)


def timeline(events: Sequence[dict]) -> Figure:
    """Gantt chart of stages: two lanes a rank, communication above compute.

    ``events`` hold rank, lane ("compute" or "comm"), stage (-1 is the host), start and end in seconds. Of
    more than 16 ranks the 16 that finish last are drawn.
    """
    origin = min((e["start"] for e in events), default=0.0)
    span = max((e["end"] for e in events), default=0.0) - origin
    unit, scale = ("ms", 1e3) if span > 2e-3 else ("us", 1e6)
    ranks = _ranks_to_draw(events)
    figure, (axis,) = new_figure(9.6, 1.2 + 0.42 * max(len(ranks), 2))
    colours = {"compute": _AFTER, "comm": _BEFORE}
    for line, rank in enumerate(ranks):
        for event in events:
            if event["rank"] != rank:
                continue
            start = (event["start"] - origin) * scale
            width = (event["end"] - event["start"]) * scale
            lane = 0.0 if event["lane"] == "comm" else 0.4
            place, colour = (line - 0.4 + lane, 0.38), colours[event["lane"]]
            is_light = event["stage"] >= 0 and event["stage"] % 2 == 0  # the host, stage -1, is dark
            axis.broken_barh([(start, width)], place, color=colour, alpha=0.65 if is_light else 0.95)
    axis.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axis.set_ylim(len(ranks) - 0.4, -0.6)
    axis.set_xlabel(f"time ({unit})")
    handles = [Patch(color=colour, label=lane) for lane, colour in colours.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=2, frameon=False)
    return figure


def losses(curves: dict[str, Sequence[float]]) -> Figure:
    """Loss curves by name, and the relative difference of the first two where there are two."""
    figure, axes = new_figure(9.6, 3.6, 2 if len(curves) > 1 else 1)
    for (name, values), style in zip(curves.items(), ("-", "--", ":")):
        axes[0].plot(range(1, len(values) + 1), values, style, lw=2, label=name)
    axes[0].set_xlabel("step")
    axes[0].set_ylabel("loss (nats per byte)")
    axes[0].legend(frameon=False)
    if len(curves) > 1:
        difference = relative_differences(*list(curves.values())[:2])
        axes[1].semilogy(range(1, len(difference) + 1), np.maximum(difference, FLOOR), "o-", ms=3, color=_GREY)
        axes[1].axhline(1e-4, color="#c4453c", lw=1, ls="--", label="limit 1e-4")
        axes[1].set_xlabel("step")
        axes[1].set_ylabel("relative difference")
        axes[1].legend(frameon=False)
    return figure


def to_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight", pad_inches=0.08)
    return buffer.getvalue()
