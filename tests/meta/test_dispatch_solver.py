# SPDX-License-Identifier: Apache-2.0
"""Values of every dispatch algorithm, and the shapes of their assignments."""

from __future__ import annotations

import random

import numpy as np
import pytest

from magi_attention.config import (
    BatchToppHeapDispatchAlg,
    BSDispatchAlg,
    BTPDispatchAlg,
    DPDispatchAlg,
    LBDispatchAlg,
    MinHeapDispatchAlg,
    RandomSelectDispatchAlg,
    SequentialDispatchAlg,
    SortedSequentialSelectAlg,
    ToppHeapDispatchAlg,
)
from magi_attention.errors import ContractError
from magi_attention.meta.solver.dispatch_solver import (
    DispatchData,
    DispatchJob,
    DispatchSolver,
    IOUAffinity,
    SampleIDAffinity,
)

WORK = [2, 4, 3, 16, 13, 5, 9, 10]


def solve(alg, work, k, affinities=None, sample_areas=None):
    data = DispatchData(DispatchJob.from_job_list(work, affinities), k, sample_areas)
    return DispatchSolver(alg).solve(data)


def check_assignment(solution, work, k, equal=False):
    parts = solution.bucket_partitions
    assert len(parts) == k
    assert sorted(i for p in parts for i in p) == list(range(len(work)))
    assert max(sum(work[i] for i in p) for p in parts) == solution.minimax_workload
    if equal:
        assert {len(p) for p in parts} == {len(work) // k}


def test_lower_bound_and_dynamic_programming_give_values_only() -> None:
    assert solve(LBDispatchAlg(), WORK, 4).minimax_workload == 15.5
    assert solve(DPDispatchAlg(), WORK, 4).minimax_workload == 16
    assert solve(LBDispatchAlg(), WORK, 4).bucket_partitions == []


@pytest.mark.parametrize(
    ("alg", "value", "equal"),
    [(BSDispatchAlg(), 16, False), (MinHeapDispatchAlg(), 18, True), (SequentialDispatchAlg(), 19, True)],
    ids=["binary_search", "min_heap", "sequential"],
)
def test_known_values(alg, value, equal) -> None:
    solution = solve(alg, WORK, 4)
    assert solution.minimax_workload == value
    check_assignment(solution, WORK, 4, equal)


def test_min_heap_is_known_to_be_suboptimal() -> None:
    solution = solve(MinHeapDispatchAlg(), [8, 7, 6, 5, 4, 2, 2, 2], 2)
    assert sorted(sum([8, 7, 6, 5, 4, 2, 2, 2][i] for i in p) for p in solution.bucket_partitions) == [17, 19]


def test_topp_heap_with_distinct_samples_and_with_zero_p() -> None:
    distinct = [SampleIDAffinity([i]) for i in range(8)]
    solution = solve(ToppHeapDispatchAlg(top_p=0.5), WORK, 4, distinct)
    assert solution.minimax_workload == 18
    check_assignment(solution, WORK, 4, equal=True)
    zero = solve(ToppHeapDispatchAlg(top_p=0.0), WORK, 4, distinct)
    heap = solve(MinHeapDispatchAlg(), WORK, 4)
    assert zero.bucket_partitions == heap.bucket_partitions


def test_topp_heap_prefers_the_rank_that_shares_keys() -> None:
    work = [8, 7, 2, 1]
    ranges = [[(0, 10)], [(10, 20)], [(0, 10)], [(10, 20)]]
    solution = solve(ToppHeapDispatchAlg(top_p=1.0), work, 2, [IOUAffinity(r) for r in ranges])
    assert [sorted(p) for p in solution.bucket_partitions] == [[0, 2], [1, 3]]
    plain = solve(MinHeapDispatchAlg(), work, 2)
    assert [sorted(p) for p in plain.bucket_partitions] == [[0, 3], [1, 2]]


def test_batched_topp_keeps_its_candidates_for_a_batch() -> None:
    work = [9, 8, 7, 6, 5, 4, 3, 2]
    affinities = [SampleIDAffinity([0]) for _ in work]
    batched = solve(BatchToppHeapDispatchAlg(top_p=0.25, num_of_select_chunk=2), work, 4, affinities)
    check_assignment(batched, work, 4, equal=True)
    # One candidate per batch of two: neighbours in the order of area land together.
    assert [sorted(p) for p in batched.bucket_partitions] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(("ratio", "value"), [(1.0, 32), (0.5, 28), (0.2, 32), (0.0, 28)])
def test_sorted_sequential(ratio, value) -> None:
    work = [8, 8, 8, 8, 8, 8, 4, 4]
    ids = [SampleIDAffinity(x) for x in ([0],) * 5 + ([0, 1], [1], [1])]
    solution = solve(SortedSequentialSelectAlg(allocation_ratio=ratio), work, 2, ids, [48, 8])
    assert solution.minimax_workload == value
    check_assignment(solution, work, 2, equal=True)


def test_random_select_ignores_the_callers_random_state() -> None:
    random.seed(1)
    first = solve(RandomSelectDispatchAlg(), WORK, 4)
    random.seed(2)
    second = solve(RandomSelectDispatchAlg(), WORK, 4)
    assert first.bucket_partitions == second.bucket_partitions
    check_assignment(first, WORK, 4, equal=True)


def test_exact_algorithms_agree_with_brute_force() -> None:
    rng = random.Random(0)
    for _ in range(60):
        work = [rng.randrange(0, 30) for _ in range(rng.randrange(1, 9))]
        k = rng.randrange(1, 5)
        best = least(work, k)
        assert solve(DPDispatchAlg(), work, k).minimax_workload == best
        assert solve(BSDispatchAlg(), work, k).minimax_workload == best
        if len(work) % k == 0:
            exact = solve(BTPDispatchAlg(), work, k)
            check_assignment(exact, work, k, equal=True)
            assert exact.minimax_workload == least(work, k, is_equal=True)


def least(work, k, is_equal=False):
    """By all assignments."""
    ranks = np.indices((k,) * len(work)).reshape(len(work), -1)
    on_rank = [ranks == rank for rank in range(k)]
    most = np.max([np.array(work) @ on for on in on_rank], axis=0)
    return most[np.all([on.sum(axis=0) == len(work) // k for on in on_rank], axis=0)].min() if is_equal else most.min()


def test_min_heap_leaves_no_rank_empty() -> None:
    for n in range(1, 40):
        for k in range(1, n + 1):
            solution = solve(MinHeapDispatchAlg(), [1] * n, k)
            assert all(solution.bucket_partitions), (n, k)
            assert max(map(len, solution.bucket_partitions)) <= -(-n // k)


def test_unequal_counts_are_refused_with_a_remedy() -> None:
    with pytest.raises(ContractError, match="MinHeapDispatchAlg"):
        solve(ToppHeapDispatchAlg(top_p=0.5), [1, 2, 3], 2, [SampleIDAffinity([0])] * 3)
    with pytest.raises(ContractError, match="affinity"):
        solve(ToppHeapDispatchAlg(top_p=0.5), [1, 2], 2)
    with pytest.raises(ContractError, match="num_buckets"):
        solve(MinHeapDispatchAlg(), [1, 2], 0)


def test_an_exact_search_cut_short_says_so_and_beats_the_greedy_one(caplog) -> None:
    rng = random.Random(3)
    work = [rng.randrange(10**6, 10**7) for _ in range(64)]
    greedy = solve(MinHeapDispatchAlg(), work, 8).minimax_workload
    for alg, equal in ((BTPDispatchAlg(), True), (BSDispatchAlg(), False)):
        with caplog.at_level("WARNING", logger="magi_attention.meta"):
            solution = solve(alg, work, 8)
        check_assignment(solution, work, 8, equal)
        assert sum(work) / 8 <= solution.minimax_workload <= greedy
        assert "over the best possible" in caplog.text
        caplog.clear()
