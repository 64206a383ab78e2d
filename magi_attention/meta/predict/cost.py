# SPDX-License-Identifier: Apache-2.0
"""Predicted bytes and times of a plan: what its communication costs, and where it hides.

Rates are those of ``MachineRates``, which the caller gives: measured by `magi tune`, or assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.intervals import sum_by
from magi_attention.common.slices import Q0, areas, pairs_before
from magi_attention.config.links import NCCL_BYTES_PER_S, NETWORK_BYTES_PER_S
from magi_attention.config.rates import MachineRates
from magi_attention.meta.plan import Plan

# Two kernels take so much longer than one for each value of the output: 0.75 ms for 8,192 tokens and 64 heads of dim
# 128 on an H100.
MERGE_SECONDS = 11e-12


class Bar(TypedDict):
    """What one lane of a rank does from ``start`` to ``end``, in seconds; see ``timeline``."""

    rank: int
    lane: str
    stage: int
    start: float
    end: float


@dataclass(frozen=True)
class CostModel:
    """``pair_s``: seconds per allowed pair (all heads); ``row_s``: seconds per received K and V row; ``start_s``: of a
    fetch, whatever it moves."""

    pair_s: float
    row_s: float
    start_s: float = 0.0

    @classmethod
    def for_plan(
        cls,
        plan: Plan,
        rates: MachineRates,
        element_bytes: int = 2,
        is_backward: bool = False,
    ) -> CostModel:
        """The model of the forward pass, or of the backward up to the gradients of remote keys, which then go back."""
        length = 2 * float(plan.areas.sum()) / max(plan.total_tokens, 1)  # of a causal mask with as many keys a query
        forward, backward = rates.pair_seconds(plan.num_heads_q, plan.num_heads_kv, plan.head_dim, length)
        row_s = rates.bytes_seconds(row_bytes(plan, element_bytes))
        return cls(backward if is_backward else forward, row_s, rates.link_latency_s)


def row_bytes(plan: Plan, element_bytes: int = 2) -> int:
    """Bytes of one token's K and V."""
    return 2 * plan.num_heads_kv * plan.head_dim * element_bytes


def is_wait_cheaper(num_bytes: int, values: int, is_one_host: bool) -> bool:
    """Whether a plan of one stage waits for its rows and runs one kernel, because that ends sooner than two kernels.

    Two kernels hide the rows behind the first. But partial outputs go through memory in float32 and are merged, and so
    are partial dq. What that takes depends on the queries alone, so it is waste where few rows travel, as under windows
    and packed documents, or over fast links (``docs/log/rows_and_stages.md``).

    Args:
        num_bytes: of K and V, the most that a rank fetches.
        values: of a rank's output: its tokens times query heads times head dim of V.
        is_one_host: all ranks share a host, and so its NVLink; otherwise rows cross the network.
    """
    return num_bytes / (NCCL_BYTES_PER_S if is_one_host else NETWORK_BYTES_PER_S) <= values * MERGE_SECONDS


def ring_rows(plan: Plan) -> int:
    """K/V rows that ring attention moves in all: every shard visits every other rank."""
    return plan.padded_tokens * (plan.cp_size - 1)


def stage_rows(plan: Plan) -> NDArray[np.int64]:
    """Rows received per rank and stage, int64 ``(cp_size, num_stages)``."""
    parts = [ranges for stages in plan.stage_ranges for ranges in stages]
    ranges = np.concatenate([*parts, np.zeros((0, 2), dtype=np.int64)])
    part_of = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return sum_by(part_of, ranges[:, 1] - ranges[:, 0], len(parts)).reshape(plan.cp_size, plan.num_stages)


def stage_areas(plan: Plan) -> NDArray[np.int64]:
    """Allowed pairs per rank and stage, int64 ``(cp_size, 1 + num_stages)``; column 0 is the host.

    The same as the areas of ``plan.rank(r)``, without making the parts of the ranks. What a rank computes for queries
    of others counts to the last stage.
    """
    out = np.zeros((plan.cp_size, 1 + plan.num_stages), dtype=np.int64)
    for rank, stages in enumerate(plan.stage_ranges):
        pieces = plan.pieces_of(rank)
        is_own = plan.owner_of(pieces[:, Q0]) == rank
        parts = [plan.host_ranges(rank), *stages]
        before = pairs_before(pieces[is_own], np.concatenate(parts))
        stage_of = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        out[rank] = sum_by(stage_of, before[:, 1] - before[:, 0], len(parts))
        out[rank, -1] += areas(pieces[~is_own]).sum()
    return out


def contiguous_areas(plan: Plan) -> NDArray[np.int64]:
    """Areas per rank if the sequence were simply cut into ``cp_size`` equal runs of chunks: no balancing."""
    chunks = np.array_split(plan.chunk_areas, plan.cp_size)
    return np.array([int(part.sum()) for part in chunks], dtype=np.int64)


def timeline(plan: Plan, model: CostModel) -> list[Bar]:
    """Bars of the forward pass: dicts of ``rank, lane ("compute" or "comm"), stage, start, end`` in seconds.

    Stage -1 is the host. Fetches follow one another on a link of their own; a stage starts when its rows are
    there and the stage before is done. At degree 0 the kernel starts after the one fetch.
    """
    rows, pairs, bars = stage_rows(plan), stage_areas(plan).tolist(), []
    # A received query is half as many elements as k and v of as many heads.
    queries = plan.query_matrix().sum(axis=0) * plan.num_heads_q / (2 * plan.num_heads_kv)
    for rank in range(plan.cp_size):
        arrived, clock = 0.0, 0.0
        arrivals = []
        for s in range(plan.num_stages):
            moved = float(rows[rank, s]) + float(queries[rank])
            start, arrived = arrived, arrived + (moved * model.row_s + model.start_s if moved else 0.0)
            arrivals.append(arrived)
            bars.append(_bar(rank, "comm", s, start, arrived))
        if plan.degree == 0 and plan.num_stages:
            clock = arrived
            bars.append(_bar(rank, "compute", -1, clock, clock + sum(pairs[rank]) * model.pair_s))
            continue
        bars.append(_bar(rank, "compute", -1, 0.0, pairs[rank][0] * model.pair_s))
        clock = bars[-1]["end"]
        for s, stage_pairs in enumerate(pairs[rank][1:]):
            start = max(clock, arrivals[s])
            clock = start + stage_pairs * model.pair_s
            bars.append(_bar(rank, "compute", s, start, clock))
    return bars


def _bar(rank: int, lane: str, stage: int, start: float, end: float) -> Bar:
    return {"rank": rank, "lane": lane, "stage": stage, "start": start, "end": end}
