# SPDX-License-Identifier: Apache-2.0
"""Grouping a rank's remote chunks into overlap stages.

The cost model of a schedule with stages 1..D, entry 0 being the host: ::

    max(comm_1, host_calc) + sum_{i=2..D} max(comm_i, calc_{i-1}) + calc_D
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from magi_attention.common.enum import OverlapAlgType
from magi_attention.config import GreedyOverlapAlg, OverlapAlg, OverlapConfig, UniformOverlapAlg
from magi_attention.errors import ContractError, UnsupportedError

DEFAULT_SEED = 42


@dataclass(frozen=True)
class OverlapStageCost:
    """Predicted time of one entry, both in the same unit; the host's ``comm_cost`` is 0."""

    comm_cost: float
    calc_cost: float


@dataclass
class OverlapSolution:
    """``partitions[i]`` lists the entries of stage i; entry 0 (the host) is in the first one."""

    overlap_degree: int
    overall_cost: float
    partitions: list[list[int]]


class OverlapSolver:
    """Cuts the entries ``1..n-1`` into stages by ``alg``."""

    def __init__(self, alg: OverlapAlg) -> None:
        self.alg = alg

    def solve(
        self,
        stage_costs: Sequence[OverlapStageCost],
        overlap_degree: int | None = None,
        dynamic_max_degree: int | None = None,
    ) -> tuple[OverlapSolution, dict[int, OverlapSolution]]:
        """Best solution and all that were tried, by degree.

        With ``overlap_degree`` that degree alone is solved; otherwise degrees 1..``dynamic_max_degree`` (1..n if
        None or 0), and the cheapest by (cost rounded, degree) wins.
        """
        kind = getattr(self.alg, "type", None)  # and not the class: a reload of its module makes another
        if kind == OverlapAlgType.GREEDY:
            raise UnsupportedError("GreedyOverlapAlg is not implemented; use UniformOverlapAlg().")
        if kind != OverlapAlgType.UNIFORM:
            raise UnsupportedError(f"{type(self.alg).__name__} is no overlap algorithm of this package.")
        if not stage_costs:
            raise ContractError("stage_costs is empty; entry 0 must be the host's cost.")
        n = len(stage_costs)
        degrees = [overlap_degree] if overlap_degree is not None else range(1, (dynamic_max_degree or n) + 1)
        order = self._order(n)
        solutions = {degree: self._uniform(stage_costs, order, degree) for degree in degrees}
        best = min(solutions.values(), key=lambda s: (round(s.overall_cost), s.overlap_degree))
        return best, solutions

    def _order(self, n: int) -> list[int]:
        remote = list(range(1, n))
        if getattr(self.alg, "random_costs", False):
            # A private generator with a fixed seed: ranks must shuffle alike, and the caller's is left alone.
            seed = cast(UniformOverlapAlg, self.alg).random_seed
            random.Random(DEFAULT_SEED if seed is None else seed).shuffle(remote)
        return [0, *remote]

    def _uniform(self, costs: Sequence[OverlapStageCost], order: list[int], degree: int) -> OverlapSolution:
        stages = uniform_stages(len(order), degree)
        partitions = [[order[i] for i in range(start, stop)] for start, stop in stages]
        return OverlapSolution(degree, overall_cost(costs, partitions), partitions)


def uniform_stages(n: int, degree: int) -> list[tuple[int, int]]:
    """``degree`` runs over entries 0..n-1 (entry 0 is the host, in run 0); idle runs are empty."""
    if degree < 1:
        raise ContractError(f"Overlap degree {degree} has no stages; degree 0 is solved as one stage.")
    if n == 1:
        return [(0, 1)] + [(1, 1)] * (degree - 1)
    if degree + 1 > n:  # one remote entry a stage, the host riding with the first
        stages = [(0, 2)] + [(i, i + 1) for i in range(2, n)]
        return stages + [(n, n)] * (degree - len(stages))
    size, extra = divmod(n, degree)
    stages, start = [], 0
    for i in range(degree):
        stop = start + size + (i < extra)
        stages.append((start, stop))
        start = stop
    return stages


def overall_cost(costs: Sequence[OverlapStageCost], partitions: list[list[int]]) -> float:
    """Time of the schedule by the formula above."""
    comm = [sum(costs[i].comm_cost for i in part if i) for part in partitions]
    calc = [sum(costs[i].calc_cost for i in part if i) for part in partitions]
    total = max(comm[0], costs[0].calc_cost)
    for i in range(1, len(partitions)):
        total += max(comm[i], calc[i - 1])
    return total + calc[-1]


__all__ = [
    "GreedyOverlapAlg",
    "OverlapAlg",
    "OverlapConfig",
    "OverlapSolution",
    "OverlapSolver",
    "OverlapStageCost",
    "UniformOverlapAlg",
]
