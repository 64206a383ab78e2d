# SPDX-License-Identifier: Apache-2.0
"""What a plan asks of each rank: pairs to compute, and rows over NVLink and over the network. Counted, not modelled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.intervals import intersect_intervals, merge_intervals, subtract_intervals, total_length
from magi_attention.common.slices import pairs_before
from magi_attention.errors import UnsupportedError
from magi_attention.meta.plan import Plan
from magi_attention.tools.simulate.kernels import kind_of

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Traffic:
    """Rows of K and V of one stage, float64 ``(cp_size,)`` each. ``near``, ``far``: what a rank needs of its node and
    of others. ``link_in`` and ``link_out`` cross NVLink, ``net_in`` and ``net_out`` the network. ``carried_in`` and
    ``carried_out`` are what of the former came over the network to another rank of the node, which passes it on;
    ``carried_own`` came over the network and is needed by the rank itself. These three are 0 with levels "flat"."""

    near: Floats
    far: Floats
    link_in: Floats
    link_out: Floats
    net_in: Floats
    net_out: Floats
    carried_in: Floats
    carried_out: Floats
    carried_own: Floats
    ranges: tuple[Ints, ...]  # keys that each rank receives
    owner: Ints  # rank of each chunk
    chunk_size: int

    @cached_property
    def rows(self) -> Floats:
        return self.near + self.far

    @property
    def owned_out(self) -> Floats:
        """Rows of its own that a rank sends, once for each rank or node that gets them."""
        return self.link_out - self.carried_out + self.net_out

    def evened(self) -> Traffic:
        """As many rows over each kind of link, sent and received by all ranks alike."""
        names = "link_in", "link_out", "net_in", "net_out", "carried_in", "carried_out", "carried_own"
        return replace(self, **{name: np.full(len(self.near), getattr(self, name).mean()) for name in names})

    def slowest_sender(self, seconds: Floats) -> Floats:
        """For each rank the largest of ``seconds`` over the ranks whose rows it receives; 0 where it receives none."""
        levels = [seconds[self.owner]]  # levels[i][c]: over 2**i chunks from c on
        while len(levels[-1]) > 1 and 2 ** len(levels) <= len(levels[0]):
            step = 2 ** (len(levels) - 1)
            levels.append(np.maximum(levels[-1][:-step], levels[-1][step:]))
        counts = np.array([len(ranges) for ranges in self.ranges])
        found, flat = np.zeros(len(counts)), np.concatenate(self.ranges)
        if not len(flat):
            return found
        first, last = flat[:, 0] // self.chunk_size, (flat[:, 1] - 1) // self.chunk_size
        level = np.int64(np.log2(last - first + 1))
        best = np.empty(len(flat))
        for i in np.unique(level):
            here = level == i
            best[here] = np.maximum(levels[i][first[here]], levels[i][last[here] - 2**i + 1])
        np.maximum.at(found, np.repeat(np.arange(len(counts)), counts), best)
        return found


@dataclass(frozen=True)
class PlanWork:
    """The work of a plan on nodes of ``node`` ranks.

    ``local`` (cp_size,): pairs with keys that a rank holds. ``near`` and ``far`` (cp_size, stages): pairs with keys of
    its node and of others. ``rows`` (cp_size,): query rows. ``degree`` is the plan's.
    """

    kind: str
    degree: int
    rows: Floats
    local: Floats
    near: Floats
    far: Floats
    traffic: tuple[Traffic, ...]

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def pairs(self) -> Floats:
        """(cp_size,) of each rank."""
        found: Floats = self.local + self.near.sum(axis=1) + self.far.sum(axis=1)
        return found


def evened(work: PlanWork) -> PlanWork:
    """``work`` with traffic that is the same for all ranks: what a better dispatch could have at best."""
    return replace(work, traffic=tuple(traffic.evened() for traffic in work.traffic))


def work_of(plan: Plan, node: int, levels: str) -> PlanWork:
    """``UnsupportedError`` for a plan that moves queries: the model knows keys and values that travel."""
    if plan.assigned is not None:
        raise UnsupportedError("The model has no queries that move; make the plan with query_moves='never'.")
    hosts = [plan.host_ranges(rank) for rank in range(plan.cp_size)]
    nodes = [merge_intervals(np.concatenate(hosts[first : first + node])) for first in range(0, plan.cp_size, node)]
    near_ranges = [
        [intersect_intervals(ranges, nodes[rank // node]) for ranges in stages]
        for rank, stages in enumerate(plan.stage_ranges)
    ]
    local, near, far = _pairs(plan, hosts, near_ranges)
    traffic = tuple(
        _traffic(plan, stage, node, levels, nodes, [ranges[stage] for ranges in near_ranges])
        for stage in range(plan.num_stages)
    )
    rows = np.array(plan.shard_sizes, dtype=np.float64)
    return PlanWork(kind_of(plan.slices.array), plan.degree, rows, local, near, far, traffic)


def _pairs(plan: Plan, hosts: Sequence[Ints], near_ranges: Sequence[Sequence[Ints]]) -> tuple[Floats, Floats, Floats]:
    """Pairs with local keys, with keys of the node and with others, by rank and stage."""
    stages = plan.num_stages
    local, near, total = np.zeros(plan.cp_size), np.zeros((plan.cp_size, stages)), np.zeros((plan.cp_size, stages))
    for rank in range(plan.cp_size):
        parts = [hosts[rank], *plan.stage_ranges[rank], *near_ranges[rank]]
        before = pairs_before(plan.pieces_of(rank), np.concatenate(parts))
        part_of = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        found = np.bincount(part_of, weights=before[:, 1] - before[:, 0], minlength=len(parts))
        local[rank], total[rank], near[rank] = found[0], found[1 : 1 + stages], found[1 + stages :]
    return local, near, total - near


def _traffic(
    plan: Plan, stage: int, node: int, levels: str, nodes: Sequence[Ints], near_ranges: Sequence[Ints]
) -> Traffic:
    """As ``common.two_level.traffic`` counts, which goes through the splits of every rank, for plans of any size."""
    ranges = tuple(stages[stage] for stages in plan.stage_ranges)
    near = np.array([total_length(x) for x in near_ranges], dtype=np.float64)
    far_ranges = [subtract_intervals(x, nodes[rank // node]) for rank, x in enumerate(ranges)]
    far = np.array([total_length(x) for x in far_ranges], dtype=np.float64)
    link_in, link_out = near.copy(), _rows_by_owner(plan, near_ranges)
    carried_in, carried_out, carried_own = (np.zeros(len(near)) for _ in range(3))
    if levels == "flat":
        net_in, net_out = far.copy(), _rows_by_owner(plan, far_ranges)
    else:
        unions = [
            merge_intervals(np.concatenate(far_ranges[first : first + node])) for first in range(0, len(near), node)
        ]
        net_in, net_out = np.zeros(len(near)), _rows_by_owner(plan, unions)
        rank = np.arange(len(near))
        first = rank - rank % node
        # carrier[r, p]: who takes, for the node of rank r, the rows of ranks with place p in theirs.
        carrier = first[:, None] + np.arange(node) % np.minimum(node, len(near) - first)[:, None]
        np.add.at(net_in, carrier[::node], _rows_by_place(plan, unions, node))
        carried, is_own = _rows_by_place(plan, far_ranges, node), carrier == rank[:, None]
        carried_own = (carried * is_own).sum(axis=1)
        carried_in = far - carried_own
        np.add.at(carried_out, carrier, np.where(is_own, 0.0, carried))
    return Traffic(
        near, far, link_in + carried_in, link_out + carried_out, net_in, net_out, carried_in, carried_out, carried_own,
        ranges, plan.rank_of_chunk, plan.chunk_size,
    )  # fmt: skip


def _rows_by_place(plan: Plan, ranges: Sequence[Ints], node: int) -> Floats:
    """Rows of each of ``ranges``, (len(ranges), node), by the place that their owner has in its node."""
    is_of = plan.rank_of_chunk[:, None] % node == np.arange(node)
    is_of = np.concatenate([is_of, np.zeros((1, node), dtype=bool)])  # behind the last chunk
    starts = np.append(plan.chunk_ranges[:, 0], plan.padded_tokens)
    before = np.zeros((len(starts), node))
    before[1:] = np.cumsum(np.diff(starts)[:, None] * is_of[:-1], axis=0)
    flat = np.concatenate([*ranges, np.zeros((0, 2), dtype=np.int64)])
    chunk = np.searchsorted(starts, flat, side="right") - 1
    until = before[chunk] + (flat - starts[chunk])[:, :, None] * is_of[chunk]
    found = np.zeros((len(ranges), node))
    np.add.at(found, np.repeat(np.arange(len(ranges)), [len(x) for x in ranges]), until[:, 1] - until[:, 0])
    return found


def _rows_by_owner(plan: Plan, ranges: Sequence[Ints]) -> Floats:
    """Rows that each rank sends if every one of ``ranges``, which may overlap, is sent by those that own it."""
    flat = np.concatenate([*ranges, np.zeros((0, 2), dtype=np.int64)])
    edges = np.concatenate([flat.reshape(-1), plan.chunk_ranges[:, 0]])
    steps = np.concatenate([np.tile([1, -1], len(flat)), np.zeros(plan.num_chunks, dtype=np.int64)])
    order = np.argsort(edges, kind="stable")
    edges, readers = edges[order], np.cumsum(steps[order])
    lengths = np.diff(np.append(edges, plan.padded_tokens))
    owner = plan.owner_of(np.minimum(edges, plan.padded_tokens - 1))
    found: Floats = np.bincount(owner, weights=readers * lengths, minlength=plan.cp_size).astype(np.float64)
    return found
