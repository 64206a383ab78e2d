# SPDX-License-Identifier: Apache-2.0
"""What one rank of a plan computes and exchanges, and slices in the coordinates of its buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.group_spec import GroupSpec
from magi_attention.common.intervals import Packing, ramps, split_at, sum_by, total_length
from magi_attention.common.plan_cache import Kind, PlanCache
from magi_attention.common.slices import K0, K1, Q0, Q1, SliceTable, areas, cut_k, merge


@dataclass(frozen=True, eq=False)
class StagePlan:
    """One overlap stage of one rank.

    ``slices`` has local query rows and keys counted in the stage's receive buffer, which holds
    ``recv_ranges`` (global, merged, ascending) one after another. ``cast`` moves these rows.
    """

    slices: SliceTable
    recv_ranges: NDArray[np.int64]
    cast: GroupSpec

    @property
    def recv_rows(self) -> int:
        return total_length(self.recv_ranges)

    @property
    def area(self) -> int:
        return self.slices.area


@dataclass(frozen=True, eq=False)
class RankPlan:
    """What one rank does. ``host`` slices have local query rows and local key rows.

    Where queries move there is one stage, and ``queries`` is what the rank computes for queries of others. Its slices
    have rows of the received queries, and of the local keys with those received behind them. Its ``cast`` moves the
    queries; outputs and gradients go back by the transpose.
    """

    rank: int
    host_ranges: NDArray[np.int64]
    host: SliceTable
    stages: tuple[StagePlan, ...]
    queries: StagePlan | None = None
    cache: PlanCache = field(init=False, repr=False, default_factory=PlanCache)

    @property
    def num_tokens(self) -> int:
        return total_length(self.host_ranges)

    @property
    def area(self) -> int:
        others = 0 if self.queries is None else self.queries.area
        return self.host.area + sum(stage.area for stage in self.stages) + others

    @property
    def joined(self) -> SliceTable:
        """All slices over local keys followed by every stage's buffer: the one-kernel form."""
        return self.cache.get(_JOINED, None, self._join)

    @property
    def with_queries(self) -> SliceTable:
        """All slices where queries move: rows of received queries behind the local ones, received keys likewise."""
        return self.cache.get(_WITH_QUERIES, None, self._with_queries)

    def take_joined(self, table: SliceTable) -> None:
        """Holds ``joined``, which an equal part in another process made."""
        self.cache.include(table.cache)
        self.cache.put(_JOINED, None, table)

    def _join(self) -> SliceTable:
        parts, offset = [self.host.array], self.num_tokens
        for stage in self.stages:
            parts.append(stage.slices.array + np.array([0, 0, offset, offset, 0]))
            offset += stage.recv_rows
        return self._kept(parts)

    def _with_queries(self) -> SliceTable:
        assert self.queries is not None
        rows, (stage,) = self.num_tokens, self.stages
        beside, below = np.array([0, 0, rows, rows, 0]), np.array([rows, rows, 0, 0, 0])
        return self._kept([self.host.array, stage.slices.array + beside, self.queries.slices.array + below])

    def _kept(self, parts: list[NDArray[np.int64]]) -> SliceTable:
        table = SliceTable(merge(np.concatenate(parts)))
        self.cache.include(table.cache)
        return table


_JOINED: Kind[None, SliceTable] = Kind("slices of all stages")
_WITH_QUERIES: Kind[None, SliceTable] = Kind("slices of local and received queries")


def cut_by_windows(
    slices: NDArray[np.int64], windows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Every slice cut by every window that its keys meet: ``(pieces, slice of each, window of each)``.

    Windows ascend and are disjoint.
    """
    low = np.searchsorted(windows[:, 1], slices[:, K0], side="right")
    high = np.searchsorted(windows[:, 0], slices[:, K1], side="left")
    counts = np.maximum(high - low, 0)
    index, window = np.repeat(np.arange(len(slices)), counts), ramps(low, counts)
    pieces, parent = cut_k(slices[index], windows[window, 0], windows[window, 1])
    return pieces, index[parent], window[parent]


def local_slices(slices: NDArray[np.int64], q_pack: Packing, k_pack: Packing) -> NDArray[np.int64]:
    """The pairs of ``slices`` whose key is in ``k_pack``, in packed coordinates, merged.

    Pieces that are far apart globally but neighbours in the buffer become one.
    """
    if not len(slices) or not len(k_pack.ranges):
        return slices[:0]
    pieces, _, _ = cut_by_windows(slices, k_pack.ranges)
    out = pieces.copy()
    out[:, [Q0, Q1]] = q_pack.localize(pieces[:, [Q0, Q1]])
    out[:, [K0, K1]] = k_pack.localize(pieces[:, [K0, K1]])
    return merge(out)


def remote_areas(slices: NDArray[np.int64], remote: Packing, chunk: int) -> NDArray[np.int64]:
    """Allowed pairs per overlap chunk, i.e. per ``chunk`` consecutive rows of the packed remote keys."""
    starts = np.arange(0, max(remote.length, 1), chunk)
    cut = split_at(np.array([[0, remote.length]]), np.concatenate([starts, remote.offsets]))
    windows = np.concatenate([remote.globalize(row[None]) for row in cut]) if len(cut) else cut
    pieces, _, window = cut_by_windows(slices, windows)
    return sum_by(cut[window, 0] // chunk, areas(pieces), len(starts))


def destinations(held: NDArray[np.int64], ranges_of: Sequence[NDArray[np.int64]]) -> tuple[tuple[int, ...], ...]:
    """For ``held`` ranges, cut at all bounds of what ranks receive: which ranks receive each, ascending."""
    ranges = np.concatenate(ranges_of)
    first, end = np.searchsorted(held[:, 0], ranges).T
    at = ramps(first, end - first)
    rank = np.repeat(np.repeat(np.arange(len(ranges_of)), [len(x) for x in ranges_of]), end - first)
    to = rank[np.argsort(at, kind="stable")].tolist()  # by range, and in a range by rank
    ends = np.cumsum(np.bincount(at, minlength=len(held))).tolist()
    return tuple(tuple(to[a:b]) for a, b in zip([0, *ends], ends))
