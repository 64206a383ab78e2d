# SPDX-License-Identifier: Apache-2.0
"""Which rank holds which tokens: how dispatches compare in balance and in rows fetched, and how planning grows.

    python benchmarks/planner.py dispatch [--ranks 8,64] [--tokens 8K] [--seeds 2] [--no-growth] [--out OUT]

``tokens`` are those of a rank, for 64 ranks or fewer; more ranks have half as many. All but ``zigzag`` and ``whole``
cut the sequence into 16 chunks for each rank. ``zigzag`` cuts each document into twice as many pieces as there are
ranks and gives a rank the pieces r and ``2 * ranks - 1 - r``, as ring attention does. ``whole`` gives documents to
ranks whole, the largest first to the rank with the least work, and cuts the fewest of the largest by zigzag with which
the heaviest rank is within 1% of the mean: what the abstract of FlashCP (arXiv 2606.08476) says, as we read it; ranks
then hold different numbers of tokens. No GPU is used.
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from case_options import list_of, parse_size
from cp_layout import draw_packs
from masks import sample_documents
from result_file import plain_settings, write_results

from magi_attention.api import (
    DispatchConfig,
    DistAttnConfig,
    LocalityDispatchAlg,
    Mask,
    MinHeapDispatchAlg,
    make_plan,
)
from magi_attention.common.intervals import sum_by
from magi_attention.meta.chunking import Cut, chunk_areas
from magi_attention.meta.predict.bounds import blocks_of, least_rows
from magi_attention.meta.solver.links import count_rows

CHUNKS = 16  # of a rank
FRAME, WINDOW = 1560, 1024
COLOURS = {"locality": "#1f4e96", "zigzag": "#e08e36", "whole": "#59a869", "least": "#8b949e"}
Ranges = list[tuple[int, int, int]]  # first token, end, rank


def packed(tokens: int, seed: int) -> Mask:
    return Mask.varlen([0, *np.cumsum(draw_packs(tokens, 1, seed)[0]).tolist()], causal=True)


def packed_short(tokens: int, seed: int) -> Mask:
    return Mask.varlen(np.cumsum([0, *sample_documents(tokens, seed)]).tolist(), causal=True)


def video(tokens: int, seed: int) -> Mask:
    return Mask.block_causal([0, tokens], FRAME + seed)


def videos(tokens: int, seed: int) -> Mask:
    rng, ends = np.random.default_rng(seed), [0]
    while ends[-1] < tokens:
        ends.append(min(tokens, ends[-1] + FRAME * int(rng.integers(4, 64))))
    return Mask.block_causal(ends, FRAME)


def window(tokens: int, seed: int) -> Mask:
    return Mask.sliding_window(tokens, (WINDOW - 1 + seed, 0))


def prefix_trees(tokens: int, seed: int) -> Mask:
    """Prompts of 200 to 4,000 tokens with 4 to 16 responses of 50 to 3,000."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    parents: list[int] = []
    while sum(lengths) < tokens:
        root, responses = len(lengths), int(rng.integers(4, 17))
        lengths += [int(rng.integers(200, 4001)), *rng.integers(50, 3001, size=responses).tolist()]
        parents += [-1] + [root] * responses
    ends = np.minimum(np.cumsum(lengths), tokens)
    kept = np.diff(ends, prepend=0) > 0
    return Mask.prefix_tree(np.diff(ends, prepend=0)[kept], np.array(parents)[kept])


MASKS: dict[str, Callable[[int, int], Mask]] = {
    f.__name__: f for f in (packed, packed_short, video, videos, window, prefix_trees)
}


def zigzag(blocks: np.ndarray, ranks: int) -> Ranges:
    """Each block in 2 * ranks pieces."""
    found = []
    for start, end in blocks.tolist():
        cuts = start + (np.arange(2 * ranks + 1) * (end - start)) // (2 * ranks)
        owners = [*range(ranks), *reversed(range(ranks))]
        found += [(a, b, r) for a, b, r in zip(cuts[:-1].tolist(), cuts[1:].tolist(), owners) if a < b]
    return found


