# SPDX-License-Identifier: Apache-2.0
"""Set algebra on half-open integer intervals held as int64 arrays of shape ``(n, 2)``.

A *merged* array is sorted, non-empty everywhere and its intervals neither overlap nor touch. Every
function takes any array, returns a merged one and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.scalars import as_pairs
from magi_attention.errors import ContractError


def as_intervals(ranges: Iterable[Iterable[int]]) -> NDArray[np.int64]:
    """``(n, 2)`` int64 from an array or any iterable of pairs."""
    return as_pairs(ranges, "The ranges")


def merge_intervals(ranges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Union of all intervals; overlapping or touching ones are joined and empty ones dropped."""
    is_some = ranges[:, 1] > ranges[:, 0]
    if not is_some.all():
        ranges = ranges[is_some]
    if (ranges[1:, 0] > ranges[:-1, 1]).all():
        return ranges.copy()  # as most are
    # Starts and ends are sorted apart, which is faster than to sort by index. The i-th start opens a new interval if
    # i ends are below it: they are those of the intervals before it, as its own and later ones end above it.
    starts, ends = np.sort(ranges[:, 0]), np.sort(ranges[:, 1])
    gaps = np.flatnonzero(starts[1:] > ends[:-1])
    merged = np.empty((len(gaps) + 1, 2), dtype=np.int64)
    merged[0, 0], merged[-1, 1] = starts[0], ends[-1]
    merged[1:, 0], merged[:-1, 1] = starts[gaps + 1], ends[gaps]
    return merged


def ramps(first: NDArray[np.int64] | int, counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """``first[i]`` and the numbers that follow it, ``counts[i]`` of them, one ramp behind the other."""
    numbers: NDArray[np.int64] = np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    return numbers


def sum_by(index: NDArray[np.int64], values: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Exact int64 sums of ``values`` per index (bincount would go through float64)."""
    out = np.zeros(size, dtype=np.int64)
    np.add.at(out, index, values)
    return out


def intersect_intervals(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.int64]:
    """Points in both unions."""
    a, b = merge_intervals(a), merge_intervals(b)
    if not len(a) or not len(b):
        return np.zeros((0, 2), dtype=np.int64)
    return _common(a, b)


def _common(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.int64]:
    """Points in both, if both are merged. The outermost intervals of one may be empty where the other has no points."""
    # For each a, the run of b's that meet it.
    low = np.searchsorted(b[:, 1], a[:, 0], side="right")
    high = np.searchsorted(b[:, 0], a[:, 1], side="left")
    counts = np.maximum(high - low, 0)
    ia = np.repeat(np.arange(len(a)), counts)
    ib = ramps(low, counts)
    return np.stack([np.maximum(a[ia, 0], b[ib, 0]), np.minimum(a[ia, 1], b[ib, 1])], axis=1)


def subtract_intervals(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.int64]:
    """Points in the union of ``a`` and not in the union of ``b``."""
    a, b = merge_intervals(a), merge_intervals(b)
    if not len(a) or not len(b):
        return a
    gaps = np.empty((len(b) + 1, 2), dtype=np.int64)
    gaps[0, 0] = min(a[0, 0], b[0, 0])
    gaps[1:, 0] = b[:, 1]
    gaps[:-1, 1] = b[:, 0]
    gaps[-1, 1] = max(a[-1, 1], b[-1, 1])
    return _common(a, gaps)


def total_length(ranges: NDArray[np.int64]) -> int:
    """Sum of lengths (points counted once per interval that holds them)."""
    return int((ranges[:, 1] - ranges[:, 0]).sum())


def split_at(ranges: NDArray[np.int64], points: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same points as merged ``ranges``, cut wherever one of ``points`` lies strictly inside."""
    ranges = merge_intervals(ranges)
    if not len(ranges):
        return ranges
    if (np.diff(points) <= 0).any():
        points = np.unique(points)  # slow for many
    low = np.searchsorted(points, ranges[:, 0], side="right")
    high = np.searchsorted(points, ranges[:, 1], side="left")
    counts = np.maximum(high - low, 0)
    inner = ramps(low, counts)
    edges = np.sort(np.concatenate([ranges[:, 0], points[inner]]))
    ends = np.sort(np.concatenate([ranges[:, 1], points[inner]]))
    return np.stack([edges, ends], axis=1)


class Packing:
    """Packed buffer that holds merged intervals one after another, in ascending order.

    Translates global coordinates that lie inside an interval to offsets in the buffer.
    """

    __slots__ = ("ranges", "offsets", "length")

    def __init__(self, ranges: NDArray[np.int64]) -> None:
        self.ranges = merge_intervals(ranges)
        lengths = self.ranges[:, 1] - self.ranges[:, 0]
        self.offsets = np.cumsum(lengths) - lengths
        self.length = int(lengths.sum())

    def localize(self, ranges: NDArray[np.int64]) -> NDArray[np.int64]:
        """Offsets of ``ranges`` in the buffer; each non-empty one must lie inside one interval."""
        if not len(ranges):
            return ranges.copy()
        if not len(self.ranges):
            raise ContractError(f"Range [{ranges[0, 0]}, {ranges[0, 1]}) lies in no interval: there are none.")
        index = np.maximum(np.searchsorted(self.ranges[:, 0], ranges[:, 0], side="right") - 1, 0)
        bad = np.flatnonzero((ranges[:, 0] < self.ranges[index, 0]) | (ranges[:, 1] > self.ranges[index, 1]))
        if len(bad):
            start, end = ranges[bad[0]]
            raise ContractError(
                f"Range [{start}, {end}) is not inside one interval of {self.ranges.tolist()[:8]}; "
                "cut it at the interval bounds first."
            )
        local: NDArray[np.int64] = ranges + (self.offsets[index] - self.ranges[index, 0])[:, None]
        return local

    def globalize(self, packed: NDArray[np.int64]) -> NDArray[np.int64]:
        """Merged global intervals behind merged buffer offsets; inverse of ``localize`` on sets."""
        cut = split_at(packed, self.offsets)
        if not len(cut):
            return cut
        index = np.searchsorted(self.offsets, cut[:, 0], side="right") - 1
        return merge_intervals(cut + (self.ranges[index, 0] - self.offsets[index])[:, None])

    def positions(self) -> NDArray[np.int64]:
        """Global coordinate of every row of the buffer, int64 ``(length,)``."""
        lengths = self.ranges[:, 1] - self.ranges[:, 0]
        positions: NDArray[np.int64] = np.arange(self.length) + np.repeat(self.ranges[:, 0] - self.offsets, lengths)
        return positions
