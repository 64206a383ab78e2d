# SPDX-License-Identifier: Apache-2.0
"""Brute-force reading of a plan, independent of how it was made; algorithms that make plans."""

from __future__ import annotations

import numpy as np

from magi_attention.common.slices import row_bounds, to_dense
from magi_attention.config import (
    BatchToppHeapDispatchAlg,
    BSDispatchAlg,
    BTPDispatchAlg,
    MinHeapDispatchAlg,
    RandomSelectDispatchAlg,
    SequentialDispatchAlg,
    SortedSequentialSelectAlg,
    ToppHeapDispatchAlg,
)
from magi_attention.meta.plan import Plan

EVEN_ALGS = (
    MinHeapDispatchAlg(),
    SequentialDispatchAlg(),
    RandomSelectDispatchAlg(),
    ToppHeapDispatchAlg(top_p=0.5),
    BatchToppHeapDispatchAlg(top_p=0.5, num_of_select_chunk=2),
    SortedSequentialSelectAlg(allocation_ratio=0.5),
    BTPDispatchAlg(),
)
UNEVEN_ALGS = (MinHeapDispatchAlg(), SequentialDispatchAlg(), BSDispatchAlg())


def rows_sent(cast) -> int:
    """Rows that a rank puts on the wire, copies counted, itself excluded."""
    return sum(size * sum(dst != cast.rank for dst in dsts) for size, dsts in zip(cast.input_splits, cast.dst_indices))


def positions_of(ranges: np.ndarray) -> np.ndarray:
    return np.concatenate([np.arange(s, e) for s, e in ranges.tolist()] + [np.zeros(0, dtype=np.int64)])


def least_work(plan: Plan) -> int:
    """What the busiest rank has at least: written from the definition."""
    work = sorted(plan.chunk_areas.tolist())
    return max(-(-sum(work) // plan.cp_size), work[-1] + sum(work[: plan.num_chunks // plan.cp_size - 1]))


def pair_counts(plan: Plan) -> np.ndarray:
    """How often every global (q, k) pair is computed, over all ranks and stages."""
    n = plan.padded_tokens
    counts = np.zeros((n, n), dtype=np.int64)
    for r in range(plan.cp_size):
        part = plan.rank(r)
        rows = positions_of(part.host_ranges)
        for slices, keys in [(part.host, rows)] + [(s.slices, positions_of(s.recv_ranges)) for s in part.stages]:
            for row in slices.array:
                starts, ends = row_bounds(row)
                for q, start, end in zip(range(row[0], row[1]), starts, ends):
                    np.add.at(counts, (rows[q], keys[start:end]), 1)
    return counts


def simulate_cast(plan: Plan, stage: int) -> list[np.ndarray]:
    """Receive buffers of all ranks when every row holds its global position, by the split rule alone."""
    specs = [plan.rank(r).stages[stage].cast for r in range(plan.cp_size)]
    for spec in specs:
        spec.check()
    outbox: dict[tuple[int, int], list[np.ndarray]] = {}
    for r, spec in enumerate(specs):
        rows = np.split(plan.position_array(r), np.cumsum(spec.input_splits)[:-1])
        assert sum(spec.input_splits) == plan.shard_sizes[r]
        for split, dsts in zip(rows, spec.dst_indices):
            for dst in dsts:
                outbox.setdefault((r, dst), []).append(split)
    buffers = []
    for r, spec in enumerate(specs):
        parts = [np.zeros(0, dtype=np.int64)]
        for size, src in zip(spec.output_splits, spec.src_index):
            split = outbox[(src, r)].pop(0)
            assert len(split) == size
            parts.append(split)
        buffers.append(np.concatenate(parts))
    assert not any(outbox.values()), "a rank sends rows that nobody expects"
    return buffers


def check_plan(plan: Plan, pairs: bool = True) -> None:
    """Everything that must hold of any plan; ``pairs`` adds the O(tokens^2) coverage check."""
    n = plan.padded_tokens
    owned = np.concatenate([plan.position_array(r) for r in range(plan.cp_size)])
    assert sorted(owned.tolist()) == list(range(n)), "every token belongs to exactly one rank"
    assert [len(plan.position_array(r)) for r in range(plan.cp_size)] == list(plan.shard_sizes)
    assert plan.areas.sum() == plan.chunk_areas.sum() == plan.slices.area
    for r in range(plan.cp_size):
        part = plan.rank(r)
        assert part.area == plan.areas[r]
        assert part.joined.area == plan.areas[r]
        seen = np.zeros(n, dtype=bool)
        seen[plan.position_array(r)] = True
        for stage in part.stages:
            keys = positions_of(stage.recv_ranges)
            assert not seen[keys].any(), "a row is fetched twice or although it is local"
            seen[keys] = True
            assert stage.cast.output_rows == stage.recv_rows == len(keys)
    for s in range(plan.num_stages):
        buffers = simulate_cast(plan, s)
        for r, buffer in enumerate(buffers):
            assert np.array_equal(buffer, positions_of(plan.stage_ranges[r][s]))
        matrix = plan.comm_matrix(s)
        assert (np.diag(matrix) == 0).all()
        assert matrix.sum(axis=0).tolist() == [len(b) for b in buffers]
        assert matrix.sum(axis=1).tolist() == [rows_sent(plan.rank(r).stages[s].cast) for r in range(plan.cp_size)]
        assert plan.stage_is_idle[s] == (matrix.sum() == 0)
    if pairs:
        counts = pair_counts(plan)
        assert np.array_equal(counts, to_dense(plan.slices.array, n, n).astype(np.int64))
