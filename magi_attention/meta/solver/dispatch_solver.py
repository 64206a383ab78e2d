# SPDX-License-Identifier: Apache-2.0
"""``DispatchSolver``: one entry for every dispatch algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from magi_attention.common.enum import DispatchAlgType
from magi_attention.config import (
    BatchToppHeapDispatchAlg,
    DispatchAlg,
    RandomSelectDispatchAlg,
    SortedSequentialSelectAlg,
    ToppHeapDispatchAlg,
)
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.meta.solver import partition
from magi_attention.meta.solver.affinity import BaseDispatchAffinity, IOUAffinity, SampleIDAffinity


@dataclass
class DispatchJob:
    """One chunk to place: its id, area and (where an algorithm asks for it) affinity.

    ``ContractError`` for a negative workload.
    """

    job_id: int
    workload: float = 0
    affinity: BaseDispatchAffinity | None = None

    def __post_init__(self) -> None:
        if self.workload < 0:
            raise ContractError(f"Job {self.job_id} has workload {self.workload}; workloads are >= 0.")

    @staticmethod
    def from_job_list(
        workloads: Sequence[float], affinities: Sequence[BaseDispatchAffinity] | Sequence[None] | None = None
    ) -> list[DispatchJob]:
        """Jobs 0, 1, ...; ``ContractError`` unless there is one affinity each and all are of one class."""
        if affinities is None:
            affinities = [None] * len(workloads)
        if len(affinities) != len(workloads):
            raise ContractError(f"{len(affinities)} affinities for {len(workloads)} workloads; give one each.")
        if len(kinds := {type(a).__name__ for a in affinities}) > 1:
            raise ContractError(f"Affinities of several classes ({', '.join(sorted(kinds))}); give one class or none.")
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

    def _run(
        self, work: Sequence[float], k: int, jobs: Sequence[DispatchJob], sample_areas: Sequence[int] | None
    ) -> partition.Result:
        # By type and not by class: a reload of the module of the algorithms makes new classes.
        alg = self.alg
        kind_of_alg = getattr(alg, "type", None)
        if kind_of_alg == DispatchAlgType.MIN_HEAP:
            return partition.min_heap(work, k)
        if kind_of_alg == DispatchAlgType.SEQUENTIAL_SELECT:
            return partition.sequential(work, k)
        if kind_of_alg == DispatchAlgType.RANDOM_SELECT:
            return partition.random_select(work, k, cast(RandomSelectDispatchAlg, alg).seed)
        if kind_of_alg == DispatchAlgType.BINARY_SEARCH:
            return partition.binary_search(work, k)
        if kind_of_alg == DispatchAlgType.BACKTRACKING_PRUNING:
            return partition.backtracking_pruning(work, k)
        if kind_of_alg == DispatchAlgType.LOWER_BOUND:
            return partition.lower_bound(work, k)
        if kind_of_alg == DispatchAlgType.DYNAMIC_PROGRAMMING:
            return partition.dynamic_programming(work, k)
        if kind_of_alg in (DispatchAlgType.TOPP_HEAP, DispatchAlgType.BATCH_TOPP_HEAP):
            affinities = [self._affinity(job) for job in jobs]
            kind = type(affinities[0]) if affinities else IOUAffinity
            batch = getattr(alg, "num_of_select_chunk", 1)
            top_p = cast("ToppHeapDispatchAlg | BatchToppHeapDispatchAlg", alg).top_p
            return partition.topp_heap(work, k, affinities, kind, top_p, batch)
        if kind_of_alg == DispatchAlgType.SORTED_SEQUENTIAL_SELECT:
            ids = [self._sample_ids(job) for job in jobs]
            if sample_areas is None:
                raise ContractError("SortedSequentialSelectAlg needs DispatchData.sample_areas, one per sample.")
            ratio = cast(SortedSequentialSelectAlg, alg).allocation_ratio
            return partition.sorted_sequential(work, k, ids, sample_areas, ratio)
        raise UnsupportedError(f"{type(alg).__name__} is no dispatch algorithm of this package.")

    def _affinity(self, job: DispatchJob) -> BaseDispatchAffinity:
        if not isinstance(job.affinity, BaseDispatchAffinity):
            raise self._wrong_affinity(job, BaseDispatchAffinity.__name__)
        return job.affinity

    def _sample_ids(self, job: DispatchJob) -> list[int]:
        if not isinstance(job.affinity, SampleIDAffinity):
            raise self._wrong_affinity(job, SampleIDAffinity.__name__)
        return sorted(job.affinity.sample_id_cnt_dict)

    def _wrong_affinity(self, job: DispatchJob, wanted: str) -> ContractError:
        return ContractError(
            f"{type(self.alg).__name__} needs a {wanted} as affinity of every job (job {job.job_id} has "
            f"{type(job.affinity).__name__}); pass DispatchJob.from_job_list(workloads, affinities)."
        )


__all__ = [
    "BaseDispatchAffinity",
    "BatchToppHeapDispatchAlg",
    "DispatchAlg",
    "DispatchData",
    "DispatchJob",
    "DispatchSolution",
    "DispatchSolver",
    "IOUAffinity",
    "RandomSelectDispatchAlg",
    "SampleIDAffinity",
    "SortedSequentialSelectAlg",
    "ToppHeapDispatchAlg",
]
