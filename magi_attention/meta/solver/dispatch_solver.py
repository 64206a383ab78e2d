# SPDX-License-Identifier: Apache-2.0
"""``DispatchSolver``: one entry for every dispatch algorithm, and the affinities that some of them use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from magi_attention.common.intervals import as_intervals, intersect_intervals, merge_intervals, total_length
from magi_attention.config import (
    BatchToppHeapDispatchAlg,
    BSDispatchAlg,
    BTPDispatchAlg,
    DispatchAlg,
    DispatchConfig,
    DPDispatchAlg,
    LBDispatchAlg,
    MinHeapDispatchAlg,
    RandomSelectDispatchAlg,
    SequentialDispatchAlg,
    SortedSequentialSelectAlg,
    ToppHeapDispatchAlg,
)
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.meta.solver import partition


class IOUAffinity:
    """Key ranges of a chunk or bucket; closest means most shared keys."""

    def __init__(self, k_ranges=()) -> None:
        self.ranges = merge_intervals(as_intervals(k_ranges))

    @classmethod
    def from_list(cls, k_ranges) -> IOUAffinity:
        return cls(k_ranges)

    def distance_to(self, other: IOUAffinity) -> float:
        return -total_length(intersect_intervals(self.ranges, other.ranges))

    def update(self, other: IOUAffinity) -> None:
        self.ranges = merge_intervals(np.concatenate([self.ranges, other.ranges]))


class SampleIDAffinity:
    """Multiset of sample ids; closest means most shared samples."""

    def __init__(self, sample_ids: Sequence[int] = ()) -> None:
        self.count = Counter(sample_ids)

    @classmethod
    def from_list(cls, sample_ids: Sequence[int]) -> SampleIDAffinity:
        return cls(sample_ids)

    def distance_to(self, other: SampleIDAffinity) -> float:
        return -sum(other.count[sample] for sample in self.count)

    def update(self, other: SampleIDAffinity) -> None:
        self.count.update(other.count)


@dataclass
class DispatchJob:
    """One chunk to place: its id, area and (where an algorithm asks for it) affinity."""

    job_id: int
    workload: int
    affinity: IOUAffinity | SampleIDAffinity | None = None

    @staticmethod
    def from_job_list(workloads: Sequence[int], affinities: Sequence | None = None) -> list[DispatchJob]:
        if affinities is None:
            affinities = [None] * len(workloads)
        if len(affinities) != len(workloads):
            raise ContractError(f"{len(affinities)} affinities for {len(workloads)} workloads; give one each.")
        return [DispatchJob(i, w, a) for i, (w, a) in enumerate(zip(workloads, affinities))]


@dataclass
class DispatchData:
    jobs: list[DispatchJob]
    num_buckets: int
    sample_areas: list[int] | None = None


@dataclass
class DispatchSolution:
    """``bucket_partitions[b]`` holds the job ids of bucket b, or is empty for value-only algorithms."""

    minimax_workload: float
    bucket_partitions: list[list[int]] = field(default_factory=list)


class DispatchSolver:
    """Runs ``alg`` on a ``DispatchData``; pure and the same on every rank."""

    def __init__(self, alg: DispatchAlg) -> None:
        self.alg = alg

    def solve(self, dispatch_data: DispatchData) -> DispatchSolution:
        """``ContractError`` if there are no buckets or the counts do not suit the algorithm."""
        jobs, k = dispatch_data.jobs, dispatch_data.num_buckets
        if k < 1:
            raise ContractError(f"num_buckets is {k}; give the number of ranks, >= 1.")
        value, buckets = self._run([job.workload for job in jobs], k, jobs, dispatch_data.sample_areas)
        return DispatchSolution(value, buckets or [])

    def _run(self, work, k, jobs, sample_areas):
        alg = self.alg
        if isinstance(alg, MinHeapDispatchAlg):
            return partition.min_heap(work, k)
        if isinstance(alg, SequentialDispatchAlg):
            return partition.sequential(work, k)
        if isinstance(alg, RandomSelectDispatchAlg):
            return partition.random_select(work, k, alg.seed)
        if isinstance(alg, BSDispatchAlg):
            return partition.binary_search(work, k)
        if isinstance(alg, BTPDispatchAlg):
            return partition.backtracking_pruning(work, k)
        if isinstance(alg, LBDispatchAlg):
            return partition.lower_bound(work, k)
        if isinstance(alg, DPDispatchAlg):
            return partition.dynamic_programming(work, k)
        if isinstance(alg, (ToppHeapDispatchAlg, BatchToppHeapDispatchAlg)):
            affinities = [self._affinity(job) for job in jobs]
            kind = type(affinities[0]) if affinities else IOUAffinity
            batch = getattr(alg, "num_of_select_chunk", 1)
            return partition.topp_heap(work, k, affinities, kind, alg.top_p, batch)
        if isinstance(alg, SortedSequentialSelectAlg):
            ids = [sorted(self._affinity(job, SampleIDAffinity).count) for job in jobs]
            if sample_areas is None:
                raise ContractError("SortedSequentialSelectAlg needs DispatchData.sample_areas, one per sample.")
            return partition.sorted_sequential(work, k, ids, sample_areas, alg.allocation_ratio)
        raise UnsupportedError(f"{type(alg).__name__} is no dispatch algorithm of this package.")

    def _affinity(self, job: DispatchJob, kind: type = object):
        if job.affinity is None or not isinstance(job.affinity, kind):
            raise ContractError(
                f"{type(self.alg).__name__} needs an affinity for every job (job {job.job_id} has "
                f"{type(job.affinity).__name__}); pass DispatchJob.from_job_list(workloads, affinities)."
            )
        return job.affinity


__all__ = [
    "BSDispatchAlg",
    "BTPDispatchAlg",
    "BatchToppHeapDispatchAlg",
    "DPDispatchAlg",
    "DispatchAlg",
    "DispatchConfig",
    "DispatchData",
    "DispatchJob",
    "DispatchSolution",
    "DispatchSolver",
    "IOUAffinity",
    "LBDispatchAlg",
    "MinHeapDispatchAlg",
    "RandomSelectDispatchAlg",
    "SampleIDAffinity",
    "SequentialDispatchAlg",
    "SortedSequentialSelectAlg",
    "ToppHeapDispatchAlg",
]
