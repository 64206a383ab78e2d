# SPDX-License-Identifier: Apache-2.0
"""Group casts and reduces over boxes, walked on the CPU: each row arrives where its reader looks, under its slot."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from comm_oracle import WORKED_EXAMPLE, WorldPlan, cast_rows, contributions, random_plan

from magi_attention.comm.box_tables import SLOTS_PER_SENDER, BoxTables
from magi_attention.comm.fake import FakeWorld
from magi_attention.comm.group_args import compare_ranks, counts_of_layout
from magi_attention.comm.group_collective import group_reduce
from magi_attention.comm.layout import A2AVLayout
from magi_attention.common.group_spec import GroupSpec

EMPTY = (-1, -1)


def tables_of(plan: WorldPlan) -> tuple[list[A2AVLayout], list[BoxTables]]:
    world = len(plan.specs)
    layouts = [A2AVLayout.from_spec(spec) for spec in plan.specs]

    def counts(t):
        return compare_ranks(t, counts_of_layout(layouts[t.rank]), ())

    matrices = FakeWorld(world).run(counts)
    assert all(m == matrices[0] for m in matrices)
    return layouts, [BoxTables.of(x, np.array(matrices[0])) for x in layouts]


def pushed(tables, which: str) -> tuple[list[list[tuple[int, int]]], list[list[int]]]:
    """Of each rank's box: which (rank, row) lies in each of its rows, and by which slot it came."""
    size = getattr(tables[0], f"{which}_rows")
    assert all(getattr(t, f"{which}_rows") == size for t in tables), "all ranks make boxes of one size"
    boxes, slots = [[EMPTY] * size for _ in tables], [[-1] * size for _ in tables]
    for rank, table in enumerate(tables):
        push = getattr(table, which)
        assert push.pieces.dtype == push.slots.dtype == np.int32
        assert (np.diff(push.pieces[:, 0]) >= 0).all(), "slots are sent one after another"
        assert push.slots[:, 2].tolist() == np.bincount(push.pieces[:, 0], minlength=len(push.slots)).tolist()
        assert (push.slots[:, 2] > 0).all() and len(push.slots) <= SLOTS_PER_SENDER * len(tables)
        for own, here, there, count in push.pieces.tolist():
            to, slot, _, _ = push.slots[own].tolist()
            assert 0 < count <= 32 and there + count <= size
            for i in range(count):
                assert boxes[to][there + i] == EMPTY, "two pieces write one row"
                boxes[to][there + i], slots[to][there + i] = (rank, here + i), slot
    return boxes, slots


def check_cast(plan: WorldPlan, layouts, tables) -> None:
    boxes, slots = pushed(tables, "cast")
    inputs = [np.arange(s.input_rows) + 10**6 * r for r, s in enumerate(plan.specs)]
    for rank, (layout, table) in enumerate(zip(layouts, tables)):
        output = np.full(layout.output_rows, -1)
        awaited = set()
        for slot, row, to, count in table.take.tolist():
            for i in range(count):
                sender, there = boxes[rank][row + i]
                assert slots[rank][row + i] == slot and slot // SLOTS_PER_SENDER == sender != rank
                assert output[to + i] == -1, "two pieces write one row"
                output[to + i] = inputs[sender][there]
            awaited.add(slot)
        assert awaited == {slot for slot in slots[rank] if slot >= 0}, "every slot that comes is waited for"
        output[layout.self_out.index] = inputs[rank][layout.self_in.index]
        assert output.tolist() == cast_rows(plan, inputs, rank).tolist()


