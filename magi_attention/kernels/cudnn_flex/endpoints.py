# SPDX-License-Identifier: Apache-2.0
"""Slices as what ``cudnn.flex_attention`` takes: the intervals of keys that each query sees."""

from __future__ import annotations

import numpy as np

from magi_attention.kernels.key_intervals import key_intervals


def key_endpoints(slices: np.ndarray, total_q: int, first_key: np.ndarray | None = None) -> np.ndarray:
    """Disjoint slices (N, 5) as what ``cudnn.flex_attention`` takes: int32 (1, nfunc, total_q), nfunc odd.

    Row q sees the keys [0, F0), [F1, F2), [F3, F4) and so on, F being its column. Endpoints never decrease, and those
    that a row does not need repeat the one before. ``first_key`` (total_q,) is the key that counts as 0 in each row,
    no key of the row being below it; by default key 0 in all.
    """
    rows, starts, ends, places = key_intervals(slices)
    if first_key is not None:
        starts, ends = starts - first_key[rows], ends - first_key[rows]

    # Interval 0 starts at key 0, so it is empty in rows that see other keys only.
    places = places + (starts[np.searchsorted(rows, rows)] > 0)
    count = int(places.max(initial=0)) + 1
    endpoints = np.zeros((2 * count, total_q), dtype=np.int32)
    endpoints[2 * places, rows], endpoints[2 * places + 1, rows] = starts, ends
    return np.ascontiguousarray(np.maximum.accumulate(endpoints)[1:])[None]
