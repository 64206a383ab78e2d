# SPDX-License-Identifier: Apache-2.0
"""Transfer plans over nodes: they send no row twice, and their puts deliver. ``test_nvshmem_on_cpu.py`` has the kernels
run them, over a network that delays and reorders."""

import numpy as np
import pytest
from comm_oracle import draw_group_ends, random_plan, scattered_nodes

from magi_attention.common.two_level.nodes import Nodes
from magi_attention.common.two_level.transfers import Region, plan_transfers
from magi_attention.errors import ContractError

SHAPES = [(2, 2), (3, 2), (4, 4), (2, 2, 2, 2), (1, 3, 2), (5, 1, 2)]


def draw(seed, sizes, count=1, max_splits=4):
    """``count`` casts over nodes of these sizes, whose ranks follow one another or not, and their transfer plans, of
    which half have groups."""
    rng = np.random.default_rng(seed)
    nodes = scattered_nodes(sizes, rng)
    casts = [random_plan(seed * 8 + i, nodes.world, max_splits) for i in range(count)]
    ends = [draw_group_ends(rng, cast) if rng.random() < 0.5 else None for cast in casts]
    return nodes, casts, [plan_transfers(c.specs, nodes, int(rng.integers(1, 5)), e) for c, e in zip(casts, ends)]


def far_rows(cast, nodes):
    """Rows that must cross: each (source, row) once for every other node in which a rank needs it."""
    needs = [(s, row, nodes.node_of[j]) for j, route in enumerate(cast.routes) for s, row in route]
    return {need for need in needs if nodes.node_of[need[0]] != need[2]}


@pytest.mark.parametrize("seed", range(60))
def test_each_row_crosses_once(seed):
    nodes, (cast,), (plan,) = draw(seed, SHAPES[seed % len(SHAPES)])
    assert plan.network_rows == len(far_rows(cast, nodes))
    sums = [b.back for r in plan.ranks for b in r.blocks if nodes.node_of[b.source] != nodes.node_of[r.rank]]
    assert sum(put.rows for put in sums) == plan.network_rows
    for part in plan.ranks:
        give = [p for p in part.give if nodes.node_of[p.peer] != nodes.node_of[part.rank]]
        assert not give, "what ranks add to far rows is summed in the node first"
        order = [(p.group, p.target is not Region.HELD) for p in part.send]
        assert order == sorted(order), "group by group, and the slower network first"
    written = [np.zeros(n, int) for part in plan.ranks for n in part.region_rows]
    for part in plan.ranks:
        for put in (*part.send, *part.give, *(p for b in part.blocks for p in (*b.forward, b.back))):
            written[4 * put.peer + put.target][put.target_row : put.target_row + put.rows] += 1
    assert all((counts == 1).all() for counts in written), "each row of each region is written once"


@pytest.mark.parametrize("seed", range(40))
def test_a_signal_of_the_output_is_of_one_group(seed):
    nodes, (cast,), _ = draw(seed, SHAPES[seed % len(SHAPES)])
    group_ends = draw_group_ends(np.random.default_rng(seed), cast)
    plan = plan_transfers(cast.specs, nodes, 3, group_ends)
    into = [[] for _ in plan.ranks]
    for part in plan.ranks:
        for put in (*part.send, *(p for b in part.blocks for p in b.forward)):
            if put.target is Region.OUT:
                into[put.peer].append(put)
    for reader, (part, ends) in enumerate(zip(plan.ranks, group_ends)):
        for group, (first, end) in enumerate(reversed(list(zip([0, *ends], ends)))):
            signals = {i for i in part.arrivals if part.cast_signals[i].group == group}
            here = [p for p in into[reader] if first <= p.target_row < end]
            assert sum(p.rows for p in here) == end - first
            assert {p.signal for p in here} == signals and all(p.target_row + p.rows <= end for p in here)
            assert sum(part.cast_signals[i].expected for i in signals) == len(here)
    for part in plan.ranks:  # what is held goes out no later than the first reader wants it
        sent = {b.held: b for b in part.blocks}
        for owner in plan.ranks:
            for p in owner.send:
                if p.peer == part.rank and p.target is Region.HELD:
                    block = sent[p.signal]
                    assert p.group == block.group == min(f.group for f in block.forward)


