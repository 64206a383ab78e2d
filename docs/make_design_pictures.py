# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of docs/design into docs/pictures: diagrams of boxes in this file, and plans made by the planner.

    python docs/make_pictures.py

Each figure is drawn from one value, its content: numbers of a real plan, or boxes and arrows. The PNG text
``Description`` has the digest of that value, so a test sees that a committed figure is the present one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch, Rectangle

from magi_attention.api import Mask
from magi_attention.kernels.ffa.schedule.simulate import starts_of, steps_of_tiles
from magi_attention.native.tile_plan import TilePlan

INK = "#1f2328"
HOST, DEVICE, WIRE, PLAIN = "#dbe7f6", "#fbe6cf", "#d9efdd", "#f3f4f6"
HEADS = ("#6f9fdc", "#e8a55c", "#74b883", "#b9a3c9")
Content = Any  # nested tuples and lists of numbers and text


def _axes(width: float, height: float, count: int = 1, **options: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, count, **options)


# ---- diagrams: boxes (x, y, width, height, colour, title, text) and arrows (from, to, label) ------------------------
OVERVIEW = (
    (8.6, 6.2),
    [
        (0.2, 5.3, 2.6, 0.7, HOST, "Mask", "slices; no torch"),
        (0.2, 4.0, 2.6, 0.9, HOST, "build_plan", "chunks, dispatch, stages\n(magi_attention/meta)"),
        (0.2, 2.7, 2.6, 0.9, HOST, "Plan", "a value: hashed, compared,\nthe same on all ranks"),
        (0.2, 0.2, 2.6, 1.2, HOST, "TilePlan", "tiles and segments of one\nkernel call (csrc/planner)"),
        (3.6, 5.3, 4.8, 0.7, HOST, "attend, calc_attn, flex_flash_attn_func", "magi_attention/api, functional"),
        (3.6, 4.0, 4.8, 0.9, HOST, "AttnRuntime", "one plan on one rank: checks, backend, mode"),
        (3.6, 2.7, 2.2, 0.9, WIRE, "StageComm", "staged: rows over\nthe process group"),
        (6.2, 2.7, 2.2, 0.9, WIRE, "FusedAttention", "fused: symmetric\nbuffers over NVLink"),
        (3.6, 1.55, 4.8, 0.75, HOST, "FfaBackend", "plan cache, parameter block, one C call"),
        (3.6, 0.2, 4.8, 0.9, DEVICE, "ffa_fwd, ffa_bwd", "work tiles on all SMs (csrc/ffa/sm90)"),
    ],
    [
        ((1.5, 5.3), (1.5, 4.9), ""),
        ((1.5, 4.0), (1.5, 3.6), ""),
        ((2.8, 3.3), (3.6, 4.3), "rank(r)"),
        ((6.0, 5.3), (6.0, 4.9), ""),
        ((4.7, 4.0), (4.7, 3.6), ""),
        ((7.3, 4.0), (7.3, 3.6), ""),
        ((4.7, 2.7), (4.7, 2.3), ""),
        ((7.3, 2.7), (7.3, 2.3), ""),
        ((6.0, 1.55), (6.0, 1.1), ""),
        ((1.5, 2.7), (1.5, 1.4), "slices"),
        ((2.8, 0.65), (3.6, 0.65), ""),
    ],
)

