# SPDX-License-Identifier: Apache-2.0
"""Which rank owns which chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.enum import DispatchAlgType
from magi_attention.common.slices import K0, K1, areas
from magi_attention.config import (
    DispatchAlg,
    DispatchConfig,
    LocalityDispatchAlg,
    MinHeapDispatchAlg,
    SequentialDispatchAlg,
)
from magi_attention.errors import ContractError, DispatchError
from magi_attention.meta.chunking import chunk_areas, sum_by
from magi_attention.meta.solver.dispatch_solver import (
    BaseDispatchAffinity,
    DispatchData,
    DispatchJob,
    DispatchSolver,
    IOUAffinity,
    SampleIDAffinity,
)
from magi_attention.meta.solver.locality import improve, key_masks

Partitions = tuple[tuple[int, ...], ...]


def solve_dispatch(
    pieces: NDArray[np.int64],
    chunk_of: NDArray[np.int64],
    slice_of: NDArray[np.int64],
    num_chunks: int,
    cp_size: int,
    config: DispatchConfig,
    chunk_size: int,
) -> Partitions:
    """Chunk ids per rank, ascending, so that local order follows global order.

    Pure: every rank computes the same. ``ContractError`` for an algorithm that gives no partition or cannot
    serve uneven shards; ``DispatchError`` if a rank would get no chunk.
    """
    if cp_size == 1:
        return (tuple(range(num_chunks)),)
    alg = config.alg  # chosen by type and not by class: a reload of its module makes another class
    if not alg.is_partitions_returned:
        raise ContractError(
            f"{type(alg).__name__} computes a bound and no assignment; use MinHeapDispatchAlg to dispatch."
        )
    if config.uneven_shard and alg.is_equal_num_workloads:
        raise ContractError(
            f"{type(alg).__name__} gives every rank the same number of chunks, which uneven_shard does not have; "
            "use MinHeapDispatchAlg, BSDispatchAlg or SequentialDispatchAlg."
        )
    work = chunk_areas(pieces, chunk_of, num_chunks).tolist()
    if alg.type == DispatchAlgType.LOCALITY:
        return check_partitions(
            _by_locality(cast(LocalityDispatchAlg, alg), pieces, chunk_of, work, cp_size, chunk_size),
            num_chunks,
            cp_size,
        )
    affinities, sample_areas = _affinities(alg, pieces, chunk_of, slice_of, num_chunks)
    jobs = DispatchJob.from_job_list(work, affinities)
    solution = DispatchSolver(alg).solve(DispatchData(jobs, cp_size, sample_areas))
    return check_partitions(solution.bucket_partitions, num_chunks, cp_size)


def _by_locality(
    alg: LocalityDispatchAlg,
    pieces: NDArray[np.int64],
    chunk_of: NDArray[np.int64],
    work: list[int],
    cp_size: int,
    chunk_size: int,
) -> list[list[int]]:
    """The better of two starts: the best balance, and the fewest rows."""
    masks = key_masks(pieces, chunk_of, len(work), chunk_size)
    jobs = DispatchData(DispatchJob.from_job_list(work, None), cp_size, None)
    algs = (MinHeapDispatchAlg(), SequentialDispatchAlg())
    starts = [DispatchSolver(start).solve(jobs).bucket_partitions for start in algs]
    return min(improve(parts, work, masks, alg.row_cost * chunk_size) for parts in starts)[1]


def check_partitions(partitions: Sequence[Sequence[int]], num_chunks: int, cp_size: int) -> Partitions:
    """Sorted tuples; every chunk exactly once and every rank at least one."""
    if len(partitions) != cp_size:
        raise ContractError(f"{len(partitions)} partitions for {cp_size} ranks; give one list of chunk ids per rank.")
    if sorted(c for part in partitions for c in part) != list(range(num_chunks)):
        raise ContractError(f"The partitions must hold each of the chunks 0..{num_chunks - 1} exactly once.")
    for rank, part in enumerate(partitions):
        if not part:
            raise DispatchError(
                f"Rank {rank} of {cp_size} got no chunk out of {num_chunks}; use a smaller chunk_size "
                "or MinHeapDispatchAlg, which keeps a chunk for every rank."
            )
    return tuple(tuple(sorted(int(c) for c in part)) for part in partitions)


def _affinities(
    alg: DispatchAlg,
    pieces: NDArray[np.int64],
    chunk_of: NDArray[np.int64],
    slice_of: NDArray[np.int64],
    num_chunks: int,
) -> tuple[Sequence[BaseDispatchAffinity] | None, list[int] | None]:
    if alg.type == DispatchAlgType.SORTED_SEQUENTIAL_SELECT:
        ids: list[list[int]] = [[] for _ in range(num_chunks)]
        for chunk, sample in zip(chunk_of.tolist(), slice_of.tolist()):
            ids[chunk].append(sample)
        num_samples = int(slice_of.max()) + 1 if len(slice_of) else 0
        sample_areas = sum_by(slice_of, areas(pieces), num_samples).tolist()
        return [SampleIDAffinity(x) for x in ids], sample_areas
    if alg.is_affinity_considered:
        bounds = np.searchsorted(chunk_of, np.arange(num_chunks + 1))
        return [IOUAffinity(pieces[a:b][:, [K0, K1]]) for a, b in zip(bounds[:-1], bounds[1:])], None
    return None, None
