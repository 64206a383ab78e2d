# SPDX-License-Identifier: Apache-2.0
"""Which rank holds a chunk, and which keys a rank reads and does not hold, of all ranks at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.intervals import subtract_intervals


def owners(partitions: Sequence[Sequence[int]], num_chunks: int) -> NDArray[np.int64]:
    """(chunks,): the rank of each chunk."""
    owner = np.empty(num_chunks, dtype=np.int64)
    chunks = np.fromiter(chain.from_iterable(partitions), dtype=np.int64)
    owner[chunks] = np.repeat(np.arange(len(partitions)), [len(part) for part in partitions])
    return owner


def most_runs(owner: NDArray[np.int64]) -> int:
    """Runs of consecutive chunks that the rank with the most of them holds; ``owner`` as ``owners`` gives it."""
    begins = np.flatnonzero(np.diff(owner, prepend=-1))
    return int(np.bincount(owner[begins]).max())


def remote_keys(
    ranges: NDArray[np.int64], rank_of: NDArray[np.int64], bounds: NDArray[np.int64], owner: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Merged ranges of keys that some rank reads and does not hold, by rank, and these ranks: of all ranks at once,
    each in coordinates of its own. ``ranges`` (N, 2) are the keys that rank ``rank_of`` (N,) reads."""
    stride = int(bounds[-1, 1]) + 1  # so ranges of two ranks do not touch
    wanted = ranges + (rank_of * stride)[:, None]
    found = subtract_intervals(wanted, bounds + (owner * stride)[:, None])
    ranks = found[:, 0] // stride
    return found - (ranks * stride)[:, None], ranks
