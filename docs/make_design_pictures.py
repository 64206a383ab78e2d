# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of docs/design into docs/pictures: those of ``design_diagrams``, and plans made by the planner.

    python docs/make_pictures.py

Each figure is drawn from one value, its content: numbers of a real plan, or boxes and arrows. The PNG text
``Description`` has the digest of that value, so a test sees that a committed figure is the present one.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable
from typing import Any

import numpy as np
from design_diagrams import (
    BACKWARD,
    FUSED,
    INDEX_ATTENTION,
    INDEX_MLA,
    INDEXER,
    OVERVIEW,
    PORTABLE,
    RECURRENT,
    ROW_EXCHANGES,
    TWO_LEVELS,
)
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch, Rectangle

from magi_attention.api import Mask
from magi_attention.native.planner.tile_plan import TilePlan

INK = "#1f2328"
HEADS = ("#6f9fdc", "#e8a55c", "#74b883", "#b9a3c9")
Content = Any  # nested tuples and lists of numbers and text


def _axes(width: float, height: float, count: int = 1, **options: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, count, **options)


def draw_boxes(content: Content) -> Figure:
    (width, height), boxes, arrows = content
    figure, axis = _axes(width, height)
    for x, y, w, h, colour, title, text in boxes:
        shape = "round,pad=0,rounding_size=0.08"
        axis.add_patch(FancyBboxPatch((x, y), w, h, boxstyle=shape, facecolor=colour, edgecolor="#8c959f", lw=0.8))
        lines = text.count("\n") + 1 if text else 0
        middle = y + h / 2
        axis.text(
            x + w / 2, middle + 0.13 * lines, title, ha="center", va="center", fontsize=9.5, color=INK, weight="bold"
        )
        if text:
            axis.text(x + w / 2, middle - 0.13, text, ha="center", va="center", fontsize=8, color=INK)
    for start, end, label in arrows:
        arrow = FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=10, color="#57606a", lw=1)
        axis.add_patch(arrow)
        if label:
            at = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
            axis.text(*at, label, ha="center", va="center", fontsize=8, color="#57606a", bbox=box)
    axis.set_xlim(0, width)
    axis.set_ylim(0, height)
    axis.axis("off")
    return figure


# ---- the tile plan of a forward --------------------------------------------------------------------------------------
TOKENS, TILE_TOKENS, BLOCK = 2048, 128, 128


def forward_content() -> Content:
    """Tiles of 128 queries of a mask of three documents: the blocks of each segment, in the order of the kernel."""
    window = Mask.sliding_window(768, (127, 0), global_prefix=64)
    mask = Mask.batched([Mask.varlen([0, 832], causal=True), Mask.varlen([0, 448]), window])
    plan = TilePlan.build(mask.slices, TOKENS, TOKENS, TILE_TOKENS, 2)
    tiles = []
    for token0, num_tokens, begin, count, cost, _, *_ in plan.tiles.tolist():
        blocks = []
        for record in plan.records[begin : begin + count].tolist():
            low, high = record[0], record[1]
            groups = [record[8 + 4 * g : 12 + 4 * g] for g in range(2)]
            end = high
            while end > low:
                start = end - BLOCK
                plain = all(g[2] <= start and end <= g[3] for g in groups)
                blocks.append((max(start, 0), end, plain))
                end -= BLOCK
        tiles.append((token0, num_tokens, cost, blocks))
    return [tiles, plan.order.tolist(), plan.intervals.shape[0], _rows_seen(plan)]


def _rows_seen(plan: TilePlan) -> list[list[tuple[int, int]]]:
    """Key intervals of every eighth query."""
    seen: list[list[tuple[int, int]]] = []
    for token0, num_tokens, begin, count, *_ in plan.tiles.tolist():
        for row in range(0, num_tokens, 8):
            pairs = plan.intervals[begin : begin + count, row].tolist()
            seen.append([(token0 + row, *pair) for pair in pairs if pair[1] > pair[0]])
    return seen


