# SPDX-License-Identifier: Apache-2.0
"""Masks of any size as small images: which share of each cell is allowed, without the dense mask."""

from __future__ import annotations

import numpy as np

from magi_attention.common.slices import CAUSAL, INVCAUSAL, K0, K1, Q0, Q1, TYPE


def key_intervals(slices: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Allowed keys of the given query rows: ``(index into rows, start, end)``, one entry per slice met.

    ``slices`` int64 (N, 5), ``rows`` int64 (R,) ascending; ``start`` and ``end`` are half-open key ranges.
    """
    low = np.searchsorted(rows, slices[:, Q0], side="left")
    high = np.searchsorted(rows, slices[:, Q1], side="left")
    counts = high - low
    owner = np.repeat(np.arange(len(slices)), counts)
    first = np.cumsum(counts) - counts
    index = np.arange(counts.sum()) - np.repeat(first, counts) + np.repeat(low, counts)
    met, row = slices[owner], rows[index]
    start = met[:, K0] + np.where(met[:, TYPE] & INVCAUSAL, row - met[:, Q0], 0)
    end = met[:, K1] - np.where(met[:, TYPE] & CAUSAL, met[:, Q1] - 1 - row, 0)
    start = np.maximum(start, met[:, K0])
    keep = end > start
    return index[keep], start[keep], end[keep]


def coverage(
    slices: np.ndarray, total_q: int, total_k: int, size: int = 512, samples: int = 4
) -> tuple[np.ndarray, np.ndarray]:
    """Share of allowed pairs per cell of an image of at most ``size`` cells a side.

    Rows are sampled (``samples`` per cell), keys are integrated exactly.

    Returns:
        float64 image (height, width) in 0..1, and int64 (height,), the query row in the middle of each row.
    """
    height, width = max(min(size, total_q), 1), max(min(size, total_k), 1)
    edges = np.linspace(0, total_q, height + 1)
    offsets = (np.arange(samples) + 0.5) / samples
    rows = np.floor(edges[:-1, None] + offsets * (edges[1:] - edges[:-1])[:, None]).astype(np.int64)
    flat = rows.reshape(-1)
    index, start, end = key_intervals(slices, flat)
    line = index // samples
    # The integral of an interval over cells is a ramp; its second difference has four non-zero entries.
    slope = np.zeros((height, width + 2))
    cell = total_k / width
    for bound, sign in ((start, 1.0), (end, -1.0)):
        position = bound / cell
        left = np.minimum(position.astype(np.int64), width)
        inside = position - left
        np.add.at(slope, (line, left), sign * (1.0 - inside))
        np.add.at(slope, (line, left + 1), sign * inside)
    image = np.cumsum(slope, axis=1)[:, :width] / samples
    return np.clip(image, 0.0, 1.0), flat[samples // 2 :: samples]
