# SPDX-License-Identifier: Apache-2.0
"""What it saves that the dispatch knows which ranks share a node: rows between nodes, and modelled efficiency.

    python benchmarks/planner.py nodes [--gpus 64,512] [--masks documents,causal] [--node 8] [--out OUT]

Plans for real, rows counted, times by the model of `magi simulate` (one launch, 400 Gb/s of network for each GPU): no
GPU is used, and nothing was measured over a network. ``documents`` are those of docs/guides/simulate.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from case_options import list_of, parse_size
from dispatch import MASKS as DISPATCHED
from result_file import plain_settings, write_results

from magi_attention.common.mask import Mask
from magi_attention.tools.simulate import Case, Cluster, estimate
from magi_attention.tools.simulate.ways import WAYS, share_seconds

LENGTHS = (30_000, 2_000, 500, 9_000, 1_200, 700, 4_000)
WAY = "one launch"
COLOURS = {False: "#8b949e", True: "#1f4e96"}


def documents(tokens: int, causal: bool = True) -> Mask:
    ends = np.cumsum(np.resize(LENGTHS, tokens // min(LENGTHS)))
    return Mask.varlen([0, *ends[ends < tokens].tolist(), tokens], causal=causal)


def short_documents(tokens: int) -> Mask:
    rng = np.random.default_rng(1)
    return Mask.varlen([0, *np.sort(rng.choice(np.arange(1, tokens), tokens // 1000, replace=False)).tolist(), tokens])


MASKS: dict[str, Callable[[int], Mask]] = {
    "documents": documents,
    **{name: lambda tokens, make=make: make(tokens, 1) for name, make in DISPATCHED.items()},
    "documents_full": lambda tokens: documents(tokens, causal=False),
    "short_full": short_documents,
    "causal": Mask.causal,
}


def measure(name: str, gpus: int, tokens: int, cluster: Cluster, knows_nodes: bool) -> dict:
    """One row of the record."""
    start = time.perf_counter()
    case = Case(MASKS[name](gpus * tokens), gpus, cluster, knows_nodes=knows_nodes)
    work = case.plan_work(1)
    seconds, (traffic,), found = time.perf_counter() - start, work.traffic, estimate(WAY, case)
    forward, backward = (share_seconds(case, cluster, x) / WAYS[WAY](case, cluster, x).seconds for x in (False, True))
    return {
        "mask": name, "gpus": gpus, "knows_nodes": knows_nodes, "efficiency": found.efficiency, "forward": forward,
        "backward": backward, "imbalance": float(work.pairs.max() / work.pairs.mean()),
        "rows_needed_of_other_nodes": float(traffic.far.mean()), "rows_entering": float(traffic.net_in.mean()),
        "most_rows_sent": float(traffic.net_out.max()), "rows": float(traffic.rows.mean()), "seconds": seconds,
    }  # fmt: skip


def line(row: dict) -> str:
    return (
        f"{row['mask']:15s} {row['gpus']:5d} GPUs  {'with' if row['knows_nodes'] else 'without':7s} nodes"
        f"  efficiency {row['efficiency']:.3f} ({row['forward']:.2f} forward, {row['backward']:.2f} backward)"
        f"  imbalance {row['imbalance']:.4f}  rows of a GPU {row['rows']:>9,.0f}, straight from other nodes"
        f" {row['rows_needed_of_other_nodes']:>9,.0f}, once to a node {row['rows_entering']:>9,.0f}"
    )


def draw(path: Path, rows: list[dict]) -> None:
    """Efficiency by mask and number of GPUs, with and without."""
    from magi_attention.tools.report.pictures import new_figure

    names, sizes = (list(dict.fromkeys(row[key] for row in rows)) for key in ("mask", "gpus"))
    figure, axes = new_figure(11, 3.6, len(sizes), sharey=True)
    for axis, gpus in zip(axes, sizes):
        for shift, knows_nodes in ((-0.2, False), (0.2, True)):
            values = [r["efficiency"] for n in names for r in rows
                      if (r["mask"], r["gpus"], r["knows_nodes"]) == (n, gpus, knows_nodes)]  # fmt: skip
            label = f"dispatch {'with' if knows_nodes else 'without'} nodes"
            axis.bar(np.arange(len(names)) + shift, values, 0.4, color=COLOURS[knows_nodes], label=label)
        axis.axhline(0.9, color="#6e7780", linewidth=0.8, linestyle=":")
        axis.set_xticks(range(len(names)), [name.replace("_", " ") for name in names], rotation=60, ha="right")
        axis.set_title(f"{gpus:,} GPUs, a model", fontsize=10)
    figure.axes[0].set_ylabel("efficiency")
    figure.axes[0].legend(fontsize=7, frameon=False, loc="lower left")
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="planner.py nodes", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--masks", type=list_of(str, list(MASKS)), default=list(MASKS), metavar="A,B", help=", ".join(MASKS))
    add("--gpus", type=list_of(int), default=[64, 512, 4096], metavar="A,B", help="numbers of GPUs (64,512,4096)")
    add("--tokens", type=parse_size, default=8192, help="tokens of a GPU (8K)")
    add("--node", type=int, default=8, help="GPUs of a node (8)")
    add("--out", type=Path, help="write OUT.json and OUT.png")
    options = parser.parse_args(arguments)
    rows = []
    for name in options.masks:
        for gpus in options.gpus:
            for knows_nodes in (False, True):
                rows.append(measure(name, gpus, options.tokens, Cluster(node=options.node), knows_nodes))
                print(line(rows[-1]), flush=True)
    if options.out:
        write_results(options.out, {**plain_settings(options), "way": WAY}, rows=rows)
        draw(options.out.with_suffix(".png"), rows)
    return 0