def check_reduce(plan: WorldPlan, layouts, tables) -> None:
    boxes, slots = pushed(tables, "reduce")
    rng = np.random.default_rng(0)
    world = len(plan.specs)
    parts = [rng.standard_normal((s.output_rows, 2)).astype(np.float32) for s in plan.specs]
    prior = [rng.standard_normal((s.input_rows, 2)).astype(np.float32) for s in plan.specs]

    def wanted(t):
        out = torch.from_numpy(prior[t.rank].copy())
        work = group_reduce(torch.from_numpy(parts[t.rank]), out, *plan.reduce_lists(t.rank), t)
        return work.wait_post_process().numpy()

    results = FakeWorld(world).run(wanted)
    for rank, table in enumerate(tables):
        assert table.places.shape == (world, layouts[rank].input_rows)
        got = prior[rank].copy()
        for row in range(len(got)):
            for peer in range(world):
                place = table.places[peer, row]
                if place < 0:
                    continue
                sender, there = (rank, place) if peer == rank else boxes[rank][place]
                got[row] += parts[sender][there]
                assert sender == peer
                if peer != rank:
                    slot = slots[rank][place]
                    assert slot // SLOTS_PER_SENDER == peer
                    assert table.needs[row // 16, peer] >> slot % SLOTS_PER_SENDER & 1, "a row that is not waited for"
        np.testing.assert_array_equal(got, results[rank])
        assert table.needs.shape == (-(-len(got) // 16), world)
        awaited = {
            SLOTS_PER_SENDER * peer + i
            for peer in range(world)
            for i in range(SLOTS_PER_SENDER)
            if (table.needs[:, peer] >> i & 1).any()
        }
        assert awaited == {slot for slot in slots[rank] if slot >= 0}, "slots that come, and no others"
        assert table.awaited.tolist() == or_of(table.needs) or not len(got)
        assert (table.places >= 0).sum() == sum(map(len, contributions(plan, parts, rank)))


def or_of(needs: np.ndarray) -> list[int]:
    """All slots of each rank."""
    return np.bitwise_or.reduce(needs, axis=0).tolist()


def check(plan: WorldPlan) -> None:
    layouts, tables = tables_of(plan)
    check_cast(plan, layouts, tables)
    check_reduce(plan, layouts, tables)


@pytest.mark.parametrize("batch", range(6))
def test_random_plans(batch: int) -> None:
    for seed in range(25 * batch, 25 * batch + 25):
        print("seed", seed)
        check(random_plan(seed, world=1 + seed % 6))


def test_plans_whose_rows_travel_in_many_pieces() -> None:
    for seed in range(4):
        print("seed", seed)
        check(random_plan(seed, world=2 + seed, max_splits=6, max_size=900))


def test_worked_example() -> None:
    specs, routes = [], []
    home = {value: (rank, i) for rank, (x, *_) in enumerate(WORKED_EXAMPLE) for i, value in enumerate(x)}
    for rank, (_, splits, dst, out_splits, src, want) in enumerate(WORKED_EXAMPLE):
        specs.append(GroupSpec.make(rank, 4, splits, dst, out_splits, src))
        routes.append([home[value] for value in want])
    check(WorldPlan(specs, routes))


@pytest.mark.parametrize("seed", range(6))
def test_many_rows_arrive_in_several_slots(seed: int) -> None:
    """So that rows are copied out, or added, while the next ones arrive, in that order."""
    plan = random_plan(seed, world=2 + seed % 3, max_splits=6, max_size=3000)
    layouts, tables = tables_of(plan)
    check_cast(plan, layouts, tables)
    check_reduce(plan, layouts, tables)
    assert any(bin(n).count("1") < bin(x).count("1") for t in tables for n, x in zip(t.needs[0], or_of(t.needs)))
    most = max(int(c) for layout in layouts for r, c in enumerate(layout.send_counts) if r != layout.rank)
    assert max(len(set(t.take[:, 0].tolist())) for t in tables) > len(tables) - 1 and most > 1024
    for rank, table in enumerate(tables):
        order = [slot for i, slot in enumerate(table.take[:, 0].tolist()) if i == 0 or slot != table.take[i - 1, 0]]
        assert len(order) == len(set(order)), "a slot is waited for once"
        for sender, other in enumerate(tables):  # of each sender in the order of sending
            sent = [slot for to, slot, _, _ in other.cast.slots.tolist() if to == rank]
            assert [slot for slot in order if slot // SLOTS_PER_SENDER == sender] == sent
