# SPDX-License-Identifier: Apache-2.0
"""Stages by the uniform algorithm, the cost formula, and the dynamic choice of the degree."""

from __future__ import annotations

import pytest

from magi_attention.config import GreedyOverlapAlg, UniformOverlapAlg
from magi_attention.errors import ContractError
from magi_attention.meta.solver.overlap_solver import OverlapSolver, OverlapStageCost, uniform_stages


def costs(*pairs):
    return [OverlapStageCost(comm, calc) for comm, calc in pairs]


def test_uniform_stages_cover_every_entry_in_order() -> None:
    for n in range(1, 20):
        for degree in range(1, 12):
            stages = uniform_stages(n, degree)
            assert len(stages) == degree
            assert [i for start, stop in stages for i in range(start, stop)] == list(range(n))
            sizes = [stop - start for start, stop in stages]
            if degree + 1 <= n:
                assert sizes == [n // degree + (i < n % degree) for i in range(degree)]
            else:  # one remote chunk per stage, then idle ones
                assert sum(size > 0 for size in sizes) == max(n - 1, 1)


def test_cost_of_a_schedule() -> None:
    entries = costs((0, 10), (4, 6), (8, 2), (1, 1))
    best, by_degree = OverlapSolver(UniformOverlapAlg()).solve(entries, dynamic_max_degree=3)
    assert by_degree[1].overall_cost == max(13, 10) + 9
    assert by_degree[2].partitions == [[0, 1], [2, 3]]
    assert by_degree[2].overall_cost == max(4, 10) + max(9, 6) + 3
    assert by_degree[3].partitions == [[0, 1], [2], [3]]
    assert by_degree[3].overall_cost == max(4, 10) + max(8, 6) + max(1, 2) + 1
    assert best.overlap_degree == 3
    assert sorted(by_degree) == [1, 2, 3]


def test_ties_take_the_smaller_degree_and_no_limit_means_n() -> None:
    best, by_degree = OverlapSolver(UniformOverlapAlg()).solve(costs((0, 5), (0, 0), (0, 0)))
    assert best.overlap_degree == 1
    assert sorted(by_degree) == [1, 2, 3]


def test_idle_stages_when_nothing_is_remote() -> None:
    best, _ = OverlapSolver(UniformOverlapAlg()).solve(costs((0, 5)), overlap_degree=3)
    assert best.partitions == [[0], [], []]
    assert best.overall_cost == 5


def test_shuffled_costs_use_a_private_seed() -> None:
    entries = costs(*[(0, 0)] * 9)
    alg = UniformOverlapAlg(random_costs=True, random_seed=3)
    first = OverlapSolver(alg).solve(entries, overlap_degree=2)[0]
    second = OverlapSolver(alg).solve(entries, overlap_degree=2)[0]
    assert first.partitions == second.partitions
    assert first.partitions[0][0] == 0
    assert sorted(sum(first.partitions, [])) == list(range(9))
    assert first.partitions != OverlapSolver(UniformOverlapAlg()).solve(entries, overlap_degree=2)[0].partitions


def test_errors() -> None:
    with pytest.raises(NotImplementedError):
        OverlapSolver(GreedyOverlapAlg()).solve(costs((0, 1)))
    with pytest.raises(ContractError):
        OverlapSolver(UniformOverlapAlg()).solve([])
