# SPDX-License-Identifier: Apache-2.0
"""Affinities against sets and multisets, and those of one's own in the dispatch."""

import random
from collections import Counter

import pytest

from magi_attention.common import AttnRange, AttnRanges
from magi_attention.config import BatchToppHeapDispatchAlg, MinHeapDispatchAlg, ToppHeapDispatchAlg
from magi_attention.meta.solver.dispatch_solver import (
    BaseDispatchAffinity,
    DispatchData,
    DispatchJob,
    DispatchSolver,
    IOUAffinity,
    SampleIDAffinity,
)


def random_ranges(rng) -> list[tuple[int, int]]:
    starts = [rng.randrange(40) for _ in range(rng.randrange(5))]
    return [(start, start + rng.randrange(9)) for start in starts]


def points(ranges) -> set[int]:
    return {x for start, end in ranges for x in range(start, end)}


@pytest.mark.parametrize("seed", range(30))
def test_iou_affinity_is_about_the_keys_that_two_share(seed):
    rng = random.Random(seed)
    x, y, more = random_ranges(rng), random_ranges(rng), random_ranges(rng)
    a, b = IOUAffinity.from_ranges(AttnRanges.from_ranges(x)), IOUAffinity(y)
    assert a.distance_to(b) == b.distance_to(a) == -len(points(x) & points(y))
    for pair in more[:2]:
        a.append(AttnRange(*pair))
    a.extend(AttnRanges.from_ranges(more[2:]))
    assert points(a.iou_ranges) == points(x) | points(more) and a.iou_ranges.is_merged()
    b.update(a)
    assert points(b.iou_ranges) == points(x) | points(y) | points(more)
    assert b.distance_to(b) == -len(points(b.iou_ranges)) and repr(b.iou_ranges) in repr(b)
    assert points(a.iou_ranges) == points(x) | points(more), "what is taken in does not change"


@pytest.mark.parametrize("seed", range(30))
def test_sample_id_affinity_counts(seed):
    rng = random.Random(seed)
    ids, others = ([rng.randrange(5) for _ in range(rng.randrange(1, 12))] for _ in "ab")
    a, b = SampleIDAffinity.from_list(ids=ids), SampleIDAffinity()
    assert b.is_empty() and not a.is_empty()
    for sample in others:
        b.add_sample_id(sample)
    counts, theirs = Counter(ids), Counter(others)
    assert [a.get_count(i) for i in range(6)] == [counts[i] for i in range(6)] and a.sample_id_cnt_dict == counts
    assert a.num_sample_ids() == len(set(ids)) and a.num_sample_ids(distinct=False) == len(ids)
    most, least = a.get_sample_id_by(), a.get_sample_id_by("min_count")
    assert counts[most] == max(counts.values()) and counts[least] == min(counts.values())
    assert most == next(i for i in ids if counts[i] == counts[most]), "of equal ones the first added"
    assert a.distance_to(b) == -theirs[most]
    b.update(a)
    assert b.sample_id_cnt_dict == counts + theirs and a.sample_id_cnt_dict == counts


def test_sample_ids_that_are_none():
    empty = SampleIDAffinity()
    assert empty.distance_to(SampleIDAffinity([1])) == 0 and empty.num_sample_ids() == 0
    with pytest.raises(AssertionError, match="no sample ids"):
        empty.get_sample_id_by("max_count")
    with pytest.raises(AssertionError, match="negative"):
        empty.add_sample_id(-1)
    with pytest.raises(ValueError, match="median"):
        SampleIDAffinity([1]).get_sample_id_by("median")


class Colour(BaseDispatchAffinity):
    """Colours by number; the distance is how far the means are apart."""

    def __init__(self, *colours: float) -> None:
        self.colours = list(colours)

    def mean(self) -> float:
        return sum(self.colours) / len(self.colours) if self.colours else 0.0

    def distance_to(self, other: "Colour") -> float:
        return abs(self.mean() - other.mean())

    def update(self, other: "Colour") -> None:
        self.colours += other.colours

    def __repr__(self) -> str:
        return f"Colour{tuple(self.colours)}"


def test_comparisons_follow_from_the_distance():
    me, others = Colour(3), [Colour(9), Colour(4), Colour(2), Colour(-3)]
    assert me.get_closest_affinity_idx(others) == 1 and me.get_farthest_affinity_idx(others) == 0
    assert [c.mean() for c in sorted(others, key=me.make_cmp_key())] == [4, 2, 9, -3]
    with pytest.raises(TypeError, match="abstract"):
        BaseDispatchAffinity()


@pytest.mark.parametrize("alg", [ToppHeapDispatchAlg(top_p=1.0), BatchToppHeapDispatchAlg(1.0, 2)])
def test_an_affinity_of_ones_own(alg):
    """Four jobs of equal work, two colours, two ranks: each rank gets one colour."""
    jobs = DispatchJob.from_job_list([1, 1, 1, 1], [Colour(8), Colour(0), Colour(8), Colour(0)])
    solution = DispatchSolver(alg).solve(DispatchData(jobs, 2))
    # The last job goes first, to rank 0: both ranks are as far from it.
    assert [sorted(p) for p in solution.bucket_partitions] == [[1, 3], [0, 2]]
    assert [job.affinity.colours for job in jobs] == [[8], [0], [8], [0]], "jobs keep their affinities"


class Contrary(Colour):
    def get_closest_affinity_idx(self, others):
        return self.get_farthest_affinity_idx(others)


def test_the_choice_can_be_overridden():
    jobs = DispatchJob.from_job_list([4, 3, 2, 1], [Contrary(8), Contrary(8), Contrary(0), Contrary(0)])
    solution = DispatchSolver(ToppHeapDispatchAlg(top_p=1.0)).solve(DispatchData(jobs, 2))
    assert [sorted(p) for p in solution.bucket_partitions] == [[0, 3], [1, 2]]
    alike = DispatchJob.from_job_list([4, 3, 2, 1], [Colour(8), Colour(8), Colour(0), Colour(0)])
    solution = DispatchSolver(ToppHeapDispatchAlg(top_p=1.0)).solve(DispatchData(alike, 2))
    assert [sorted(p) for p in solution.bucket_partitions] == [[0, 1], [2, 3]]


def test_jobs_are_checked():
    with pytest.raises(AssertionError, match="workload -1"):
        DispatchJob.from_job_list([1, -1])
    with pytest.raises(AssertionError, match="one class or none"):
        DispatchJob.from_job_list([1, 1], [IOUAffinity(), SampleIDAffinity()])
    with pytest.raises(AssertionError, match="1 affinities for 2"):
        DispatchJob.from_job_list([1, 1], [IOUAffinity()])
    with pytest.raises(AssertionError, match="needs a BaseDispatchAffinity"):
        DispatchSolver(ToppHeapDispatchAlg()).solve(DispatchData([DispatchJob(0, 1, object())], 1))
    floats = DispatchSolver(MinHeapDispatchAlg()).solve(DispatchData(DispatchJob.from_job_list([1.5, 2.5]), 2))
    assert floats.minimax_workload == 2.5 and DispatchJob(0).workload == 0