def whole(blocks: np.ndarray, areas: np.ndarray, ranks: int) -> Ranges:
    """The fewest of the largest blocks by zigzag, the others whole."""
    order = np.argsort(-areas, kind="stable")
    mean = areas.sum() / ranks

    def place(cut: int) -> tuple[float, list[int]]:
        loads = [(float(areas[order[:cut]].sum()) / ranks, rank) for rank in range(ranks)]
        owners = []
        for block in order[cut:].tolist():
            load, rank = loads[0]
            heapq.heapreplace(loads, (load + float(areas[block]), rank))
            owners.append(rank)
        return max(loads)[0], owners

    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if place(middle)[0] <= 1.01 * mean else (middle + 1, high)
    held = [(*blocks[block].tolist(), rank) for block, rank in zip(order[low:].tolist(), place(low)[1])]
    return sorted([*zigzag(blocks[order[:low]], ranks), *held])


def figures(imbalance: float, rows: np.ndarray) -> dict[str, float]:
    return {"imbalance": imbalance, "most_rows": int(rows.max()), "mean_rows": float(rows.mean())}


def measures(mask: Mask, ranges: Ranges, ranks: int) -> dict[str, float]:
    """Balance and rows fetched where each rank holds such tokens."""
    held = np.array(sorted(ranges), dtype=np.int64)
    cut, owner = Cut.of(mask.slices.array, held[:, :2]), held[:, 2]
    loads = sum_by(owner, cut.work, ranks)
    return figures(float(loads.max() / loads.mean()), count_rows(cut, owner, ranks))


