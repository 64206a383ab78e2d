# SPDX-License-Identifier: Apache-2.0
"""Whether slices are disjoint: no (query, key) pair is in two of them.

In the rows that two disjoint slices share, one lies left of the other in all of them: the ends of their intervals of
keys move by at most one key from a row to the next, both to the right, so neither can jump over the other. Slices that
all have the same rows are therefore disjoint if neighbours are, sorted by key. ``first_overlap`` cuts the rows of every
slice into nodes of a binary tree, so that this applies to each node: O(N log^2 N), in NumPy.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.plan_cache import Kind
from magi_attention.common.slices import (
    INVCAUSAL,
    K0,
    K1,
    Q0,
    Q1,
    TYPE,
    SliceTable,
    diagonal_bounds,
    trim_with_index,
)
from magi_attention.errors import ContractError

_OVERLAP: Kind[None, tuple[int, int] | None] = Kind("two slices that overlap")
_FEW = 4  # so many slices with common rows are compared pair by pair,
_SMALL = 24  # or so many in all
Ints = NDArray[np.int64]
Hit = tuple[int, int]


def check_disjoint(slices: SliceTable) -> None:
    """``ContractError`` that names two slices which share a pair, if there are such; looked for once per table."""
    hit = overlap_of(slices)
    if hit is not None:
        first, second = (_shown(slices.array[i].tolist()) for i in hit)
        raise ContractError(
            f"Slices {hit[0]} and {hit[1]} overlap: {first} and {second} share an allowed pair, which would count "
            "twice. Slices must be disjoint; cut one of the two."
        )


def overlap_of(slices: SliceTable) -> Hit | None:
    """``first_overlap`` of a table, kept with it."""
    return slices.cache.get(_OVERLAP, None, lambda: first_overlap(slices.array))


def disjoint_table(array: Ints) -> SliceTable:
    """A table of slices that are disjoint by the way they were made, which tests prove; nobody looks again."""
    table = SliceTable(array)
    table.cache.put(_OVERLAP, None, None)
    return table


def first_overlap(slices: Ints) -> Hit | None:
    """Indices of two slices that share an allowed pair, the smaller one first, or None. Exact."""
    if (slices[:-1, Q1] <= slices[1:, Q0]).all():  # packed documents, windows, blocks of frames: no common row
        return None
    if len(slices) <= _SMALL:
        return _first_pair(slices, *np.triu_indices(len(slices), 1))
    if _are_in_order(slices):
        return None
    live, index = trim_with_index(slices)  # now every row of a slice has a key
    order = np.argsort(live[:, Q0], kind="stable")
    live, index = live[order], index[order]
    group, sizes = _groups(live)
    hit = _near(live, group, min(int(sizes.max(initial=0)), _FEW) - 1)
    if hit is None:
        rest = np.flatnonzero(sizes[group] > _FEW)
        hit = _Tree(live[rest]).overlap()
        hit = None if hit is None else (int(rest[hit[0]]), int(rest[hit[1]]))
    if hit is None:
        return None
    first, second = sorted(int(index[i]) for i in hit)
    return first, second


def _are_in_order(slices: Ints) -> bool:
    """Whether the rectangles follow one another row by row, each in keys behind the one before or in rows behind all
    before, as of trees and blocks. They need not, to be disjoint."""
    q0, q1 = slices[:, Q0], slices[:, Q1]
    above = np.maximum.accumulate(q1[:-1])
    is_new = q0[1:] >= above
    is_behind = slices[:-1, K1] <= slices[1:, K0]
    start = np.maximum.accumulate(np.where(is_new, above, 0))  # rows of the groups before
    return bool((is_new | is_behind).all() and (q0[1:] >= start).all())


def _groups(live: Ints) -> tuple[Ints, Ints]:
    """The group of each slice, and the size of each group; slices of different groups have no common row."""
    is_new = np.ones(len(live), dtype=bool)
    is_new[1:] = live[1:, Q0] >= np.maximum.accumulate(live[:-1, Q1])
    group = np.cumsum(is_new) - 1
    return group, np.bincount(group)


def _near(live: Ints, group: Ints, distance: int) -> Hit | None:
    """Two slices of a group that overlap, at most so far from each other in the list."""
    for step in range(1, distance + 1):
        first = np.flatnonzero(group[step:] == group[:-step])
        hit = _first_pair(live, first, first + step)
        if hit is not None:
            return hit
    return None


def _first_pair(live: Ints, a: Ints, b: Ints) -> Hit | None:
    """The first of the pairs (a[i], b[i]) that overlaps."""
    one, other = live[a], live[b]
    q0, q1 = np.maximum(one[:, Q0], other[:, Q0]), np.minimum(one[:, Q1], other[:, Q1])
    k0, k1 = np.maximum(one[:, K0], other[:, K0]), np.minimum(one[:, K1], other[:, K1])
    (low, high), (low2, high2) = diagonal_bounds(one), diagonal_bounds(other)
    # Every diagonal between the corners of a non-empty rectangle holds an integer point of it.
    d0 = np.maximum(np.maximum(low, low2), k0 - q1 + 1)
    d1 = np.minimum(np.minimum(high, high2), k1 - 1 - q0)
    hits = np.flatnonzero((q1 > q0) & (k1 > k0) & (d0 <= d1))
    return (int(a[hits[0]]), int(b[hits[0]])) if len(hits) else None


class _Tree:
    """A binary tree over the rows between edges of slices. A slice is *long* in the topmost nodes that it covers, and
    *short* in the nodes that it covers in part. Two slices with a common row meet in a node where both are long, or one
    long and one short."""

    def __init__(self, live: Ints) -> None:
        self.live = live
        self.edges = np.unique(live[:, [Q0, Q1]])
        self.depth = max(len(self.edges) - 1, 1).bit_length()
        self.begin = np.searchsorted(self.edges, live[:, Q0])
        self.end = np.searchsorted(self.edges, live[:, Q1])

    def overlap(self) -> Hit | None:
        """Two slices that overlap, or None."""
        begin, end, all_of = self.begin, self.end, np.arange(len(self.live))
        for level in range(self.depth + 1):
            # Long are the nodes at either side that the parent's range would not fit.
            at_begin, at_end = (begin < end) & (begin % 2 == 1), (begin < end) & (end % 2 == 1)
            only_end = at_end & ~(at_begin & (begin == end - 1))
            nodes = np.concatenate([begin[at_begin], end[only_end] - 1])
            hit = self._in_level(level, nodes, np.concatenate([all_of[at_begin], all_of[only_end]]))
            if hit is not None:
                return hit
            begin, end = (begin + 1) // 2, end // 2
        return None

    def _in_level(self, level: int, nodes: Ints, long: Ints) -> Hit | None:
        if not len(nodes):
            return None
        order = np.lexsort((self._first_key(long, self.edges[nodes << level]), nodes))
        nodes, long = nodes[order], long[order]
        beside = np.flatnonzero(nodes[1:] == nodes[:-1])
        hit = _first_pair(self.live, long[beside], long[beside + 1])
        return self._short(level, nodes, long) if hit is None else hit

    def _short(self, level: int, nodes: Ints, long: Ints) -> Hit | None:
        # The nodes at both ends of a slice are those which it may cover in part.
        first, last = self.begin >> level, (self.end - 1) >> level
        starts = self.begin != first << level
        ends = self.end != (last + 1) << level
        starts |= ends & (first == last)
        ends &= first != last
        node = np.concatenate([first[starts], last[ends]])
        short = np.concatenate([np.flatnonzero(starts), np.flatnonzero(ends)])
        left, right = np.searchsorted(nodes, node), np.searchsorted(nodes, node, side="right")
        found = np.flatnonzero(left < right)
        node, short, left, right = node[found], short[found], left[found], right[found]

        # Between which two long slices the first row of a short one lies.
        row = np.maximum(self.live[short, Q0], self.edges[node << level])
        key = self._first_key(short, row)
        low, high = left.copy(), right.copy()
        while (is_open := low < high).any():
            middle = np.where(is_open, (low + high) // 2, left)
            is_right = self._first_key(long[middle], row) <= key
            low = np.where(is_open & is_right, middle + 1, low)
            high = np.where(is_open & ~is_right, middle, high)
        before, after = np.flatnonzero(low > left), np.flatnonzero(low < right)
        hit = _first_pair(self.live, long[low[before] - 1], short[before])
        return _first_pair(self.live, long[low[after]], short[after]) if hit is None else hit

    def _first_key(self, which: Ints, row: Ints) -> Ints:
        s = self.live[which]
        return s[:, K0] + np.where(s[:, TYPE] & INVCAUSAL, row - s[:, Q0], 0)


def _shown(row: list[int]) -> str:
    return f"q [{row[0]}, {row[1]}) x k [{row[2]}, {row[3]}) type {row[4]}"