def draw_forward(content: Content) -> Figure:
    tiles, order, num_segments, seen = content
    figure, axis = _axes(7.4, 6.0)
    for row in seen:
        for query, low, high in row:
            axis.add_patch(Rectangle((low, query), high - low, 8, color="#b8c6d6", lw=0))
    for tile, (token0, num_tokens, _, blocks) in enumerate(tiles):
        for number, (start, end, plain) in enumerate(blocks):
            colour = "#1f4e96" if plain else "#e08e36"
            axis.add_patch(Rectangle((start, token0), end - start, num_tokens, fill=False, edgecolor=colour, lw=1.1))
            axis.text(
                (start + end) / 2,
                token0 + num_tokens / 2,
                str(number),
                fontsize=7,
                ha="center",
                va="center",
                color=colour,
            )
        axis.text(
            TOKENS + 20,
            token0 + num_tokens / 2,
            f"tile {tile}, taken {order.index(tile)}",
            fontsize=7,
            va="center",
            color=INK,
        )
    axis.set_xlim(0, TOKENS + 330)
    axis.set_ylim(TOKENS, 0)
    axis.set_xlabel("keys", color=INK)
    axis.set_ylabel("queries", color=INK)
    axis.set_title(
        f"{len(tiles)} tiles, {num_segments} segments. Numbers: order of the key blocks of a tile.",
        fontsize=9.5,
        loc="left",
        color=INK,
    )
    axis.spines[["top", "right"]].set_visible(False)
    handles = [
        Patch(facecolor="#b8c6d6", label="allowed pairs"),
        Patch(fill=False, edgecolor="#1f4e96", label="key block without mask"),
        Patch(fill=False, edgecolor="#e08e36", label="key block with mask"),
    ]
    axis.legend(handles=handles, loc="lower left", fontsize=8, frameon=False)
    return figure


# ---- who gets which work tile ----------------------------------------------------------------------------------------
CTAS, HEADS_KV, KEYS = 12, 4, 2560
OVERHEAD = 2  # m-blocks, to begin and end a work tile


def starts_of(times: list[float], num_ctas: int) -> list[float]:
    """When work tiles start, if the CTA that is free first takes the next one."""
    free_at, starts = [0.0] * num_ctas, []
    for time in times:
        starts.append(free_at[0])
        heapq.heapreplace(free_at, free_at[0] + time)
    return starts


