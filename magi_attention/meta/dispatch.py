# SPDX-License-Identifier: Apache-2.0
"""Which rank owns which chunk."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import cast

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.enum import DispatchAlgType
from magi_attention.common.intervals import sum_by
from magi_attention.common.slices import K0, K1, areas
from magi_attention.common.two_level.nodes import Nodes
from magi_attention.config import DispatchAlg, DispatchConfig, LocalityDispatchAlg
from magi_attention.errors import ContractError, DispatchError
from magi_attention.meta.chunking import Cut
from magi_attention.meta.solver.by_nodes import Unaware, by_nodes, share, unaware_of
from magi_attention.meta.solver.dispatch_solver import (
    BaseDispatchAffinity,
    DispatchData,
    DispatchJob,
    DispatchSolver,
    IOUAffinity,
    SampleIDAffinity,
)
from magi_attention.meta.solver.links import count_rows
from magi_attention.meta.solver.locality import (
    TOLERATED,
    Areas,
    lower_bound,
    order_of_chunks,
    swap_down,
    two_ended,
)
from magi_attention.meta.solver.ownership import most_runs, owners
from magi_attention.meta.solver.partition import min_heap, sequential
from magi_attention.meta.solver.runs import few_runs

Partitions = tuple[tuple[int, ...], ...]
# Another partition has to save this share of MinHeap's cost. Runs of chunks take the backward kernel 5 to 7% longer
# than MinHeap's mixture: causal and packed documents on two H200 (docs/dispatch.md).
LEAST_GAIN = 0.015


def solve_dispatch(cut: Cut, slice_of: NDArray[np.int64], cp_size: int, config: DispatchConfig) -> Partitions:
    """Chunk ids per rank, ascending, so that local order follows global order.

    ``slice_of`` is the slice of each piece of ``cut``. Pure: every rank computes the same. ``ContractError`` for an
    algorithm that gives no partition or cannot serve uneven shards; ``DispatchError`` if a rank would get no chunk.
    """
    num_chunks = len(cut.bounds)
    if cp_size == 1:
        return (tuple(range(num_chunks)),)
    found = _by_algorithm(cut, slice_of, cp_size, config)
    if has_few_runs(found, num_chunks, config):
        return found
    assert config.max_fragments is not None
    return check_partitions(few_runs(cut.work, cp_size, config.max_fragments), num_chunks, cp_size)


def has_few_runs(partitions: Sequence[Sequence[int]], num_chunks: int, config: DispatchConfig) -> bool:
    """Does no rank hold more ranges of chunks than ``config`` allows?"""
    return config.max_fragments is None or most_runs(owners(partitions, num_chunks)) <= config.max_fragments


def _by_algorithm(cut: Cut, slice_of: NDArray[np.int64], cp_size: int, config: DispatchConfig) -> Partitions:
    """As ``solve_dispatch``, with any number of runs."""
    num_chunks, work = len(cut.bounds), cut.work
    alg = config.alg  # why its type is compared, not its class: a reload of the module makes another class
    if not alg.is_partitions_returned:
        raise ContractError(
            f"{type(alg).__name__} computes a bound and no assignment; use MinHeapDispatchAlg to dispatch."
        )
    if config.uneven_shard and alg.is_equal_num_workloads:
        raise ContractError(
            f"{type(alg).__name__} gives every rank the same number of chunks, which uneven_shard does not have; "
            "use MinHeapDispatchAlg, BSDispatchAlg or SequentialDispatchAlg."
        )
    if alg.type == DispatchAlgType.LOCALITY:
        found = _by_locality(cast(LocalityDispatchAlg, alg), cut, cp_size)
        unaware = knows_no_nodes(cut, found, config)
        if unaware is not None:
            found = dispatch_by_nodes(cut, unaware, config)[0] or found
        return check_partitions(found, num_chunks, cp_size)
    if alg.type == DispatchAlgType.MIN_HEAP:  # by itself, as jobs take longer to make than to place
        dealt = min_heap(work.tolist(), cp_size)[1]
        assert dealt is not None
        return check_partitions(dealt, num_chunks, cp_size)
    affinities, sample_areas = _affinities(alg, cut, slice_of)
    jobs = DispatchJob.from_job_list(work.tolist(), affinities)
    solution = DispatchSolver(alg).solve(DispatchData(jobs, cp_size, sample_areas))
    return check_partitions(solution.bucket_partitions, num_chunks, cp_size)


def knows_no_nodes(cut: Cut, partitions: Sequence[Sequence[int]], config: DispatchConfig) -> Unaware | None:
    """``partitions`` as what ``dispatch_by_nodes`` has to be better than, or None where it cannot be: ranks do not
    share nodes, ``config`` has another algorithm, or there is nothing to save."""
    world = len(partitions)
    nodes = Nodes.of_config(config.nodes, world)
    is_asked = nodes is not None and 1 < len(nodes.members) < world and config.alg.type == DispatchAlgType.LOCALITY
    if not is_asked or len(cut.work) < world:
        return None
    assert nodes is not None
    return unaware_of(cut, nodes, partitions, cast(LocalityDispatchAlg, config.alg).row_cost, LEAST_GAIN)


def dispatch_by_nodes(
    cut: Cut, unaware: Unaware, config: DispatchConfig
) -> tuple[Sequence[Sequence[int]] | None, bool]:
    """As ``by_nodes``."""
    nodes = Nodes.of_config(config.nodes, len(unaware.loads.rows))
    assert nodes is not None
    return by_nodes(cut, nodes, unaware, cast(LocalityDispatchAlg, config.alg).row_cost, LEAST_GAIN)


def _by_locality(alg: LocalityDispatchAlg, cut: Cut, world: int) -> Sequence[Sequence[int]]:
    """The partition of the least cost: contiguous blocks, with some chunks swapped where they are not balanced; one
    that is filled from two ends; or MinHeap's, which no other may exceed in rows, and which stays where less than
    ``LEAST_GAIN`` of its cost is saved."""
    work = cut.work

    def measured(partitions: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], float]:
        """Rows that ranks receive, and the cost."""
        owner = owners(partitions, len(work))
        rows = count_rows(cut, owner, world)
        return rows, int(sum_by(owner, work, world).max()) + alg.row_cost * share(rows)

    areas_of, limit = work.tolist(), int(TOLERATED * lower_bound(work, world))
    (of_dealt, dealt), (of_blocks, blocks) = min_heap(areas_of, world), sequential(areas_of, world)
    assert dealt is not None and blocks is not None
    tried: list[Sequence[Sequence[int]] | None] = []
    numbered = Areas(areas_of)
    if len(work) >= world:
        tried.append(swap_down(blocks, numbered, max(limit, int(of_dealt))))
    if not tried or of_blocks > limit:
        order = order_of_chunks(cut.document, work)
        tried.append(two_ended(numbered, order.tolist(), world, limit))
    best: Sequence[Sequence[int]] = dealt
    most, least = measured(dealt)
    least *= 1 - LEAST_GAIN
    for found in tried:
        if found is None:
            continue
        rows, cost = measured(found)
        if rows.max() <= most.max() and rows.sum() <= most.sum() and cost < least:
            best, least = found, cost
    return best


def check_partitions(partitions: Sequence[Sequence[int]], num_chunks: int, cp_size: int) -> Partitions:
    """Sorted tuples; every chunk exactly once and every rank at least one."""
    if len(partitions) != cp_size:
        raise ContractError(f"{len(partitions)} partitions for {cp_size} ranks; give one list of chunk ids per rank.")
    chunks = list(chain.from_iterable(partitions))
    if len(chunks) != num_chunks or not set(chunks).issuperset(range(num_chunks)):
        raise ContractError(f"The partitions must hold each of the chunks 0..{num_chunks - 1} exactly once.")
    for rank, part in enumerate(partitions):
        if not part:
            raise DispatchError(
                f"Rank {rank} of {cp_size} got no chunk out of {num_chunks}; use a smaller chunk_size "
                "or MinHeapDispatchAlg, which keeps a chunk for every rank."
            )
    return tuple(tuple(sorted(map(int, part))) for part in partitions)


def _affinities(
    alg: DispatchAlg, cut: Cut, slice_of: NDArray[np.int64]
) -> tuple[Sequence[BaseDispatchAffinity] | None, list[int] | None]:
    pieces, chunk_of, num_chunks = cut.pieces, cut.chunk_of, len(cut.bounds)
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
