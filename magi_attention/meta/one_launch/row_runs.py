# SPDX-License-Identifier: Apache-2.0
"""Runs of rows on their way into a buffer: consecutive in the source, global or local rows, and in the buffer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.intervals import ramps


class RowRuns(NamedTuple):
    """(N,) each, int64: whose rows, the first in the source, -1 for zeros, the first in the buffer, and how many."""

    owner: NDArray[np.int64]
    source: NDArray[np.int64]
    at: NDArray[np.int64]
    rows: NDArray[np.int64]

    def of(self, which: NDArray[np.int64]) -> RowRuns:
        return RowRuns(*(x[which] for x in self))

    def joined(self) -> RowRuns:
        """Those that go on where the one before ends, in the source and in the buffer, are one with it."""
        source, at = self.source + self.rows, self.at + self.rows
        goes_on = (self.source[:-1] >= 0) & (self.source[1:] == source[:-1]) & (self.at[1:] == at[:-1])
        first = np.flatnonzero(np.concatenate([np.ones(min(len(at), 1), dtype=bool), ~goes_on]))
        rows = np.add.reduceat(self.rows, first) if len(first) else self.rows
        return RowRuns(self.owner[first], self.source[first], self.at[first], rows)

    def cut_at(self, points: NDArray[np.int64]) -> RowRuns:
        """Cut at these rows of the buffer, ascending."""
        low = np.searchsorted(points, self.at, side="right")
        counts = 1 + np.searchsorted(points, self.at + self.rows, side="left") - low
        which, number = np.repeat(np.arange(len(self.at)), counts), ramps(low - 1, counts)
        edges = np.concatenate([points, [np.iinfo(np.int64).max]])
        begin = np.maximum(self.at[which], np.where(number < 0, 0, edges[number]))
        end = np.minimum((self.at + self.rows)[which], edges[number + 1])
        return self.of(which)._part(begin, end)

    def cut_into(self, most: int) -> RowRuns:
        """Cut into so many rows, the last ones less; zeros stay together."""
        counts = np.where(self.source < 0, 1, -(-self.rows // most))
        which, number = np.repeat(np.arange(len(self.at)), counts), ramps(np.zeros_like(counts), counts)
        begin, end = self.at[which] + most * number, (self.at + self.rows)[which]
        return self.of(which)._part(begin, np.where(self.source[which] < 0, end, np.minimum(begin + most, end)))

    def _part(self, begin: NDArray[np.int64], end: NDArray[np.int64]) -> RowRuns:
        source = np.where(self.source < 0, -1, self.source + begin - self.at)
        return RowRuns(self.owner, source, begin, end - begin)
