# SPDX-License-Identifier: Apache-2.0
"""What pictures of plans, profiles and benchmarks have in common, by matplotlib. Nothing here opens a window."""

from __future__ import annotations

import io

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from magi_attention.meta.plan import Plan
from magi_attention.tools.report.colours import rank_colour
from magi_attention.tools.report.raster import coverage


def rank_colours(count: int) -> np.ndarray:
    """RGB in 0..1, (count, 3), as on the pages."""
    return np.array([rank_colour(rank, count) for rank in range(count)]) / 255


def new_figure(width: float, height: float, panels: int = 1, rows: int | None = None, **options):
    """Inches; the axes are ``(panels,)``, or ``(rows, panels)`` if rows are given. ``options`` as of ``subplots``."""
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows or 1, panels, squeeze=False, **options)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes if rows else axes[0]


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


def paint_mask(axis, plan: Plan) -> None:
    """Draws the mask on a matplotlib axis, rows coloured by the rank that computes them."""
    image, rows = coverage(plan.slices.array, plan.padded_tokens, plan.padded_tokens, 512)
    owner = plan.owner_of(rows)
    ink = image[:, :, None] ** 0.6  # thin structures stay visible
    picture = 1.0 - ink * (1.0 - rank_colours(plan.cp_size)[owner][:, None, :])
    axis.imshow(picture, interpolation="nearest", aspect="auto")
    axis.set_xlabel("key token")
    axis.set_ylabel("query token")
    _tokens(axis, "x", image.shape[1], plan.padded_tokens)
    _tokens(axis, "y", image.shape[0], plan.padded_tokens)


def to_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight", pad_inches=0.08)
    return buffer.getvalue()
