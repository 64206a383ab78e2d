# SPDX-License-Identifier: Apache-2.0
"""What the model counts, against dense masks and sets of rows."""

from __future__ import annotations

import numpy as np
import pytest

from magi_attention.common.mask import Mask
from magi_attention.common.slices import SliceTable
from magi_attention.common.two_level.nodes import Nodes
from magi_attention.common.two_level.traffic import direct_rows, two_level_rows
from magi_attention.config import DispatchConfig, DistAttnConfig, OverlapConfig
from magi_attention.errors import UnsupportedError
from magi_attention.meta.planner import PlanOptions, build_plan
from magi_attention.testing.libraries import planner_or_skip
from magi_attention.testing.masks import random_slices
from magi_attention.tools.simulate.spread import spread
from magi_attention.tools.simulate.traffic import work_of

TOTAL, CHUNK = 96, 8


def random_mask(rng: np.random.Generator) -> Mask:
    kind = rng.integers(4)
    if kind == 0:
        return Mask.causal(TOTAL)
    if kind == 1:
        return Mask.sliding_window(TOTAL, (int(rng.integers(1, 40)), 0))
    cuts = np.unique(rng.integers(1, TOTAL, size=4))
    return Mask.varlen([0, *cuts.tolist(), TOTAL], causal=bool(kind - 2))


def plan_of(mask: Mask, ranks: int, degree: int):
    config = DistAttnConfig(DispatchConfig(chunk_size=CHUNK), OverlapConfig(degree=degree))
    return build_plan(mask.slices, TOTAL, ranks, config=config)


def needed(plan, mask: Mask) -> tuple[np.ndarray, np.ndarray]:
    """Rank of each token, and (ranks, tokens) which keys each rank's queries see."""
    dense, owner = mask.to_dense(), plan.owner_of(np.arange(TOTAL))
    return owner, np.stack([dense[owner == rank].any(axis=0) for rank in range(plan.cp_size)])