def by_plan(mask: Mask, alg, ranks: int):
    """The plan, what it measures and milliseconds of planning, the better of two."""
    config = DistAttnConfig(DispatchConfig(chunk_size=-(-mask.total_q // (CHUNKS * ranks)), alg=alg))
    times = []
    for _ in range(2):
        start = time.perf_counter()
        plan = make_plan(mask, ranks, config)
        times.append(1e3 * (time.perf_counter() - start))
    rows = np.array([sum(int(np.diff(r, axis=1).sum()) for r in stages) for stages in plan.stage_ranges])
    return plan, figures(plan.imbalance, rows), min(times)


def compare(name: str, tokens: int, ranks: int, seed: int) -> list[dict]:
    """A row of the record for each dispatch."""
    mask = MASKS[name](tokens, seed)
    blocks = blocks_of(mask.slices.array)
    block_of = np.searchsorted(blocks[:, 0], mask.slices.array[:, 0], side="right") - 1
    where = {"mask": name, "tokens": tokens, "ranks": ranks, "seed": seed}
    rows = []
    for label, alg in (("locality", LocalityDispatchAlg()), ("min_heap", MinHeapDispatchAlg())):
        plan, found, ms = by_plan(mask, alg, ranks)
        rows.append({**where, "dispatch": label, **found, "ms": ms})
        if label == "locality":
            rows[-1]["least_mean_rows"] = (least_rows(plan) or 0) / ranks
    areas = sum_by(block_of, chunk_areas(mask.slices.array, np.arange(len(block_of)), len(block_of)), len(blocks))
    for label, make in (("zigzag", lambda: zigzag(blocks, ranks)), ("whole", lambda: whole(blocks, areas, ranks))):
        start = time.perf_counter()
        ranges = make()
        ms = 1e3 * (time.perf_counter() - start)
        rows.append({**where, "dispatch": label, **measures(mask, ranges, ranks), "ms": ms})
    return rows


def growth() -> list[dict]:
    """Milliseconds from a mask to the plan of one rank, over four decades of tokens and of documents; best of three."""
    rows = []
    for kind, sizes in (("tokens", (1e3, 1e4, 1e5, 1e6, 1e7)), ("documents", (10, 100, 1e3, 1e4, 1e5))):
        for number in map(int, sizes):
            tokens = number if kind == "tokens" else 100 * number
            ranks = max(min(tokens // 4096, 1024), 2) if kind == "tokens" else 64
            times = []
            for seed in range(4):
                lengths = sample_documents(tokens, seed) if kind == "tokens" else [100] * number
                cuts = np.cumsum([0, *np.random.default_rng(seed).permutation(lengths)]).tolist()
                start = time.perf_counter()
                _ = make_plan(Mask.varlen(cuts, causal=True), ranks).rank(ranks // 2).stages
                times.append(1e3 * (time.perf_counter() - start))
            rows.append({"grows": kind, "number": number, "ranks": ranks, "ms": min(times[1:])})
            print(f"{number:>12,} {kind}, {ranks} ranks: {rows[-1]['ms']:.2f} ms", flush=True)
    return rows


def draw(path: Path, rows: list[dict], grown: list[dict]) -> None:
    """Mean rows over those of MinHeap, and the growth of planning."""
    from magi_attention.tools.report.pictures import new_figure

    names = list(dict.fromkeys(row["mask"] for row in rows))
    columns = len(names) // 2 + 1
    figure, axes = new_figure(3.2 * columns, 6, columns, rows=2)
    for axis, name in zip(axes[:, :-1].flat, names):
        for label, colour in COLOURS.items():
            points = []
            for ranks in sorted({row["ranks"] for row in rows}):
                found = [row for row in rows if (row["mask"], row["ranks"]) == (name, ranks)]
                base = np.mean([row["mean_rows"] for row in found if row["dispatch"] == "min_heap"])
                if label == "least":
                    values = [row["least_mean_rows"] for row in found if "least_mean_rows" in row]
                else:
                    values = [row["mean_rows"] for row in found if row["dispatch"] == label]
                points.append((ranks, max(float(np.mean(values) / base), 1e-3)))
            axis.plot(*zip(*points), "o-", color=colour, label=label, markersize=3)
        axis.axhline(1, color="#c4453c", linewidth=1, label="min_heap")
        axis.set(title=name.replace("_", " "), xscale="log", yscale="log", xlabel="ranks")
    axes[0, 0].legend(fontsize=7)
    axes[0, 0].set_ylabel("rows fetched, of MinHeap's")
    for axis, kind in zip(axes[:, -1], ("tokens", "documents")):
        part = [row for row in grown if row["grows"] == kind]
        if part:
            sizes, ms = [r["number"] for r in part], [r["ms"] for r in part]
            axis.loglog(sizes, ms, "o-", color="#1f4e96")
            ideal = [ms[-1] * n * np.log(n) / (sizes[-1] * np.log(sizes[-1])) for n in sizes]
            axis.loglog(sizes, ideal, ":", color="#8b949e")
        axis.set(title="planning, dotted: n log n", xlabel=kind, ylabel="ms")
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="planner.py dispatch", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--masks", type=list_of(str, list(MASKS)), default=list(MASKS), metavar="A,B", help=", ".join(MASKS))
    add("--ranks", type=list_of(int), default=[8, 64, 256, 1024], metavar="A,B", help="numbers of ranks")
    add("--tokens", type=parse_size, default=8192, help="tokens of a rank (8K)")
    add("--seeds", type=int, default=2, help="masks of each kind (2)")
    add("--no-growth", action="store_true", help="leave out how planning grows")
    add("--out", type=Path, help="write OUT.json and OUT.png")
    options = parser.parse_args(arguments)
    rows: list[dict] = []
    for name in options.masks:
        for ranks in options.ranks:
            for seed in range(1, options.seeds + 1):
                tokens = ranks * (options.tokens if ranks <= 64 else options.tokens // 2)
                rows += (found := compare(name, tokens, ranks, seed))
                for row in found:
                    print(
                        f"{name:13s} {ranks:5d} ranks, seed {seed}  {row['dispatch']:9s}"
                        f"  imbalance {row['imbalance']:.4f}"
                        f"  rows: most {row['most_rows']:>9,} mean {row['mean_rows']:>11,.0f}  {row['ms']:8.1f} ms",
                        flush=True,
                    )
    grown = [] if options.no_growth else growth()
    if options.out:
        settings = {**plain_settings(options), "chunks_per_rank": CHUNKS, "threads": 1}
        write_results(options.out, settings, dispatches=rows, growth=grown)
        draw(options.out.with_suffix(".png"), rows, grown)
    return 0
