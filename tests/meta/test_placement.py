# SPDX-License-Identifier: Apache-2.0
"""Placements count what travels, balance and improve as they say; grids of ranks, and what is found over all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from magi_attention.api import Mask, make_plan
from magi_attention.errors import ContractError
from magi_attention.meta.moves import query_moves_of
from magi_attention.meta.solver.placement import Pairs, Placement, Side
from magi_attention.meta.solver.query_moves import KEY_COST, QUERY_COST, place
from magi_attention.native.planner.pairs import PairGraph
from magi_attention.testing.libraries import planner_or_skip


def random_pairs(rng, world: int, size: int = 12, cost: int = 50, least: int = 1, area: int = 100) -> Pairs:
    rows, columns = int(rng.integers(1, size)), int(rng.integers(1, size))
    query, key = np.nonzero(rng.random((rows, columns)) < 0.6)
    sides = [
        Side(of, rng.integers(0, cost, n), rng.integers(0, world, n)) for of, n in ((query, rows), (key, columns))
    ]  # fmt: skip
    return Pairs(*sides, rng.integers(least, area, len(query)), np.arange(len(query)))


def count(pairs: Pairs, rank) -> tuple[int, list[int]]:
    """Cost and loads, by sets."""
    sent = set()
    for name, side in (("q", pairs.queries), ("k", pairs.keys)):
        sent |= {(name, c, r, side.cost[c]) for c, r in zip(side.of, rank) if r >= 0 and r != side.owner[c]}
    return sum(cost for *_, cost in sent), [int(pairs.area[rank == r].sum()) for r in range(8)]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from((1, 2, 5, 8)))
def test_placements(seed, world):
    planner_or_skip()
    note(f"seed {seed}")
    rng = np.random.default_rng(seed)
    pairs = random_pairs(rng, world)
    placement = Placement(pairs, world, rng.integers(-1, world, len(pairs.area)))
    for _ in range(5):
        some = np.flatnonzero(rng.random(len(pairs.area)) < 0.3)
        entering, before = placement.entering(some), placement.cost()
        for i, pair in enumerate(some[:1]):
            moved = placement.rank.copy()
            moved[pair] = to = int(rng.integers(world))
            if placement.rank[pair] == -1:
                assert count(pairs, moved)[0] == before + entering[i, to]
        placement.move(some, rng.integers(-1, world, len(some)))
        cost, loads = count(pairs, placement.rank)
        assert (placement.cost(), placement.loads.tolist()) == (cost, loads[:world])
    placement.move(np.arange(len(pairs.area)), rng.integers(0, world, len(pairs.area)))
    heaviest, aim = placement.heaviest, 1.1 * pairs.area.sum() / world
    placement.balance(aim)
    assert placement.heaviest <= heaviest and (placement.rank >= 0).all()
    before, most = placement.cost(), max(aim, placement.heaviest)
    placement.improve(most)
    cost, loads = count(pairs, placement.rank)
    assert placement.cost() == cost <= before and max(loads) <= most
    before = placement.rank.copy()  # it could not have stopped earlier: no pair alone saves anything
    for pair in range(len(before)):
        for rank in range(world):
            moved = before.copy()
            moved[pair] = rank
            other, loads = count(pairs, moved)
            assert other >= cost or max(loads) > most


@pytest.mark.parametrize("world", [64, 65, 130])
def test_any_number_of_ranks_shares_what_one_has(world):
    """One rank has all that it takes to compute everything; as many pairs as ranks, each of a chunk of its own."""
    planner_or_skip()
    each = np.arange(world)
    sides = [Side(each, np.ones(world, dtype=np.int64), np.zeros(world, dtype=np.int64)) for _ in range(2)]
    placement = Placement(Pairs(*sides, np.full(world, 7), each), world, np.zeros(world, dtype=np.int64))
    placement.balance(7)
    assert sorted(placement.rank.tolist()) == each.tolist() and placement.cost() == 2 * (world - 1)
    placement.improve(7 * world)
    assert placement.rank.tolist() == [0] * world and placement.cost() == 0


@pytest.mark.parametrize(
    ("change", "rank"),
    [
        (dict(query=[1, 0]), [0, 0]), (dict(key=[0, 0]), [0, 0]), (dict(query=[0, 2]), [0, 0]),
        (dict(key=[-1, 1]), [0, 0]), (dict(area=[1, -1]), [0, 0]), (dict(area=[1, 2**60]), [0, 0]),
        (dict(query_cost=[-1, 1]), [0, 0]), (dict(key_cost=[2**44, 1]), [0, 0]), (dict(query_owner=[0, 2]), [0, 0]),
        (dict(key_owner=[-1, 0]), [0, 0]), (dict(world=0), [0, 0]), ({}, [0, 2]), ({}, [-2, 0]),
    ],
)  # fmt: skip
def test_pairs_that_are_none(change, rank):
    planner_or_skip()
    right = dict(query=[0, 0], key=[0, 1], area=[1, 1], query_cost=[1, 1], query_owner=[0, 1])
    right |= dict(key_cost=[1, 1], key_owner=[0, 1], world=2)
    made = {name: value if name == "world" else np.array(value) for name, value in (right | change).items()}
    graph = PairGraph(**made)
    for call in (lambda: graph.balanced(np.array(rank), 1.5, 9), lambda: graph.improved(np.array(rank), 1.5)):
        with pytest.raises(ContractError, match="Handing pairs to other ranks"):
            call()


def test_full_attention_goes_to_a_grid_of_ranks():
    planner_or_skip()
    plan = make_plan(Mask.full(4096), 16, num_heads_q=4, num_heads_kv=4, head_dim=64, query_moves="always")
    assert plan.imbalance == 1
    assert plan.comm_matrix().sum(axis=0).tolist() == plan.query_matrix().sum(axis=0).tolist() == [3 * 4096 // 16] * 16
    moves = query_moves_of(plan)
    assert moves.cost == 3 * 4096 * 4 * (KEY_COST + QUERY_COST) and moves.cost_of_keys == 15 * 4096 * 4 * KEY_COST


@pytest.mark.parametrize(("ranks", "groups"), [(4, 4), (8, 4), (4, 8), (6, 4)])
def test_head_groups_may_go_to_teams(ranks, groups):
    """Full attention, one chunk a rank and group: never more than of ranks each with groups of its own."""
    planner_or_skip()
    total, rng = 64, np.arange(ranks * groups)
    query, key = (x.reshape(-1) for x in np.meshgrid(rng, rng, indexing="ij"))
    same = query // ranks == key // ranks
    sides = [Side(of[same], np.full(len(rng), total * cost), rng % ranks) for of, cost in ((query, 5), (key, 6))]
    pairs = Pairs(*sides, np.full(same.sum(), total**2), np.arange(same.sum()))
    aim = 1.02 * pairs.area.sum() / ranks
    (alone, _), (teams, _) = (place(pairs, ranks, aim, aim, n) for n in (1, groups))
    assert teams is not None and teams.heaviest <= aim
    if groups % ranks == 0:
        by_heads = (ranks - 1) * groups * total * 11  # each chunk of each group goes to the one rank of its group
        assert teams.cost() <= by_heads < alone.cost()
    assert teams.cost() <= alone.cost()