BACKWARD = (
    (9.2, 5.6),
    [
        (0.2, 4.0, 2.5, 1.4, DEVICE, "preprocess", "delta and offsets; clears\ndq_accum or finds\nsemaphore targets"),
        (
            3.3,
            4.0,
            3.0,
            1.4,
            DEVICE,
            "main: one work tile",
            "128 keys of one kv head;\nloops over m-blocks; dk, dv\nstay in registers",
        ),
        (6.9, 4.0, 2.1, 1.4, DEVICE, "combine", "only for splits:\nadds the parts\nof dk and dv"),
        (0.2, 2.3, 1.9, 0.8, PLAIN, "atomic", "adds as it comes"),
        (2.4, 2.3, 1.9, 0.8, PLAIN, "first writer", "stores, others add"),
        (4.6, 2.3, 1.9, 0.8, PLAIN, "deterministic", "adds in a fixed order"),
        (6.9, 2.3, 2.1, 0.8, PLAIN, "direct store", "one contribution only"),
        (0.2, 0.3, 4.1, 1.1, PLAIN, "dq_accum", "float32 in the workspace"),
        (4.9, 0.3, 1.9, 1.1, DEVICE, "postprocess", "scales, rounds"),
        (7.4, 0.3, 1.6, 1.1, PLAIN, "dq", "bf16 or fp16"),
    ],
    [
        ((2.7, 4.7), (3.3, 4.7), ""),
        ((6.3, 4.7), (6.9, 4.7), ""),
        ((4.0, 4.0), (1.2, 3.1), ""),
        ((4.5, 4.0), (3.4, 3.1), ""),
        ((5.1, 4.0), (5.5, 3.1), ""),
        ((5.6, 4.0), (7.9, 3.1), ""),
        ((1.1, 2.3), (1.1, 1.4), ""),
        ((3.3, 2.3), (3.3, 1.4), ""),
        ((5.2, 2.3), (4.0, 1.4), ""),
        ((4.3, 0.85), (4.9, 0.85), ""),
        ((6.8, 0.85), (7.4, 0.85), ""),
        ((8.2, 2.3), (8.2, 1.4), ""),
    ],
)

PORTABLE = (
    (9.2, 5.2),
    [
        (
            0.2, 4.2, 8.8, 0.7, HOST, "one parameter block, one tile plan",
            "FfaBackend takes the library of the GPU's family",
        ),  # fmt: skip
        (0.2, 2.6, 2.0, 1.1, DEVICE, "ffa_sm90", "9.0: wgmma, TMA,\nwarp roles"),
        (2.5, 2.6, 2.0, 1.1, DEVICE, "ffa_sm80", "8.0, 8.6, 8.9"),
        (4.8, 2.6, 2.0, 1.1, DEVICE, "ffa_sm100", "10.0, 10.3"),
        (7.0, 2.6, 2.0, 1.1, DEVICE, "ffa_sm120", "12.0, 12.1"),
        (2.5, 1.2, 6.5, 0.9, PLAIN, "csrc/ffa/portable", "one source: mma.sync, ldmatrix, cp.async"),
        (2.5, 0.1, 3.1, 0.7, PLAIN, "tiles for 163 KB", "8.0, 9.0, 10.x"),
        (5.9, 0.1, 3.1, 0.7, PLAIN, "tiles for 99 KB", "8.6, 8.9, 12.x"),
    ],
    [
        ((1.2, 4.2), (1.2, 3.7), ""),
        ((3.5, 4.2), (3.5, 3.7), ""),
        ((5.8, 4.2), (5.8, 3.7), ""),
        ((8.0, 4.2), (8.0, 3.7), ""),
        ((3.5, 2.6), (3.5, 2.1), ""),
        ((5.8, 2.6), (5.8, 2.1), ""),
        ((8.0, 2.6), (8.0, 2.1), ""),
        ((4.0, 1.2), (4.0, 0.8), ""),
        ((7.4, 1.2), (7.4, 0.8), ""),
    ],
)

