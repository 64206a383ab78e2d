# SPDX-License-Identifier: Apache-2.0
"""Attention in one launch, walked on the CPU: every row goes where its reader looks for it, and comes back."""

from __future__ import annotations

import numpy as np
import pytest

from magi_attention.common.intervals import Packing
from magi_attention.common.slices import SliceTable, to_dense
from magi_attention.config import DispatchConfig, DistAttnConfig, OverlapConfig
from magi_attention.meta.one_launch.fused_layout import TILE, FusedLayout, group_of_tile
from magi_attention.meta.planner import build_plan
from magi_attention.testing.masks import random_slices

EMPTY, ZERO = -2, -1  # buffer rows that nobody wrote, and pad rows


def positions(plan, rank: int) -> np.ndarray:
    return Packing(plan.host_ranges(rank)).positions()


def check_interleaving(parts, part) -> None:
    """Groups are sent one after another, and within a group every reader gets its share all the time."""
    signals, sent_order = part.signals, part.transfers[:, 0]
    of_slot = np.array([group_of_slot(parts[rank], signal) for rank, signal, _, _ in signals.tolist()], dtype=int)
    assert (np.diff(of_slot) >= 0).all() and (np.diff(of_slot[sent_order]) >= 0).all()
    for group in np.unique(of_slot):
        mine = sent_order[of_slot[sent_order] == group]
        for signal in np.flatnonzero(of_slot == group):
            sent = np.cumsum(mine == signal)
            even = sent[-1] * np.arange(1, len(mine) + 1) / len(mine)
            assert (abs(sent - even) <= len(parts)).all()


def group_of_slot(part, signal: int) -> int:
    groups = set(group_of_tile(len(part.arrivals))[part.arrivals == signal].tolist())
    assert len(groups) == 1
    return groups.pop()


def pushed_boxes(plan, parts) -> list[np.ndarray]:
    """The global positions that arrive in each rank's buffer."""
    buffers = [np.full(part.buffer_rows, EMPTY) for part in parts]
    for part in parts:
        mine = positions(plan, part.rank)
        check_interleaving(parts, part)
        for own, first, there, count in part.transfers.tolist():
            rank, signal, _, _ = part.signals[own]
            assert rank != part.rank and count > 0
            target = buffers[rank][there : there + count]
            assert len(target) == count and (target == EMPTY).all(), "two transfers write one row"
            target[:] = ZERO if first < 0 else mine[first : first + count]
            tiles = np.arange(there, there + count) // TILE
            assert (parts[rank].arrivals[tiles] == signal).all() and (parts[rank].owners[tiles] == part.rank).all()
        assert list(part.signals[:, 2]) == np.bincount(part.transfers[:, 0], minlength=len(part.signals)).tolist()
    for part in parts:  # each signal is somebody's, and its number tells when it arrives
        senders = [(sender.rank, signal) for sender in parts for to, signal, _, _ in sender.signals if to == part.rank]
        assert sorted(signal for _, signal in senders) == list(range(len(senders))) and len(senders) <= 8 * plan.cp_size
        assert set(part.arrivals.tolist()) == set(range(len(senders)))
    return buffers


def signal_rows(parts, part) -> list[int]:
    """Rows that have gone from a sender, or come to ``part``, with each signal of its buffer."""
    signals = len(set(part.arrivals.tolist()))
    sent, received = np.zeros(signals, dtype=int), np.zeros(signals, dtype=int)
    for sender in parts:
        rows = np.bincount(sender.transfers[:, 0], sender.transfers[:, 3], minlength=len(sender.signals)).astype(int)
        groups = np.array([group_of_slot(parts[to], signal) for to, signal, _, _ in sender.signals.tolist()], dtype=int)
        for own, (to, signal, _, _) in enumerate(sender.signals.tolist()):
            if to == part.rank:
                sent[signal], received[signal] = rows[groups <= groups[own]].sum(), rows[own]
    most = [max(sent[signal], total) for signal, total in enumerate(np.cumsum(received).tolist())]
    return [max(most[: i + 1]) for i in range(len(most))]


