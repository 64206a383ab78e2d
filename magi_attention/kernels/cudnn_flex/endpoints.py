# SPDX-License-Identifier: Apache-2.0
"""Slices as what ``cudnn.flex_attention`` takes: the intervals of keys that each query sees."""

from __future__ import annotations

import numpy as np

from magi_attention.common.slices import K0, K1, Q0, Q1, diagonal_bounds


def key_endpoints(slices: np.ndarray, total_q: int, first_key: np.ndarray | None = None) -> np.ndarray:
    """Disjoint slices (N, 5) as what ``cudnn.flex_attention`` takes: int32 (1, nfunc, total_q), nfunc odd.

    Row q sees the keys [0, F0), [F1, F2), [F3, F4) and so on, F being its column. Endpoints never decrease, and those
    that a row does not need repeat the one before. ``first_key`` (total_q,) is the key that counts as 0 in each row,
    no key of the row being below it; by default key 0 in all.
    """
    # The keys of each row of each slice are one interval.
    heights = slices[:, Q1] - slices[:, Q0]
    of = np.repeat(np.arange(len(slices)), heights)
    rows = np.arange(len(of)) - np.repeat(np.cumsum(heights) - heights, heights) + slices[of, Q0]
    low, high = diagonal_bounds(slices)
    starts, ends = np.maximum(slices[of, K0], rows + low[of]), np.minimum(slices[of, K1], rows + high[of] + 1)

    # Sort by row and key, and join intervals that touch.
    order = np.lexsort((starts, rows))
    order = order[starts[order] < ends[order]]
    rows, starts, ends = rows[order], starts[order], ends[order]
    is_first = np.ones(len(rows), dtype=bool)
    is_first[1:] = (rows[1:] != rows[:-1]) | (starts[1:] != ends[:-1])
    is_last = np.append(is_first[1:], True)[: len(rows)]
    rows, starts, ends = rows[is_first], starts[is_first], ends[is_last]
    if first_key is not None:
        starts, ends = starts - first_key[rows], ends - first_key[rows]

    # Interval 0 starts at key 0, so it is empty in rows that see other keys only.
    head = np.searchsorted(rows, rows)
    place = np.arange(len(rows)) - head + (starts[head] > 0)
    count = int(place.max(initial=0)) + 1
    endpoints = np.zeros((2 * count, total_q), dtype=np.int32)
    endpoints[2 * place, rows], endpoints[2 * place + 1, rows] = starts, ends
    return np.ascontiguousarray(np.maximum.accumulate(endpoints)[1:])[None]
