# SPDX-License-Identifier: Apache-2.0
"""Plans in which queries move, against dense float64 attention, over random masks, groups, heads and options."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, note, settings
from test_dist_attn import LOSSES, Case, cases, check_beside_dense, make_config, make_problem

from magi_attention.common.slices import SliceTable, areas, to_dense
from magi_attention.config import DispatchConfig, DistAttnConfig
from magi_attention.meta.planner import PlanOptions, build_plan
from magi_attention.testing.libraries import planner_or_skip


def with_moves(case: Case):
    planner_or_skip()
    plan, slices, total, tensors, sink = make_problem(case)
    heads = dict(num_heads_q=case.heads[0], num_heads_kv=case.heads[1])
    plan = build_plan(slices, total, case.cp, PlanOptions(**heads, query_moves="always"), config=make_config(case))
    return plan, slices, total, tensors, sink


@settings(max_examples=100, deadline=None, print_blob=True)
@given(case=cases, losses=LOSSES)
def test_equals_dense_attention(case: Case, losses: str) -> None:
    note(f"seed {case.seed}")
    torch.set_num_threads(1)
    check_beside_dense(case, *with_moves(case), losses)


@pytest.mark.parametrize("is_high,has_sink", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("cp,document,chunk", [(2, 32, 8), (4, 16, 16), (3, 32, 16)])
def test_few_rows_travel(cp: int, document: int, chunk: int, is_high: bool, has_sink: bool) -> None:
    """Causal documents, and 16 queries that see all keys and go to them. Without sinks the backward is one kernel."""
    planner_or_skip()
    total, first = 512, 496
    queries = [[a, min(a + document, first)] for a in range(0, first, document)]
    rows = [*([a, b, a, b, 1] for a, b in queries), [first, total, 0, total, 1]]
    slices = SliceTable(np.array(rows))
    config = DistAttnConfig(DispatchConfig(chunk))
    plan = build_plan(slices, total, cp, PlanOptions(2, 2, query_moves="always"), config=config)
    parts = [plan.rank(rank) for rank in range(cp)]
    received = [part.queries.recv_rows + part.stages[0].recv_rows for part in parts]
    assert max(received) > 0 and 4 * min(received) <= total // cp  # on three ranks one receives more, and they agree
    gen = torch.Generator().manual_seed(cp)
    tensors = [torch.randn(total, 2, d, generator=gen, dtype=torch.float64) for d in (8, 8, 6, 6)]
    sink = torch.randn(3, 2, generator=gen, dtype=torch.float64) if has_sink else None
    case = Case(cp, cp, 1, False, 0, (2, 2), "sdpa_ol", has_sink, 0.0, False, is_high, True)
    check_beside_dense(case, plan, slices, total, tensors, sink)


@settings(max_examples=50, deadline=None, print_blob=True)
@given(case=cases)
def test_each_pair_is_computed_once(case: Case) -> None:
    note(f"seed {case.seed}")
    plan, slices, total, _, _ = with_moves(replace(case, sink=False))
    count = np.zeros((plan.padded_tokens,) * 2, dtype=np.int64)
    for rank in range(plan.cp_size):
        part = plan.rank(rank)
        own = plan.position_array(rank)
        parts = [(part.host, own, own)]
        for stage in part.stages:
            parts.append((stage.slices, own, _positions(stage.recv_ranges)))
        if part.queries is not None:
            keys = np.concatenate([own, *(_positions(stage.recv_ranges) for stage in part.stages)])
            parts.append((part.queries.slices, _positions(part.queries.recv_ranges), keys))
        for table, rows, columns in parts:
            count[np.ix_(rows, columns)] += to_dense(table.array, len(rows), len(columns))
        assert part.area == plan.areas[rank] == sum(int(areas(table.array).sum()) for table, _, _ in parts)
    assert np.array_equal(count[:total, :total], to_dense(slices.array, total, total)) and count.max(initial=0) <= 1


def _positions(ranges: np.ndarray) -> np.ndarray:
    return np.concatenate([np.arange(a, b) for a, b in ranges] or [np.zeros(0, dtype=np.int64)])
