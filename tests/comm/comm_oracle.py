# SPDX-License-Identifier: Apache-2.0
"""Random group casts of a whole world, and what they must give, written out row by row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from magi_attention.common.group_spec import GroupSpec
from magi_attention.common.two_level.nodes import Nodes

# per rank: input rows, input splits, destinations, output splits, sources, expected output rows
WORKED_EXAMPLE = [
    ([0, 1, 2, 3], [2, 1, 1], [[1], [1, 2], [2]], [1, 1, 1], [1, 2, 3], [5, 9, 13]),
    (
        *([4, 5, 6, 7], [1, 1, 2], [[3], [0, 3], [2]]),
        *([2, 2, 1, 1, 1], [0, 2, 0, 3, 3], [0, 1, 10, 11, 2, 12, 13]),
    ),
    ([8, 9, 10, 11], [1, 1, 2], [[3], [0, 3], [1]], [1, 1, 2, 2], [0, 0, 1, 3], [2, 3, 6, 7, 14, 15]),
    ([12, 13, 14, 15], [1, 1, 2], [[1], [0, 1], [2]], [1, 1, 1, 1], [1, 1, 2, 2], [4, 5, 8, 9]),
]


@dataclass
class WorldPlan:
    """``routes[j][i]`` = (source rank, row of its input) that becomes row i of rank j's output."""

    specs: list[GroupSpec]
    routes: list[list[tuple[int, int]]]

    def lists(self, rank):
        """The four lists of a group cast: input splits, output splits, destinations, sources."""
        s = self.specs[rank]
        dst = [list(d) for d in s.dst_indices]
        return list(s.input_splits), list(s.output_splits), dst, list(s.src_index)

    def reduce_lists(self, rank):
        """The four lists of the transposed group reduce."""
        in_splits, out_splits, dst, src = self.lists(rank)
        return out_splits, in_splits, src, dst


def random_plan(seed: int, world: int, max_splits: int = 4, max_size: int = 3) -> WorldPlan:
    rng = np.random.default_rng(seed)
    sizes = [rng.integers(0, max_size + 1, rng.integers(0, max_splits + 1)).tolist() for _ in range(world)]
    density = rng.random()
    dsts = [
        [sorted(rng.permutation(world)[: rng.binomial(world, density)].tolist()) for _ in sizes[r]]
        for r in range(world)
    ]
    specs, routes = [], []
    for j in range(world):
        queues = {}
        for s in range(world):
            starts = np.concatenate([[0], np.cumsum(sizes[s])]).astype(int)
            queues[s] = [(starts[i], n) for i, n in enumerate(sizes[s]) if j in dsts[s][i]]
        order = [s for s in range(world) for _ in queues[s]]
        if rng.random() < 0.7:  # the rest keeps arrival order, the path without a permutation
            rng.shuffle(order)
        out_splits, route = [], []
        for s in order:
            start, n = queues[s].pop(0)
            out_splits.append(n)
            route += [(s, int(start) + k) for k in range(n)]
        specs.append(GroupSpec.make(j, world, sizes[j], dsts[j], out_splits, order))
        routes.append(route)
    return WorldPlan(specs, routes)


def cast_rows(plan: WorldPlan, inputs: list[np.ndarray], rank: int) -> np.ndarray:
    rows = [inputs[s][i] for s, i in plan.routes[rank]]
    return np.array(rows) if rows else np.zeros((0, *inputs[0].shape[1:]), inputs[0].dtype)


def contributions(plan: WorldPlan, partials: list[np.ndarray], rank: int) -> list[list[np.ndarray]]:
    """For each row of the cast's input on ``rank``: what comes back for it, source ranks ascending."""
    found = [[] for _ in range(plan.specs[rank].input_rows)]
    for j, route in enumerate(plan.routes):
        for i, (s, row) in enumerate(route):
            if s == rank:
                found[row].append(partials[j][i])
    return found


def everybody(world: int, rows: int) -> list[GroupSpec]:
    """Each rank sends its rows to all others."""
    others = [[d for d in range(world) if d != r] for r in range(world)]
    return [
        GroupSpec.make(r, world, [rows], [others[r]], [rows] * (world - 1), others[r]) for r in range(world)
    ]  # fmt: skip


def scattered_nodes(sizes, rng: np.random.Generator) -> Nodes:
    """Nodes of these sizes whose ranks follow one another, or not."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return Nodes.of((rng.permutation(labels) if rng.random() < 0.3 else labels).tolist())


def draw_group_ends(rng: np.random.Generator, cast: WorldPlan) -> list[np.ndarray]:
    """For each rank some rows of its output, ascending, and the last one."""
    sizes = [spec.output_rows for spec in cast.specs]
    drawn = [np.sort(rng.choice(n, min(n, rng.integers(0, 4)), replace=False)) for n in sizes]
    return [np.unique(np.append(rows[rows > 0], n)) for rows, n in zip(drawn, sizes)]
