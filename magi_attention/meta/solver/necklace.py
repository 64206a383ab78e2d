# SPDX-License-Identifier: Apache-2.0
"""Chunks to ranks as a necklace is split: equal in number and nearly equal in area, with few cuts.

Chunks of a group of ranks lie on a circle. Among all windows with as many chunks as half of the ranks get, some have
more than their share of the area and some have less, so one is next to it. It goes to one half, the rest to the other,
and each half is split in the same way: two cuts for each split (N. Alon, "Splitting necklaces", 1987). Windows are
short where areas are large, as runs of equal length are not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from magi_attention.meta.solver.ownership import most_runs, owners

Ints = NDArray[np.int64]
# how far from its share a half's area may be for fewer runs; the first is less than what whole chunks cost
_TOLERANCES = (0.002, 0.01, 0.03, 0.1)


def split(work: Ints, world: int, most: int) -> Ints | None:
    """(chunks,): the rank of each chunk, in at most ``most`` runs a rank; None if there are more with each tolerance.

    ``work`` (chunks,) are areas. A rank gets ``len(work) // world`` chunks, and some one more where that leaves some.
    """
    size, extra = divmod(len(work), world)
    sizes = np.full(world, size) + (np.arange(world) < extra)
    best, least = None, 0
    for tolerance in _TOLERANCES:
        parts = _split(work, np.arange(len(work)), sizes, tolerance)
        owner = owners(parts, len(work))
        heaviest = max(int(work[part].sum()) for part in parts)
        if most_runs(owner) <= most and (best is None or heaviest < least):
            best, least = owner, heaviest
    return best


def _split(work: Ints, chunks: Ints, sizes: Ints, tolerance: float) -> list[list[int]]:
    """``chunks``, in the order of their circle, for ranks that get ``sizes`` of them."""
    if len(sizes) == 1:
        return [chunks.tolist()]
    half = len(sizes) // 2
    count, size = len(chunks), int(sizes[:half].sum())
    first = _window(work, chunks, size, half / len(sizes), tolerance)
    circle = np.roll(chunks, -first)
    ours = _split(work, circle[:size], sizes[:half], tolerance)
    return ours + _split(work, circle[size:count], sizes[half:], tolerance)


def _window(work: Ints, chunks: Ints, size: int, share: float, tolerance: float) -> int:
    """Where on the circle the window of ``size`` chunks begins whose area is nearest to its share, or within
    ``tolerance`` of it with the fewest runs on the side that has more."""
    count = len(chunks)
    twice = np.concatenate([chunks, chunks])
    sums = np.concatenate([[0], np.cumsum(work[twice])])
    cuts = np.concatenate([[0], np.cumsum(np.roll(twice, -1) != twice + 1)])  # before each chunk, of two not in a row
    first = np.arange(count)
    off = np.abs(sums[size : size + count] - sums[:count] - share * sums[count])
    is_near = off <= max(tolerance * share * sums[count], off.min())
    inside = cuts[first + size - 1] - cuts[first]
    outside = cuts[first + count - 1] - cuts[first + size]
    return int(np.lexsort((off, np.maximum(inside, outside), ~is_near))[0])
