# SPDX-License-Identifier: Apache-2.0
"""Slices as what FlashAttention-4 takes: lists of the blocks that hold a pair, and the key intervals of each query.

A block is ``BlockSize`` queries times keys. Its kernels visit the blocks of the lists only. They apply the intervals in
blocks that are seen in part.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from magi_attention.kernels.key_intervals import KeyIntervals, key_intervals

NEVER = np.iinfo(np.int32).max  # above every key
_CELLS = 2**24  # blocks whose pairs are counted at a time


class BlockSize(NamedTuple):
    """Queries and keys of a block."""

    queries: int
    keys: int


class BlockLists(NamedTuple):
    """For each row of blocks, the numbers of the blocks in it, in order: int32 ``counts`` (rows,) and ``indices``
    (rows, longest row). Entries beyond the count are 0."""

    counts: NDArray[np.int32]
    indices: NDArray[np.int32]


class MaskBlocks(NamedTuple):
    """A mask in blocks. ``partial`` and ``full`` list blocks of keys for each block of queries, and
    ``partial_transposed`` and ``full_transposed`` blocks of queries for each block of keys."""

    partial: BlockLists
    full: BlockLists
    partial_transposed: BlockLists
    full_transposed: BlockLists
    endpoints: NDArray[np.int32]


def mask_blocks(slices: NDArray[np.int64], total_q: int, total_k: int, size: BlockSize) -> MaskBlocks:
    """Disjoint slices (N, 5) in blocks; the last block of a side may reach beyond the tokens.

    ``endpoints`` are int32 (``num_endpoints``, queries of all blocks): the ends of the intervals in rising order,
    ``NEVER`` where a query has fewer. A query sees key k if an odd number of its endpoints is at most k.
    """
    intervals = key_intervals(slices)
    shape = (-(-total_q // size.queries), -(-total_k // size.keys))
    pairs = _pairs(intervals, shape, size)
    queries = np.minimum(size.queries, total_q - size.queries * np.arange(shape[0]))
    keys = np.minimum(size.keys, total_k - size.keys * np.arange(shape[1]))
    rows, columns, counts = pairs
    is_full = counts == queries[rows] * keys[columns]
    lists = []
    for kind in (~is_full, is_full):
        lists.append((_lists(rows[kind], columns[kind], shape[0]), _lists(columns[kind], rows[kind], shape[1])))
    (partial, partial_transposed), (full, full_transposed) = lists
    endpoints = _endpoints(intervals, shape[0] * size.queries)
    return MaskBlocks(partial, full, partial_transposed, full_transposed, endpoints)


def _pairs(
    intervals: KeyIntervals, shape: tuple[int, int], size: BlockSize
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(row, column, allowed pairs) of the blocks that have any, by row and column."""
    per_step = max(1, _CELLS // (shape[1] + 1))
    found = []
    for first in range(0, shape[0], per_step):
        height = min(per_step, shape[0] - first)
        begin, end = np.searchsorted(intervals.rows, [first * size.queries, (first + height) * size.queries])
        blocks = intervals.rows[begin:end] // size.queries - first
        counts = np.zeros((height, shape[1] + 2), dtype=np.int64)
        # Keys below e, less those below s: of either, the block of the bound has a share and those before it are whole.
        for bounds, sign in ((intervals.ends[begin:end], 1), (intervals.starts[begin:end], -1)):
            column, rest = np.divmod(bounds, size.keys)
            np.add.at(counts, (blocks, column), sign * (rest - size.keys))
            np.add.at(counts, (blocks, column + 1), -sign * rest)
        np.cumsum(counts, axis=1, out=counts)
        rows, columns = np.nonzero(counts)
        found.append((rows + first, columns, counts[rows, columns]))
    return tuple(np.concatenate(parts) for parts in zip(*found))  # type: ignore[return-value]


def _lists(rows: NDArray[np.int64], columns: NDArray[np.int64], num_rows: int) -> BlockLists:
    order = np.lexsort((columns, rows))
    rows, columns = rows[order], columns[order]
    counts = np.bincount(rows, minlength=num_rows)
    indices = np.zeros((num_rows, max(1, int(counts.max(initial=0)))), dtype=np.int32)
    indices[rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)] = columns
    return BlockLists(counts.astype(np.int32), indices)


def num_endpoints(intervals: int) -> int:
    """How many endpoints a query has in masks with up to so many intervals. 1 and 2 intervals have 2 and 4, which a
    kernel compares one by one; it halves longer lists, so these have 2^n - 1."""
    most = 2 * max(1, intervals)
    return most if most <= 4 else 2 ** most.bit_length() - 1


def _endpoints(intervals: KeyIntervals, num_rows: int) -> NDArray[np.int32]:
    length = num_endpoints(int(intervals.places.max(initial=0)) + 1)
    endpoints = np.full((length, num_rows), NEVER, dtype=np.int32)
    endpoints[2 * intervals.places, intervals.rows] = intervals.starts
    endpoints[2 * intervals.places + 1, intervals.rows] = intervals.ends
    return endpoints
