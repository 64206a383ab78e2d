# SPDX-License-Identifier: Apache-2.0
"""How evenly data-parallel groups work on packed documents of a long-tailed distribution, by several samplers.

    python benchmarks/planner.py packs --ranks 16

No GPU is used: work is counted in allowed pairs, and in what the tokens of an 8B model take besides.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence

import numpy as np

from magi_attention.api import ModelShape
from magi_attention.cli.common import show_table
from magi_attention.integrations.balanced_packs import BalancedPackSampler, Step

SHAPE = ModelShape(4096, 36, 32, 8, 128, 12288, 151936)
LONGEST, MEAN_SHORT, TAIL = 131072, 2048, 0.9


def draw_lengths(count: int, seed: int) -> list[int]:
    """Pareto lengths from 2,048 tokens on, cut at 131,072."""
    draw = random.Random(seed)
    return [min(LONGEST, int(MEAN_SHORT * draw.paretovariate(TAIL))) for _ in range(count)]


def in_order(sampler: BalancedPackSampler, seed: int) -> list[Step]:
    """Documents in a drawn order, each behind the last one while there is room; packs in their order."""
    size = sampler.cp_sizes[-1]
    order = list(range(len(sampler.lengths)))
    random.Random(seed).shuffle(order)
    packs, tokens = [[]], 0
    for i in order:
        tokens += int(sampler.lengths[i])
        if tokens > size * sampler.tokens_per_rank:
            packs.append([])
            tokens = int(sampler.lengths[i])
        packs[-1].append(i)
    groups = sampler.ranks // size
    return [(size, packs[i : i + groups]) for i in range(0, len(packs) - groups + 1, groups)]


def row(name: str, sampler: BalancedPackSampler, steps: list[Step]) -> list[str]:
    loads = [[float(sampler.works[pack].sum()) / size for pack in packs] for size, packs in steps]
    tokens = sum(int(sampler.lengths[pack].sum()) for _, packs in steps for pack in packs)
    alone = sum(int(sampler.lengths[pack].sum()) for size, packs in steps if size == 1 for pack in packs)
    imbalance = [max(load) / float(np.mean(load)) for load in loads]
    # The slowest group makes a step, so this is the share of the time in which a rank has something to compute.
    busy = sum(float(np.mean(load)) for load in loads) / sum(map(max, loads))
    fill = tokens / (len(steps) * sampler.ranks * sampler.tokens_per_rank)
    numbers = (np.mean(imbalance), np.percentile(imbalance, 95), max(imbalance))
    return [name, *(f"{x:.3f}" for x in numbers), f"{busy:.1%}", f"{fill:.1%}", f"{alone / tokens:.1%}"]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="planner.py packs", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--tokens-per-rank", type=int, default=32768)
    parser.add_argument("--documents", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    lengths, rows = draw_lengths(args.documents, args.seed), []
    for name, sizes, steps_dealt in (
        ("in order, cp 4", (4,), 0), ("balanced, cp 4", (4,), 16), ("balanced, cp 1, 2, 4", (1, 2, 4), 16),
        ("the same, 64 steps dealt together", (1, 2, 4), 64),
    ):  # fmt: skip
        sampler = BalancedPackSampler(
            lengths, args.tokens_per_rank, ranks=args.ranks, rank=0, cp_sizes=sizes, shape=SHAPE, seed=args.seed,
            steps_dealt=steps_dealt or 1,
        )  # fmt: skip
        rows.append(row(name, sampler, list(sampler.steps()) if steps_dealt else in_order(sampler, args.seed)))
    head = ["packs", "max/mean of a step", "95%", "worst", "ranks busy", "room used", "tokens on one rank"]
    show_table(f"{args.documents:,} documents, {sum(lengths):,} tokens, {args.ranks} ranks", [head, *rows])
    return 0
