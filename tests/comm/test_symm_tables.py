# SPDX-License-Identifier: Apache-2.0
"""Group casts and reduces over buffers, walked on the CPU: each row arrives where its reader looks, under its
signal."""

from __future__ import annotations

import numpy as np
import pytest
from comm_oracle import WorldPlan, cast_rows, random_plan

from magi_attention.comm.collectives.args import compare_ranks, counts_of_layout
from magi_attention.comm.collectives.layout import A2AVLayout
from magi_attention.comm.symm.tables import SIGNALS_PER_SENDER, SymmTables
from magi_attention.comm.transport.fake import FakeWorld

EMPTY = (-1, -1)


def tables_of(plan: WorldPlan) -> tuple[list[A2AVLayout], list[SymmTables]]:
    world = len(plan.specs)
    layouts = [A2AVLayout.from_spec(spec) for spec in plan.specs]

    def counts(t):
        return compare_ranks(t, counts_of_layout(layouts[t.rank]), ())

    matrices = FakeWorld(world).run(counts)
    assert all(m == matrices[0] for m in matrices)
    return layouts, [SymmTables.of(x, np.array(matrices[0])) for x in layouts]


def put_buffer(tables, which: str) -> tuple[list[list[tuple[int, int]]], list[list[int]]]:
    """For each rank's buffer: which (rank, row) lies in each of its rows, and by which signal it came."""
    size = getattr(tables[0], f"{which}_rows")
    assert all(getattr(t, f"{which}_rows") == size for t in tables), "all ranks make buffers of one size"
    buffers, signals = [[EMPTY] * size for _ in tables], [[-1] * size for _ in tables]
    for rank, table in enumerate(tables):
        put = getattr(table, which)
        assert put.transfers.dtype == put.signals.dtype == np.int32
        assert (np.diff(put.transfers[:, 0]) >= 0).all(), "signals are sent one after another"
        assert put.signals[:, 2].tolist() == np.bincount(put.transfers[:, 0], minlength=len(put.signals)).tolist()
        assert (put.signals[:, 2] > 0).all() and len(put.signals) <= SIGNALS_PER_SENDER * len(tables)
        for own, here, there, count in put.transfers.tolist():
            to, signal, _, _ = put.signals[own].tolist()
            assert 0 < count <= 32 and there + count <= size
            for i in range(count):
                assert buffers[to][there + i] == EMPTY, "two transfers write one row"
                buffers[to][there + i], signals[to][there + i] = (rank, here + i), signal
    return buffers, signals


def check_cast(plan: WorldPlan, layouts, tables) -> None:
    buffers, signals = put_buffer(tables, "cast")
    inputs = [np.arange(s.input_rows) + 10**6 * r for r, s in enumerate(plan.specs)]
    for rank, (layout, table) in enumerate(zip(layouts, tables)):
        output = np.full(layout.output_rows, -1)
        awaited = set()
        for signal, row, to, count in table.unpack.tolist():
            for i in range(count):
                sender, there = buffers[rank][row + i]
                assert signals[rank][row + i] == signal and signal // SIGNALS_PER_SENDER == sender != rank
                assert output[to + i] == -1, "two transfers write one row"
                output[to + i] = inputs[sender][there]
            awaited.add(signal)
        assert awaited == {signal for signal in signals[rank] if signal >= 0}, "every signal that comes is waited for"
        output[layout.self_out.index] = inputs[rank][layout.self_in.index]
        assert output.tolist() == cast_rows(plan, inputs, rank).tolist()


def check_reduce(plan: WorldPlan, layouts, tables) -> None:
    buffers, signals = put_buffer(tables, "reduce")
    world = len(plan.specs)
    for rank, table in enumerate(tables):
        assert table.src_rows.shape == (world, layouts[rank].input_rows)
        rows, added = layouts[rank].input_rows, []
        for row in range(rows):
            added.append([])
            for peer in range(world):
                place = table.src_rows[peer, row]
                if place < 0:
                    continue
                sender, there = (rank, place) if peer == rank else buffers[rank][place]
                added[-1].append((sender, there))
                assert sender == peer
                if peer != rank:
                    signal = signals[rank][place]
                    assert signal // SIGNALS_PER_SENDER == peer
                    assert table.needed_signals[row // 16, peer] >> signal % SIGNALS_PER_SENDER & 1, (
                        "a row that is not waited for"
                    )
        wanted = [[] for _ in range(rows)]  # what is added to a row, in the order of the ranks
        for sender, home in enumerate(plan.routes):
            for there, (owner, row) in enumerate(home):
                if owner == rank:
                    wanted[row].append((sender, there))
        assert added == wanted
        assert table.needed_signals.shape == (-(-rows // 16), world)
        awaited = {
            SIGNALS_PER_SENDER * peer + i
            for peer in range(world)
            for i in range(SIGNALS_PER_SENDER)
            if (table.needed_signals[:, peer] >> i & 1).any()
        }
        assert awaited == {signal for signal in signals[rank] if signal >= 0}, "signals that come, and no others"
        assert table.awaited.tolist() == or_of(table.needed_signals) or not rows


def or_of(needed_signals: np.ndarray) -> list[int]:
    """All signals of each rank."""
    return np.bitwise_or.reduce(needed_signals, axis=0).tolist()


def check(plan: WorldPlan) -> None:
    layouts, tables = tables_of(plan)
    check_cast(plan, layouts, tables)
    check_reduce(plan, layouts, tables)


@pytest.mark.parametrize("batch", range(6))
def test_random_plans(batch: int) -> None:
    for seed in range(25 * batch, 25 * batch + 25):
        print("seed", seed)
        check(random_plan(seed, world=1 + seed % 6))


@pytest.mark.parametrize("seed", range(6))
def test_many_rows_arrive_in_several_slots(seed: int) -> None:
    """So that rows are copied out, or added, while the next ones arrive, in that order."""
    plan = random_plan(seed, world=2 + seed % 3, max_splits=6, max_size=3000)
    layouts, tables = tables_of(plan)
    check_cast(plan, layouts, tables)
    check_reduce(plan, layouts, tables)
    assert any(
        bin(n).count("1") < bin(x).count("1")
        for t in tables
        for n, x in zip(t.needed_signals[0], or_of(t.needed_signals))
    )
    most = max(int(c) for layout in layouts for r, c in enumerate(layout.send_counts) if r != layout.rank)
    assert max(len(set(t.unpack[:, 0].tolist())) for t in tables) > len(tables) - 1 and most > 1024
    for rank, table in enumerate(tables):
        order = [
            signal for i, signal in enumerate(table.unpack[:, 0].tolist()) if i == 0 or signal != table.unpack[i - 1, 0]
        ]
        assert len(order) == len(set(order)), "a signal is waited for once"
        for sender, other in enumerate(tables):  # of each sender in the order of sending
            sent = [signal for to, signal, _, _ in other.cast.signals.tolist() if to == rank]
            assert [signal for signal in order if signal // SIGNALS_PER_SENDER == sender] == sent