def schedule_content() -> Content:
    """Work tiles of a backward of full documents on 12 CTAs, by position and by cost: (cta, start, length, head)."""
    mask = Mask.varlen([0, 128, 256, 512, 768, 1280, 2560])
    plan = TilePlan.of_table(mask.slices, KEYS, KEYS, 128, 2, is_transposed=True)
    visits = -(-plan.records[:, 1] // 64) - plan.records[:, 0] // 64
    length = [int(visits[begin : begin + segments].sum()) for begin, segments in plan.tiles[:, 2:4].tolist()]
    found = []
    for order in (range(len(length)), plan.order.tolist()):
        tiles = [(tile, head) for tile in order for head in range(HEADS_KV)]
        times = [4.0 * length[tile] + OVERHEAD for tile, _ in tiles]  # 4 query heads a kv head
        free, placed = [0.0] * CTAS, []
        for (_, head), start, time in zip(tiles, starts_of(times, CTAS), times):
            cta = next(c for c in range(CTAS) if free[c] <= start)
            free[cta] = start + time
            placed.append((cta, start, time, head))
        found.append(placed)
    return found


def draw_schedule(content: Content) -> Figure:
    figure, axes = _axes(9.0, 3.6, 2, sharex=True, sharey=True)
    for axis, placed, title in zip(axes, content, ("by position", "by cost, the longest first")):
        for cta, start, time, head in placed:
            axis.add_patch(Rectangle((start, cta), time, 0.84, facecolor=HEADS[head], edgecolor="white", lw=0.8))
        end = max(start + time for _, start, time, _ in placed)
        busy = sum(time for _, _, time, _ in placed) / (CTAS * end)
        axis.axvline(end, color=INK, lw=1)
        axis.set_title(f"{title}: ends at {end:.0f}, {100 * busy:.0f}% busy", fontsize=9.5, loc="left", color=INK)
        axis.set_xlabel("steps", color=INK)
        axis.set_xlim(0, 1.03 * max(start + time for found in content for _, start, time, _ in found))
        axis.set_ylim(CTAS, 0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("CTA", color=INK)
    handles = [Patch(color=colour, label=f"kv head {head}") for head, colour in enumerate(HEADS)]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)
    return figure


# ---- semaphore targets -----------------------------------------------------------------------------------------------
TILES = 8


def determinism_content() -> Content:
    """Causal mask, 8 tiles of 2 m-blocks each on 4 CTAs: expected time and target of each contribution.

    The rule of ``semaphore_targets.cuh`` for one head: expected time is the start of the work tile and the place of the
    m-block in its traversal; the target is the number of contributions with earlier times.
    """
    blocks = 2 * TILES
    counts = [blocks - 2 * tile for tile in range(TILES)]
    num_ctas = TILES // 2
    starts = starts_of(counts, num_ctas)
    times = np.full((TILES, blocks), np.inf)
    for tile, count in enumerate(counts):
        first = blocks - count
        backwards = min(first, count) if tile < num_ctas else 0  # Traversal::kWrap, else kAscending
        traversal = [*range(blocks - 1, blocks - 1 - backwards, -1), *range(first, blocks - backwards)]
        for place, block in enumerate(traversal):
            times[tile, block] = starts[tile] + place
    targets = [
        [int(sum((times[other, b], other) < (times[tile, b], tile) for other in range(TILES))) for b in range(blocks)]
        for tile in range(TILES)
    ]
    return [[[None if np.isinf(t) else int(t) for t in row] for row in times], targets]


def draw_determinism(content: Content) -> Figure:
    times, targets = content
    figure, axis = _axes(8.6, 4.2)
    latest = max(t for row in times for t in row if t is not None)
    for tile, row in enumerate(times):
        for block, time in enumerate(row):
            if time is None:
                continue
            shade = 1 - 0.62 * time / latest
            axis.add_patch(Rectangle((block, tile), 0.94, 0.92, color=(0.55 + 0.4 * shade, 0.68 + 0.28 * shade, 0.95)))
            axis.text(
                block + 0.47, tile + 0.38, str(targets[tile][block]), ha="center", va="center", fontsize=10, color=INK
            )
            axis.text(block + 0.47, tile + 0.76, f"t={time}", ha="center", va="center", fontsize=6.5, color="#57606a")
    axis.set_xlim(0, len(times[0]))
    axis.set_ylim(len(times), 0)
    axis.set_xticks([b + 0.47 for b in range(len(times[0]))], [str(b) for b in range(len(times[0]))])
    axis.set_yticks([t + 0.46 for t in range(len(times))], [f"key tile {t}" for t in range(len(times))])
    axis.tick_params(length=0, labelsize=8.5)
    axis.set_xlabel("m-block", color=INK)
    axis.set_title(
        "Semaphore targets of a causal mask on 4 CTAs, by expected time t. Each column counts 0, 1, 2, ...",
        fontsize=9.5,
        loc="left",
        color=INK,
    )
    axis.spines[:].set_visible(False)
    return figure


PICTURES: dict[str, tuple[Callable[[], Content], Callable[[Content], Figure]]] = {
    "design_overview.png": (lambda: OVERVIEW, draw_boxes),
    "design_forward.png": (forward_content, draw_forward),
    "design_backward.png": (lambda: BACKWARD, draw_boxes),
    "design_index_attention.png": (lambda: INDEX_ATTENTION, draw_boxes),
    "design_index_attention_mla.png": (lambda: INDEX_MLA, draw_boxes),
    "design_indexer.png": (lambda: INDEXER, draw_boxes),
    "design_recurrent.png": (lambda: RECURRENT, draw_boxes),
    "design_schedule.png": (schedule_content, draw_schedule),
    "design_fused_comm.png": (lambda: FUSED, draw_boxes),
    "design_two_levels.png": (lambda: TWO_LEVELS, draw_boxes),
    "design_row_exchanges.png": (lambda: ROW_EXCHANGES, draw_boxes),
    "design_portable.png": (lambda: PORTABLE, draw_boxes),
    "design_determinism.png": (determinism_content, draw_determinism),
}


def digest(content: Content) -> str:
    return "content " + hashlib.sha256(repr(content).encode()).hexdigest()


def descriptions() -> dict[str, str]:
    """Name of each figure -> the digest of what it shows."""
    return {name: digest(content()) for name, (content, _) in PICTURES.items()}


def figures() -> dict[str, Figure]:
    return {name: draw(content()) for name, (content, draw) in PICTURES.items()}
