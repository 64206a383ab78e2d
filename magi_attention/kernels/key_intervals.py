# SPDX-License-Identifier: Apache-2.0
"""Slices as the intervals of keys that each query sees: what kernels take that know no slices."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.slices import K0, K1, Q0, Q1, diagonal_bounds
from magi_attention.errors import ContractError


class KeyIntervals(NamedTuple):
    """Intervals [start, end) of keys, by query and then by key, int64 (N,) each. Those of a query neither overlap nor
    touch. ``places`` counts them within their query."""

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    places: NDArray[np.int64]


def key_intervals(slices: NDArray[np.int64]) -> KeyIntervals:
    """The intervals of slices (N, 5). ``ContractError`` if two overlap: an interval cannot hold a key twice."""
    # The keys of each row of each slice are one interval.
    heights = slices[:, Q1] - slices[:, Q0]
    of = np.repeat(np.arange(len(slices)), heights)
    rows = np.arange(len(of)) - np.repeat(np.cumsum(heights) - heights, heights) + slices[of, Q0]
    low, high = diagonal_bounds(slices)
    starts, ends = np.maximum(slices[of, K0], rows + low[of]), np.minimum(slices[of, K1], rows + high[of] + 1)

    # Sort by row and key, and join intervals that touch.
    order = np.lexsort((starts, rows))
    order = order[starts[order] < ends[order]]
    rows, starts, ends, of = rows[order], starts[order], ends[order], of[order]
    twice = np.flatnonzero((rows[1:] == rows[:-1]) & (starts[1:] < ends[:-1]))
    if len(twice):
        first, second = (slices[of[twice[0] + i]].tolist() for i in (0, 1))
        raise ContractError(
            f"Slices {first} and {second} (q start and end, k start and end, type) overlap: query {rows[twice[0]]} has "
            f"key {starts[twice[0] + 1]} twice, which kernels that take intervals cannot count; cut one of the two."
        )
    is_first = np.ones(len(rows), dtype=bool)
    is_first[1:] = (rows[1:] != rows[:-1]) | (starts[1:] != ends[:-1])
    is_last = np.append(is_first[1:], True)[: len(rows)]
    rows, starts, ends = rows[is_first], starts[is_first], ends[is_last]
    return KeyIntervals(rows, starts, ends, np.arange(len(rows)) - np.searchsorted(rows, rows))