@pytest.mark.parametrize("seed", range(12))
def test_pairs_and_rows_of_a_plan(seed):
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    mask, ranks, node = random_mask(rng), int(rng.choice([2, 4, 6])), int(rng.choice([1, 2, 4]))
    plan = plan_of(mask, ranks, int(rng.integers(0, 3)))
    flat, two = (work_of(plan, node, levels) for levels in ("flat", "two"))
    owner, keys = needed(plan, mask)
    dense, node_of = mask.to_dense(), owner // node
    for rank in range(ranks):
        pairs = dense[owner == rank].sum(axis=0)
        is_near = (node_of == rank // node) & (owner != rank)
        assert flat.local[rank] == pairs[owner == rank].sum()
        assert flat.near[rank].sum() == pairs[is_near].sum()
        assert flat.far[rank].sum() == pairs[node_of != rank // node].sum()
        # Rows may be wanted that a plan rounds up to, never fewer; with these plans exactly those that are seen.
        assert sum(t.near[rank] for t in flat.traffic) == keys[rank][is_near].sum()
        assert sum(t.far[rank] for t in flat.traffic) == keys[rank][node_of != rank // node].sum()
    for work in (flat, two):
        assert sum(t.net_in.sum() for t in work.traffic) == pytest.approx(sum(t.net_out.sum() for t in work.traffic))
        assert sum(t.link_in.sum() for t in work.traffic) == pytest.approx(sum(t.link_out.sum() for t in work.traffic))
    for one, other in zip(flat.traffic, two.traffic):
        assert other.net_in.sum() <= one.net_in.sum() and other.link_in.sum() >= one.link_in.sum()
    nodes = Nodes.of_sizes([node], range(ranks))
    for stage, (one, other) in enumerate(zip(flat.traffic, two.traffic)):
        specs = [plan.cast_spec(rank, stage) for rank in range(ranks)]
        for mine, counted in ((one, direct_rows(specs, nodes)), (other, two_level_rows(specs, nodes))):
            assert mine.net_in.tolist() == counted.network.tolist()
            assert mine.link_in.tolist() == counted.node.tolist()


@pytest.mark.parametrize("seed", range(12))
def test_rows_that_are_carried(seed):
    """What comes over the network to a carrier goes on to those that need it, its own copy included; by all tokens."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    mask, ranks, size = random_mask(rng), int(rng.choice([2, 4, 6])), int(rng.choice([1, 2, 4]))
    plan = plan_of(mask, ranks, 1)
    owner, keys = needed(plan, mask)
    nodes = Nodes.of_sizes([size], range(ranks))
    wanted = {name: np.zeros(ranks) for name in ("carried_in", "carried_out", "carried_own")}
    for reader in range(ranks):
        for token in np.flatnonzero(keys[reader]):
            sender, node = int(owner[token]), nodes.node_of[reader]
            if nodes.node_of[sender] == node:
                continue
            carrier = nodes.carrier(sender, node)
            if carrier == reader:
                wanted["carried_own"][reader] += 1
            else:
                wanted["carried_in"][reader] += 1
                wanted["carried_out"][carrier] += 1
    flat, two = (work_of(plan, size, levels).traffic for levels in ("flat", "two"))
    for name, rows in wanted.items():
        assert sum(getattr(traffic, name) for traffic in two) == pytest.approx(rows)
        assert not any(getattr(traffic, name).any() for traffic in flat)


@pytest.mark.parametrize("seed", range(6))
def test_the_slowest_sender(seed):
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    plan = plan_of(random_mask(rng), 4, 1)
    seconds, (traffic,) = rng.uniform(size=4), work_of(plan, 2, "flat").traffic
    for rank, found in enumerate(traffic.slowest_sender(seconds)):
        owners = {int(plan.owner_of(np.array([key]))[0]) for a, b in traffic.ranges[rank] for key in range(a, b)}
        assert found == max((seconds[i] for i in owners), default=0.0)


def test_queries_that_move_are_refused():
    planner_or_skip()  # which finds the queries
    mask = Mask.full(TOTAL)
    plan = build_plan(mask.slices, TOTAL, 4, PlanOptions(8, 8, 4, query_moves="always"))
    with pytest.raises(UnsupportedError, match="query_moves='never'"):
        work_of(plan, 2, "two")


@pytest.mark.parametrize("seed", range(8))
def test_steps_of_a_ring(seed):
    """One sequence is counted: each step has the pairs of queries of a rank with the keys of the rank before it."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    parts = int(rng.integers(2, 6))
    table = SliceTable(random_slices(rng, TOTAL, TOTAL, 5)) if seed % 2 else Mask.sliding_window(TOTAL, (17, 0)).slices
    mask = Mask(table, TOTAL, TOTAL)
    where = spread(mask, parts)
    pieces = parts * (2 if where.is_zigzag else 1)
    piece, number = -(-TOTAL // pieces), np.arange(TOTAL)
    owner = number // piece
    owner = np.minimum(owner, pieces - 1 - owner) if where.is_zigzag else owner
    dense = mask.to_dense()
    for step in range(parts):
        wanted = [dense[owner == rank][:, owner == (rank - step) % parts].sum() for rank in range(parts)]
        if where.step_pairs is not None:
            assert where.pairs_of_step(step).tolist() == wanted
    total = sum(where.pairs_of_step(step).sum() for step in range(parts))
    assert total == pytest.approx(mask.area) and where.rows * parts >= TOTAL


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_documents_are_padded_to_equal_pieces(parts):
    lengths = [5, 16, 75]
    mask = Mask.varlen([0, 5, 21, 96], causal=True)
    where = spread(mask, parts)
    assert where.is_zigzag and where.rows == sum(2 * -(-n // (2 * parts)) for n in lengths)
    assert sum(where.pairs_of_step(step).sum() for step in range(parts)) == pytest.approx(mask.area)
    whole = spread(Mask.varlen([0, 5, 21, 96]), parts)
    assert not whole.is_zigzag and whole.rows == sum(-(-n // parts) for n in lengths)