def test_no_put_is_longer_than_a_block():
    nodes, (cast,), _ = draw(4, (3, 2))
    for rows in (1, 2):
        parts = plan_transfers(cast.specs, nodes, rows).ranks
        puts = [p for r in parts for p in (*r.send, *r.give, *(p for b in r.blocks for p in (*b.forward, b.back)))]
        assert puts and max(put.rows for put in puts) == rows


def deliver(plan):
    """For each rank its output of a cast, and the terms of its sums of a reduce, by the puts of ``plan`` alone. A row
    is named by its rank and number, what a carrier has summed is a tuple of such."""
    memory = [{region: [None] * part.region_rows[region] for region in Region} for part in plan.ranks]

    def put(source, put):
        rows = [source(row) for row in range(put.source_row, put.source_row + put.rows)]
        memory[put.peer][put.target][put.target_row : put.target_row + put.rows] = rows

    for part in plan.ranks:
        for each in part.send:
            put(lambda row, rank=part.rank: (rank, row), each)
    for part in plan.ranks:
        for each in (each for block in part.blocks for each in block.forward):
            put(memory[part.rank][Region.HELD].__getitem__, each)
    for part in plan.ranks:
        for each in part.give:
            put(lambda row, rank=part.rank: (rank, row), each)
    for part in plan.ranks:
        for block in part.blocks:
            bounds, terms = block.add.begins.tolist(), block.add.terms.tolist()
            named = [memory[part.rank][Region.TERMS][t] if t >= 0 else (part.rank, -1 - t) for t in terms]
            sums = [tuple(named[a:b]) for a, b in zip(bounds, bounds[1:])]
            put(lambda row, sums=sums, first=block.first: sums[row - first], block.back)
    found = []
    for part in plan.ranks:
        grads, sums = iter(memory[part.rank][Region.GRADS]), [[] for _ in range(part.input_rows)]
        for sender, rows in enumerate(part.returns):
            for i, row in enumerate(rows.tolist()):
                sums[row].append((part.rank, int(part.own_rows[i])) if sender == part.rank else next(grads))
        found.append((memory[part.rank][Region.OUT], sums))
    return found


@pytest.mark.parametrize("sizes", [*SHAPES, (8,) * 8, (8,) * 3, (2,) * 8])
def test_puts_deliver(sizes):
    for seed in range(40 if sum(sizes) < 12 else 1):
        print("seed", seed)
        nodes, (cast,), (plan,) = draw(seed, sizes, max_splits=4 if sum(sizes) < 12 else 2)
        by_row = {}  # of an owner: what each sender adds to it, a mate its row, a carrier the sum of its node
        for j, route in enumerate(cast.routes):
            for i, (owner, row) in enumerate(route):
                is_near = nodes.node_of[j] == nodes.node_of[owner]
                sender = j if is_near else nodes.carrier(owner, nodes.node_of[j])
                by_row.setdefault((owner, row), {}).setdefault((sender, is_near), []).append((j, i))
        for rank, (out, sums) in enumerate(deliver(plan)):
            assert out == cast.routes[rank]
            for row, terms in enumerate(sums):
                wanted = sorted(by_row.get((rank, row), {}).items())
                assert terms == [found[0] if is_near else tuple(found) for (_, is_near), found in wanted]


def test_what_does_not_belong_together():
    cast = random_plan(3, 4)
    with pytest.raises(ContractError, match="one spec per rank"):
        plan_transfers(cast.specs, Nodes.of_sizes((2,), range(6)))
    with pytest.raises(ContractError, match="at least one row"):
        plan_transfers(cast.specs, Nodes.of_sizes((2,), range(4)), 0)
    other = next(p for p in (random_plan(s, 4) for s in range(4, 99)) if p.specs[0].output_rows)
    with pytest.raises(ContractError, match="do not belong together"):
        plan_transfers([*other.specs[:1], *cast.specs[1:]], Nodes.of_sizes((2,), range(4)))
