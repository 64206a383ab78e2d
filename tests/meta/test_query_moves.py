# SPDX-License-Identifier: Apache-2.0
"""Which rows move: covers against all covers of small graphs, costs and balance of plans, masks where it pays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from magi_attention.api import Mask, make_plan
from magi_attention.config.rates import MachineRates
from magi_attention.errors import ContractError
from magi_attention.meta import moves as choosing
from magi_attention.meta.solver.query_moves import KEY_COST, QUERY_COST
from magi_attention.native.planner.pairs import vertex_cover
from magi_attention.testing.libraries import planner_or_skip
from magi_attention.testing.masks import random_slices

pytestmark = pytest.mark.usefixtures("planner")


@pytest.fixture(scope="module")
def planner():
    planner_or_skip()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6))
def test_no_cover_weighs_less(seed):
    note(f"seed {seed}")
    rng = np.random.default_rng(seed)
    lefts, rights = int(rng.integers(1, 8)), int(rng.integers(1, 8))
    left, right = np.nonzero(rng.random((lefts, rights)) < rng.random())
    weights = rng.integers(0, 9, lefts), rng.integers(0, 9, rights)
    chosen = vertex_cover(*weights, left, right)
    assert (chosen[0][left] | chosen[1][right]).all()
    best = np.inf
    for bits in range(2**lefts):  # whatever the left side leaves out, the right side has to cover
        some = (bits >> np.arange(lefts) & 1).astype(bool)
        best = min(best, weights[0][some].sum() + weights[1][np.unique(right[~some[left]])].sum())
    assert weights[0][chosen[0]].sum() + weights[1][chosen[1]].sum() == best


@pytest.mark.parametrize(
    ("weights", "ends"), [(([1], [1]), ([0], [1])), (([1], [1]), ([-1], [0])), (([-1], [1]), ([0], [0]))]
)
def test_graphs_that_are_none(weights, ends):
    with pytest.raises(ContractError):
        vertex_cover(*map(np.array, weights), *map(np.array, ends))


def cost(plan) -> int:
    keys, queries = plan.comm_matrix().sum(), plan.query_matrix().sum()
    return int(KEY_COST * plan.num_heads_kv * keys + QUERY_COST * plan.num_heads_q * queries)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6), st.sampled_from((2, 3, 5, 8)), st.sampled_from(((1, 1), (4, 4), (8, 2), (16, 1))),
    st.sampled_from(("auto", "always")),
)  # fmt: skip
def test_plans_are_cheaper_and_as_even(seed, ranks, heads, query_moves):
    note(f"seed {seed}")
    rng = np.random.default_rng(seed)
    total = int(rng.integers(ranks, 3000))
    array = random_slices(rng, total, total)
    mask = Mask.from_slices(array[:, :2].tolist(), array[:, 2:4].tolist(), array[:, 4].tolist(), total, total)
    sizes = dict(num_heads_q=heads[0], num_heads_kv=heads[1], head_dim=64)
    before = make_plan(mask, ranks, **sizes)
    after = make_plan(mask, ranks, **sizes, query_moves=query_moves)
    assert cost(after) <= cost(before)
    assert after.areas.sum() == before.areas.sum() == mask.area
    assert after.areas.max() <= max(before.areas.max(), 1.02 * mask.area / ranks)
    again = after.with_mask(mask)
    assert again.query_moves == query_moves and cost(again) <= cost(before)
    if query_moves == "auto" and after.assigned is not None:
        assert cost(after) < cost(before)


def test_few_queries_with_many_keys():
    """Documents of 2,048 tokens, and one whose tokens see everything: its queries are fewer than all keys."""
    total, size = 32_768, 2048
    begins = range(0, total, size)
    q = [[a, a + size] for a in begins]
    k = [*([a, a + size] for a in begins[:-1]), [0, total]]
    mask = Mask.from_slices(q, k, 1, total, total)
    for heads, most in (((8, 8), 0.2), ((32, 8), 0.6)):
        sizes = dict(num_heads_q=heads[0], num_heads_kv=heads[1], head_dim=128)
        before, after = (make_plan(mask, 8, **sizes, query_moves=x) for x in ("never", "always"))
        assert after.assigned is not None and cost(after) < most * cost(before)
        found = after.explain()
        assert found["do_queries_move"] and found["bytes_total"] < before.explain()["bytes_total"]
        assert sum(found["query_rows_sent"]) == sum(found["query_rows_received"]) > 0


def test_many_queries_for_each_key_head():
    """With eight query heads for a kv head, queries of a causal sequence are dearer than its keys."""
    sizes = dict(num_heads_q=64, num_heads_kv=8, head_dim=128)
    never, auto = (make_plan(Mask.causal(16_384), 8, **sizes, query_moves=x) for x in ("never", "auto"))
    assert auto.assigned is None and auto.partitions == never.partitions
    assert not auto.explain()["do_queries_move"]


def test_auto_asks_what_time_that_saves():
    """Short documents and 256 queries that see all keys, on two GPUs: keys wait for the link, from some length on."""
    for total, heads, moves in ((16_384, 8, False), (131_072, 8, True), (131_072, 64, False)):
        first = total - 256
        queries = [[a, min(a + 512, first)] for a in range(0, first, 512)]
        mask = Mask.from_slices([*queries, [first, total]], [*queries, [0, total]], "causal", total, total)
        plan = make_plan(mask, 2, num_heads_q=heads, num_heads_kv=8, head_dim=128, query_moves="auto")
        assert (plan.assigned is not None) == moves, (total, heads)


@pytest.mark.parametrize("seed", range(12))
def test_auto_does_not_ask_in_vain(seed, monkeypatch):
    """What it leaves out without the solver it would have left out with it."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    total, ranks = int(rng.integers(500, 4000)), int(rng.choice([2, 4, 8]))
    array = random_slices(rng, total, total)
    mask = Mask.from_slices(array[:, :2].tolist(), array[:, 2:4].tolist(), array[:, 4].tolist(), total, total)
    link = float(10 ** rng.uniform(6, 10))
    heads = dict(num_heads_q=8, num_heads_kv=8, head_dim=128, rates=MachineRates(link_bytes_per_s=link))
    auto = make_plan(mask, ranks, **heads, query_moves="auto")
    asked = []
    monkeypatch.setattr(choosing, "_may_pay", lambda cut, owner, before, heads, rates: asked.append(before) or True)
    assert auto == make_plan(mask, ranks, **heads, query_moves="auto") and len(asked) == 1
    assert asked[0].sum() == mask.area


def test_plans_differ_by_what_moves():
    mask = Mask.causal(4096)
    plans = [make_plan(mask, 4, query_moves=x) for x in ("never", "always", "always")]
    assert plans[0] != plans[1] == plans[2]
    with pytest.raises(ContractError, match="query_moves"):
        make_plan(mask, 4, query_moves="sometimes")