def check(plan) -> None:
    shared = FusedLayout(plan)
    parts = [shared.part(r) for r in range(plan.cp_size)]
    buffers = pushed_boxes(plan, parts)
    dense = to_dense(plan.slices.array, plan.padded_tokens, plan.padded_tokens).astype(int)
    for part, buffer in zip(parts, buffers):
        assert part.base % TILE == 0 and part.base >= part.local_rows + TILE and part.rows == TILE * len(part.owners)
        used = buffer[: part.rows]
        assert (used != EMPTY).all() and (buffer[part.rows :] == EMPTY).all()
        mine = positions(plan, part.rank)
        seen = to_dense(part.slices.array, part.local_rows, part.total_keys).astype(bool)
        where = np.concatenate([mine, np.full(part.base - part.local_rows, ZERO), used])
        assert not seen[:, where == ZERO].any()
        for row in np.flatnonzero(where[part.base :] >= 0):
            assert plan.owner_of(used[row : row + 1])[0] == part.owners[row // TILE]
        rebuilt = np.zeros((part.local_rows, plan.padded_tokens), dtype=int)
        np.add.at(rebuilt, (slice(None), where[where >= 0]), seen[:, where >= 0].astype(int))
        assert (rebuilt == dense[mine]).all()
        assert (used >= 0).sum() == sum(stage.recv_rows for stage in plan.rank(part.rank).stages)
        assert part.signal_rows.tolist() == signal_rows(parts, part)
    check_return(plan, parts, buffers)


def check_return(plan, parts, buffers) -> None:
    """What a rank writes for a remote row is what the owner adds to that row, and nothing else."""
    grads = [np.full(part.grad_rows, EMPTY) for part in parts]
    for part, buffer in zip(parts, buffers):
        for tile, (owner, target) in enumerate(zip(part.owners, part.target_rows)):
            to = grads[owner][target : target + TILE]
            assert len(to) == TILE and (to == EMPTY).all(), "two tiles write one row"
            to[:] = buffer[tile * TILE : (tile + 1) * TILE]
    for part in parts:
        mine = positions(plan, part.rank)
        for other in parts:
            src_rows = part.src_rows[other.rank]
            adds = np.isin(mine, buffers[other.rank][: other.rows])
            assert ((src_rows >= 0) == adds).all() and part.senders[other.rank] == adds.any()
            assert (grads[part.rank][src_rows[adds]] == mine[adds]).all()
        check_summed(part)


def check_summed(part) -> None:
    """The tiles that are summed are those to which others add, with all their rows, in their order."""
    tiles, numbers = part.summed_tiles, part.summed
    assert len(numbers) == -(-part.local_rows // TILE) and tiles.dtype == numbers.dtype == np.int32
    assert np.flatnonzero(numbers >= 0).tolist() == tiles.tolist() and (numbers[tiles] == np.arange(len(tiles))).all()
    rebuilt = np.full((part.world, len(numbers) * TILE), -1)
    for i, tile in enumerate(tiles.tolist()):
        of_tile = part.summed_src_rows[:, i * TILE : (i + 1) * TILE]
        assert (of_tile >= 0).any()
        rebuilt[:, tile * TILE : (tile + 1) * TILE] = of_tile
    assert (rebuilt[:, : part.local_rows] == part.src_rows).all() and (rebuilt[:, part.local_rows :] == -1).all()
    assert part.summed_src_rows.flags.c_contiguous


def random_plan(seed: int):
    """200 to 1,000 tokens, so that some ranks fill more than a tile for another and some none."""
    rng = np.random.default_rng(seed)
    world = int(rng.choice((2, 3, 4, 5, 8)))
    total = int(rng.integers(200, 1000))
    slices = SliceTable(random_slices(rng, total, total, max_slices=int(rng.integers(1, 12))))
    dispatch = DispatchConfig(chunk_size=int(rng.integers(3, 200)) if world < 5 else int(rng.integers(3, 25)))
    config = DistAttnConfig(dispatch, OverlapConfig(degree=int(rng.integers(0, 4)), min_chunk_size=16))
    return build_plan(slices, total, world, config=config)


@pytest.mark.parametrize("batch", range(8))
def test_random_plans(batch: int) -> None:
    for seed in range(10 * batch, 10 * batch + 10):
        print("seed", seed)
        check(random_plan(seed))


def test_tiles_to_which_nobody_adds() -> None:
    """Two ranks with four tiles each, of which they read the first of the other."""
    rows = 4 * TILE
    slices = [[0, rows, 0, rows, 1], [rows, 2 * rows, rows, 2 * rows, 1]]
    slices += [[0, rows, rows, rows + TILE, 0], [rows, 2 * rows, 0, TILE, 0]]
    config = DistAttnConfig(DispatchConfig(chunk_size=rows))
    plan = build_plan(SliceTable(np.array(slices)), 2 * rows, 2, config=config)
    check(plan)
    for rank in range(2):
        part = FusedLayout(plan).part(rank)
        assert part.summed_tiles.tolist() == [0] and part.summed.tolist() == [0, -1, -1, -1]


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_ranks_that_all_read_everything_begin_with_different_owners(world: int) -> None:
    """Else one rank would send what all wait for, and the others what nobody wants yet."""
    rows = 3 * TILE
    plan = build_plan(
        SliceTable(np.array([[0, world * rows, 0, world * rows, 0]])), world * rows, world,
        config=DistAttnConfig(DispatchConfig(chunk_size=rows)),
    )  # fmt: skip
    check(plan)
    parts = [FusedLayout(plan).part(r) for r in range(world)]
    first = [part.owners[np.argmin(part.arrivals)] for part in parts]
    assert sorted(first) == list(range(world))
    assert all(part.signal_rows[-1] == part.rows for part in parts)  # nobody sends more than others receive
