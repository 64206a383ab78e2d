# SPDX-License-Identifier: Apache-2.0
"""Cutting the packed sequence into chunks, the units that dispatch hands to ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.intervals import merge_intervals, ramps, sum_by
from magi_attention.common.scalars import as_int
from magi_attention.common.slices import K0, K1, Q0, Q1, areas, cut_q, trim_with_index
from magi_attention.errors import ContractError


def compute_pad_size(total_seqlen_q: int, cp_size: int, chunk_size: int) -> int:
    """Smallest pad >= 0 (tokens) that makes the total a multiple of ``chunk_size * cp_size``."""
    cp_size, chunk_size = as_int(cp_size, "cp_size", at_least=1), as_int(chunk_size, "chunk_size", at_least=1)
    return -as_int(total_seqlen_q, "total_seqlen_q") % (chunk_size * cp_size)


def pad_size(total: int, cp_size: int, chunk_size: int, uneven_shard: bool) -> int:
    """Pad tokens of a plan: none for a single rank, and of uneven shards only what gives each rank a chunk."""
    if not uneven_shard:
        return 0 if cp_size == 1 else compute_pad_size(total, cp_size, chunk_size)
    return max((cp_size - 1) * chunk_size + 1 - total, 0)


def resolve_chunk_size(total: int, cp_size: int, requested: int | None, min_chunks_per_rank: int) -> int:
    """Chunk length in tokens: ``ceil(total / (min_chunks_per_rank * cp_size))``, or ``requested`` if smaller.

    So a requested chunk size is an upper bound: larger chunks could not be balanced. Where there are fewer chunks than
    ranks, ``pad_size`` makes up for it.
    """
    if total < 1:
        raise ContractError(f"The sequence has {total} tokens; a plan needs at least one.")
    if cp_size < 1:
        raise ContractError(f"cp_size is {cp_size}; give the number of ranks, >= 1.")
    if requested is not None and requested < 1:
        raise ContractError(f"chunk_size is {requested}; give a positive number of tokens or None.")
    auto = -(-total // (max(min_chunks_per_rank, 1) * cp_size))
    return min(auto, requested) if requested else auto


def chunk_bounds(padded_total: int, chunk_size: int) -> NDArray[np.int64]:
    """``(num_chunks, 2)`` half-open token ranges; only the last may be short (uneven shard)."""
    starts = np.arange(0, padded_total, chunk_size, dtype=np.int64)
    return np.stack([starts, np.minimum(starts + chunk_size, padded_total)], axis=1)


def split_by_chunk(
    slices: NDArray[np.int64], bounds: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cuts slices at chunk bounds.

    Returns ``(pieces, chunk of each piece, index of its slice in q order)``, pieces in chunk order. Rows that
    see nothing are gone, and every non-FULL piece has at least as many keys as queries.
    """
    ordered = slices[np.lexsort((slices[:, Q1], slices[:, Q0]))]
    ordered, given = trim_with_index(ordered)
    low = np.searchsorted(bounds[:, 1], ordered[:, Q0], side="right")
    high = np.searchsorted(bounds[:, 0], ordered[:, Q1], side="left")
    counts = np.maximum(high - low, 0)
    chunk_of = ramps(low, counts)
    order = np.argsort(chunk_of, kind="stable")
    slice_of, chunk_of = np.repeat(np.arange(len(ordered)), counts)[order], chunk_of[order]
    pieces = ordered[slice_of]
    # Most slices lie in one chunk and stay as they are.
    at = np.flatnonzero((pieces[:, Q0] < bounds[chunk_of, 0]) | (pieces[:, Q1] > bounds[chunk_of, 1]))
    cut, keep = cut_q(pieces[at], bounds[chunk_of[at], 0], bounds[chunk_of[at], 1])
    pieces[at[keep]] = cut
    if len(keep) < len(at):
        is_kept = np.ones(len(pieces), dtype=np.bool_)
        is_kept[np.delete(at, keep)] = False
        pieces, chunk_of, slice_of = pieces[is_kept], chunk_of[is_kept], slice_of[is_kept]
    return pieces, chunk_of, given[slice_of]


def chunk_areas(pieces: NDArray[np.int64], chunk_of: NDArray[np.int64], num_chunks: int) -> NDArray[np.int64]:
    """Allowed pairs per chunk, int64 ``(num_chunks,)``."""
    return sum_by(chunk_of, areas(pieces), num_chunks)


@dataclass(frozen=True, eq=False)
class Cut:
    """A mask in chunks: ``pieces`` and ``chunk_of`` as of ``split_by_chunk``, and ``bounds`` (chunks, 2). What follows
    from these is made when it is first asked for, and then kept."""

    pieces: NDArray[np.int64]
    chunk_of: NDArray[np.int64]
    bounds: NDArray[np.int64]

    @classmethod
    def of(cls, slices: NDArray[np.int64], bounds: NDArray[np.int64]) -> Cut:
        return cls(*split_by_chunk(slices, bounds)[:2], bounds)

    @cached_property
    def work(self) -> NDArray[np.int64]:
        """(chunks,): areas."""
        return sum_by(self.chunk_of, self._areas, len(self.bounds))

    @cached_property
    def keys(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Merged ranges of the keys that each chunk reads, its own ones too, and the chunk of each range."""
        stride = int(self.bounds[-1, 1]) + 1  # so ranges of two chunks do not touch
        merged = merge_intervals(self.pieces[:, [K0, K1]] + (self.chunk_of * stride)[:, None])
        chunk_of = merged[:, 0] // stride
        return merged - (chunk_of * stride)[:, None], chunk_of

    @cached_property
    def document(self) -> NDArray[np.int64]:
        """(chunks,): the first key of the largest piece of each, -1 without pieces. Chunks that follow one another are
        of one document if it is the same."""
        size, anchor = self._areas, np.full(len(self.bounds), -1)
        if len(size):
            begins = np.flatnonzero(np.diff(self.chunk_of, prepend=self.chunk_of[:1] - 1))  # pieces are in their order
            most = np.repeat(np.maximum.reduceat(size, begins), np.diff(begins, append=len(size)))
            largest = np.flatnonzero(size == most)[::-1]  # of equal ones the first, which is written last
            anchor[self.chunk_of[largest]] = self.pieces[largest, K0]
        return anchor

    @cached_property
    def _areas(self) -> NDArray[np.int64]:
        return areas(self.pieces)