FUSED = (
    (9.2, 4.4),
    [
        (0.2, 3.1, 1.3, 1.0, PLAIN, "rank 0", "backward, one\nstream"),
        (1.9, 3.1, 1.4, 1.0, DEVICE, "put", "K and V rows"),
        (3.6, 3.1, 2.0, 1.0, DEVICE, "attention", "waits for tiles of\n128 remote keys"),
        (5.9, 3.1, 1.4, 1.0, DEVICE, "postprocess", "rank barrier"),
        (7.6, 3.1, 1.4, 1.0, DEVICE, "reduce", "in rank order"),
        (0.2, 0.3, 1.3, 1.2, PLAIN, "rank 1", "symmetric\nbuffers"),
        (1.9, 0.3, 1.4, 1.2, WIRE, "keys", "K and V rows\nthat it reads"),
        (3.6, 0.3, 2.0, 1.2, WIRE, "grads", "partial dk and dv\nof its keys"),
        (5.9, 0.3, 3.1, 1.2, WIRE, "control words", "at the start of each buffer:\nsignals, credits, epoch"),
    ],
    [
        ((3.3, 3.6), (3.6, 3.6), ""),
        ((5.6, 3.6), (5.9, 3.6), ""),
        ((7.3, 3.6), (7.6, 3.6), ""),
        ((2.6, 3.1), (2.6, 1.5), "rows, then signals"),
        ((4.6, 3.1), (4.6, 1.5), "dk, dv"),
        ((6.8, 3.1), (7.0, 1.5), "signal"),
        ((8.3, 3.1), (8.3, 1.5), "credits"),
    ],
)


TWO_LEVELS = (
    (9.2, 5.4),
    [
        (0.2, 4.3, 1.6, 0.8, PLAIN, "node 0", "owner of a row"),
        (0.2, 2.7, 1.6, 0.9, HOST, "rank 0", "rows of K and V"),
        (0.2, 0.5, 1.6, 0.9, WIRE, "GRADS", "one sum of\neach far node"),
        (3.6, 4.3, 5.4, 0.8, PLAIN, "node 1", "three ranks that need the row"),
        (3.6, 2.7, 2.0, 0.9, WIRE, "HELD", "each far row once,\non the carrier"),
        (3.6, 0.5, 2.0, 0.9, WIRE, "TERMS", "on the carrier:\nadded in rank order"),
        (7.0, 3.1, 2.0, 0.8, WIRE, "OUT of rank 3", "the carrier itself"),
        (7.0, 2.1, 2.0, 0.8, WIRE, "OUT of rank 4", "dk, dv computed"),
        (7.0, 1.1, 2.0, 0.8, WIRE, "OUT of rank 5", "dk, dv computed"),
    ],
    [
        ((1.8, 3.15), (3.6, 3.15), "network, once"),
        ((5.6, 3.25), (7.0, 3.5), "forward"),
        ((5.6, 3.1), (7.0, 2.6), ""),
        ((5.6, 2.95), (7.0, 1.75), ""),
        ((7.0, 3.2), (5.6, 1.3), ""),
        ((7.0, 2.2), (5.6, 1.1), "terms"),
        ((7.0, 1.3), (5.6, 0.85), ""),
        ((3.6, 0.95), (1.8, 0.95), "network, one sum"),
    ],
)


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


def schedule_content() -> Content:
    """Work tiles of a backward of full documents on 12 CTAs, by position and by cost: (cta, start, length, head)."""
    mask = Mask.varlen([0, 128, 256, 512, 768, 1280, 2560])
    plan = TilePlan.of_table(mask.slices, KEYS, KEYS, 128, 2, is_transposed=True)
    length = steps_of_tiles(plan, 64).tolist()
    found = []
    for order in (range(len(length)), plan.order.tolist()):
        tiles = [(tile, head) for tile in order for head in range(HEADS_KV)]
        times = np.array([4 * length[tile] + OVERHEAD for tile, _ in tiles], dtype=float)  # 4 query heads a kv head
        starts, free, placed = starts_of(times, CTAS), [0.0] * CTAS, []
        for (_, head), start, time in zip(tiles, starts.tolist(), times.tolist()):
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
    starts = starts_of(np.array(counts, dtype=float), num_ctas).tolist()
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
    "design_schedule.png": (schedule_content, draw_schedule),
    "design_fused_comm.png": (lambda: FUSED, draw_boxes),
    "design_two_levels.png": (lambda: TWO_LEVELS, draw_boxes),
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
