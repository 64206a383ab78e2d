# SPDX-License-Identifier: Apache-2.0
"""What a mask costs before the first attention call: from the mask to the plan of this rank, on one thread of the host.

    python benchmarks/planner.py [--masks packed_128K,window_4M] [--repeats 5] [--node 8] [--out OUT]
    python benchmarks/planner.py dispatch | nodes | new-mask [--help]

Each repeat has a mask that nothing has seen: other documents, or another window. The time is the best of the repeats;
beside it are the quantiles of all and, of the best one, its parts: ``mask`` builds the mask, ``plan`` is ``make_plan``,
and ``rank`` is what this rank computes and receives. With ``--node`` so many ranks share a node, and the dispatch looks
at that. No GPU is used. ``new-mask`` times the parts inside of these and the tile plans of kernels.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from case_options import list_of  # noqa: E402
from masks import sample_documents  # noqa: E402
from parts import run_part, told  # noqa: E402
from picture import draw, short  # noqa: E402
from progress import steps  # noqa: E402
from result_file import plain_settings, write_results  # noqa: E402

from magi_attention.api import DispatchConfig, DistAttnConfig, Mask, make_plan  # noqa: E402
from magi_attention.benchmarking.timing import middle_and_quantiles  # noqa: E402

PARTS = {
    "dispatch": ("dispatch", "balance and rows fetched by dispatch, and how planning grows"),
    "nodes": ("across_nodes", "what it saves that the dispatch knows which ranks share a node"),
    "packs": ("pack_balance", "how evenly data-parallel groups work on packed documents"),
    "new-mask": ("new_mask", "the parts inside of a plan, and the tile plans of kernels"),
}
HEADS, HEAD_DIM = (64, 8), 128
FRAME, WINDOW = 1560, 1024  # tokens of a frame of video; keys that a query sees
K, M = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Case:
    """``make`` gives the mask of so many tokens with a seed."""

    name: str
    tokens: int
    ranks: int
    make: Callable[[int, int], Mask]


def packed(tokens: int, seed: int) -> Mask:
    return Mask.varlen(np.cumsum([0, *sample_documents(tokens, seed)]).tolist(), causal=True)


def thousand_documents(tokens: int, seed: int) -> Mask:
    cuts = np.random.default_rng(seed).choice(np.arange(1, tokens), 999, replace=False)
    return Mask.varlen([0, *np.sort(cuts).tolist(), tokens], causal=True)


def tree(tokens: int, seed: int) -> Mask:
    """10,000 nodes, each below a random earlier one; 1 in 100 is a root."""
    rng = np.random.default_rng(seed)
    number = np.arange(10_000)
    parents = np.where(rng.random(10_000) < 0.01, -1, (rng.random(10_000) * number).astype(np.int64))
    parents[0] = -1
    cuts = np.sort(rng.choice(np.arange(1, tokens), 9_999, replace=False))
    return Mask.prefix_tree(np.diff(cuts, prepend=0, append=tokens), parents)


def block_causal(tokens: int, seed: int) -> Mask:
    return Mask.block_causal([0, tokens], FRAME + seed)


def window(tokens: int, seed: int) -> Mask:
    return Mask.sliding_window(tokens, (WINDOW - 1 + seed, 0))


CASES = {
    "packed_128K": Case("packed causal", 128 * K, 8, packed),
    "documents_1M": Case("1,000 documents", M, 64, thousand_documents),
    "tree_4M": Case("tree of 10,000 nodes", 4 * M, 64, tree),
    "blocks_4M": Case("block-causal", 4 * M, 256, block_causal),
    "window_4M": Case("window", 4 * M, 1024, window),
    "packed_4M": Case("packed causal", 4 * M, 1024, packed),
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], epilog=told(PARTS))
    add = parser.add_argument
    add("--masks", type=list_of(str, list(CASES)), default=list(CASES), metavar="A,B", help=", ".join(CASES))
    add("--repeats", type=int, default=5, help="timed masks of each, of which the best counts (5)")
    add("--node", type=int, metavar="N", help="ranks that share a node; without it plans know of no nodes")
    add("--out", type=Path, help="write OUT.json and OUT.png")
    return parser


def parts_ms(case: Case, seed: int, node: int | None) -> dict[str, float]:
    """Milliseconds of each part for one mask."""
    marks = [time.perf_counter()]
    mask = case.make(case.tokens, seed)
    marks.append(time.perf_counter())
    config = DistAttnConfig(DispatchConfig(nodes=node))
    plan = make_plan(mask, case.ranks, config, num_heads_q=HEADS[0], num_heads_kv=HEADS[1], head_dim=HEAD_DIM)
    marks.append(time.perf_counter())
    # A rank's plan is made where it is first asked for.
    plan.rank(case.ranks // 2).stages  # noqa: B018
    marks.append(time.perf_counter())
    return dict(zip(("mask", "plan", "rank"), (1e3 * (b - a) for a, b in zip(marks, marks[1:]))))


def measure(case: Case, repeats: int, node: int | None) -> dict:
    """One row of the record. The first mask is not timed: it loads what has to be loaded."""
    found = [parts_ms(case, seed, node) for seed in range(repeats + 1)][1:]
    totals = [sum(parts.values()) for parts in found]
    _, low, high = middle_and_quantiles(totals)
    best = found[totals.index(min(totals))]
    return {
        "mask": case.name, "tokens": case.tokens, "ranks": case.ranks, "ms": min(totals), "p10_ms": low,
        "p90_ms": high, "parts_ms": best,
    }  # fmt: skip


def line(row: dict) -> str:
    parts = "  ".join(f"{part} {ms:.1f}" for part, ms in row["parts_ms"].items())
    what = f"{row['mask']}, {short(row['tokens'])} tokens, {row['ranks']} ranks"
    return f"{what:44s} {row['ms']:8.1f} ms  ({parts})"


def main(arguments: Sequence[str] | None = None) -> int:
    if (done := run_part(arguments, PARTS)) is not None:
        return done
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats is {options.repeats}; give at least 1.")
    torch.set_num_threads(1)
    rows: list[dict] = []
    for name in steps(options.masks, str):
        rows.append(measure(CASES[name], options.repeats, options.node))
        print(line(rows[-1]), flush=True)
    if options.out:
        settings = plain_settings(options) | {"heads": HEADS, "head_dim": HEAD_DIM, "threads": 1}
        write_results(options.out, settings, results=rows)
        draw(Path(f"{options.out}.json"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
