# SPDX-License-Identifier: Apache-2.0
"""Masks row by row: the keys of every row as one interval, and what such rows say about the whole mask.

``RowIntervals`` holds two int64 arrays ``(total_q,)``: row i sees the keys ``[starts[i], ends[i])``. For a row
without keys both are 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.slices import CAUSAL, FULL, row_bounds


@dataclass(frozen=True)
class RowIntervals:
    """Made by ``of_slices`` or ``of_dense``, which give None where the keys of some row are not one interval."""

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    total_k: int

    @classmethod
    def of_slices(cls, slices: NDArray[np.int64], total_q: int, total_k: int) -> RowIntervals | None:
        """The rows of disjoint slices, int64 ``(n, 5)``."""
        starts, ends = np.full(total_q, total_k, dtype=np.int64), np.zeros(total_q, dtype=np.int64)
        counts = np.zeros(total_q, dtype=np.int64)
        for row in slices:
            low, high = row_bounds(row)
            rows = np.arange(row[0], row[1])[low < high]
            low, high = low[low < high], high[low < high]
            starts[rows] = np.minimum(starts[rows], low)
            ends[rows] = np.maximum(ends[rows], high)
            counts[rows] += high - low
        starts[counts == 0] = 0
        return cls(starts, ends, total_k) if (counts == ends - starts).all() else None

    @classmethod
    def of_dense(cls, mask: NDArray[np.bool_]) -> RowIntervals | None:
        """The rows of a boolean matrix ``(total_q, total_k)``."""
        total_q, total_k = mask.shape
        counts = mask.sum(axis=1, dtype=np.int64)
        starts, ends = np.zeros(total_q, dtype=np.int64), np.zeros(total_q, dtype=np.int64)
        if total_k:
            starts = np.where(counts > 0, mask.argmax(axis=1), 0)
            ends = np.where(counts > 0, total_k - mask[:, ::-1].argmax(axis=1), 0)
        return cls(starts, ends, total_k) if (counts == ends - starts).all() else None

    def to_slices(self) -> NDArray[np.int64]:
        """The published reading: FULL and CAUSAL slices from the top, int64 ``(n, 5)``, every row in one of them.

        Equal rows in succession are FULL. Rows that gain a key at the end are CAUSAL, together with the row
        before them and rows without keys above their first key. Rows that nothing joins are FULL, or CAUSAL
        without keys (``k`` is then ``[row, row)``).
        """
        starts, ends = self.starts, self.ends
        lengths = ends - starts
        is_equal = (starts[1:] == starts[:-1]) & (ends[1:] == ends[:-1]) & (lengths[1:] > 0)
        gains = (starts[1:] == starts[:-1]) & (ends[1:] == ends[:-1] + 1) & (lengths[:-1] > 0)
        gains |= (lengths[:-1] == 0) & (lengths[1:] <= 1)
        # steps[i]: how row i follows the row before it. Runs of one kind of step are slices.
        steps = np.zeros(len(starts), dtype=np.int64)
        steps[1:] = np.where(is_equal, 1, np.where(gains, 2, 0))
        out: list[list[int]] = []
        for first, last in _runs(steps):
            kind = steps[first]
            if kind == 0:
                out.extend(self._slice(row, row, FULL if lengths[row] else CAUSAL) for row in range(first, last + 1))
            elif kind == 1 and out[-1][4] == FULL:  # joins the single row before it
                out[-1][1] = last + 1
            elif kind == 1:
                out.append(self._slice(first, last, FULL))
            else:  # a causal slice begins with the row before, which leaves the slice that it is in
                out[-1][1] -= 1
                if out[-1][0] == out[-1][1]:
                    out.pop()
                out.append(self._slice(first - 1, last, CAUSAL))
        return np.array(out, dtype=np.int64).reshape(-1, 5)

    def _slice(self, first: int, last: int, kind: int) -> list[int]:
        start, end = int(self.starts[last]), int(self.ends[last])
        if start == end:
            start = end = first
        return [first, last + 1, start, end, kind]

    def is_varlen_full(self) -> bool:
        """Documents in order, each of at least one row and one key, and every row sees its whole document?"""
        if (self.starts == self.ends).any():
            return False
        begins = self._document_rows()
        starts, ends = self.starts[begins], self.ends[begins]
        per_row = np.repeat(ends, np.diff([*begins, len(self.ends)]))
        return self._tiles_keys(starts, ends) and bool((self.ends == per_row).all())

    def is_varlen_causal(self) -> bool:
        """Documents as in ``is_varlen_full``, each causal with its corner at the bottom right?"""
        lengths = self.ends - self.starts
        seeing = np.flatnonzero(lengths)
        if not len(seeing):
            return len(lengths) == 0 and self.total_k == 0
        starts, ends = self.starts[seeing], self.ends[seeing]
        is_first = np.concatenate([[True], starts[1:] != starts[:-1]])
        # Within a document rows follow one another and gain one key each; rows without keys stand above its first
        # row, which then has one key.
        follows = (seeing[1:] == seeing[:-1] + 1) & ((ends[1:] == ends[:-1] + 1) | is_first[1:])
        gap_above = np.diff(seeing, prepend=-1) > 1
        is_fine = np.concatenate([[True], follows]) | (is_first & gap_above)
        is_fine &= ~gap_above | (is_first & (ends - starts == 1))
        is_last = np.concatenate([is_first[1:], [True]])
        reaches_end = seeing[-1] == len(lengths) - 1
        return bool(is_fine.all() and reaches_end) and self._tiles_keys(starts[is_first], ends[is_last])

    def _document_rows(self) -> NDArray[np.int64]:
        """First rows of runs with one start."""
        is_first = np.ones(len(self.starts), dtype=bool)
        is_first[1:] = self.starts[1:] != self.starts[:-1]
        return np.flatnonzero(is_first)

    def _tiles_keys(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> bool:
        """Do these intervals follow one another from 0 to ``total_k``?"""
        return [0, *ends.tolist()] == [*starts.tolist(), self.total_k]


def _runs(values: NDArray[np.int64]) -> list[tuple[int, int]]:
    """``(first, last)`` of every run of equal values."""
    cuts = np.flatnonzero(values[1:] != values[:-1]) + 1
    firsts = [0, *cuts.tolist()] if len(values) else []
    return list(zip(firsts, [*(first - 1 for first in firsts[1:]), len(values) - 1]))
