# SPDX-License-Identifier: Apache-2.0
"""Cutting the packed sequence into chunks, the units that dispatch hands to ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.intervals import ramps, subtract_intervals
from magi_attention.common.scalars import as_int
from magi_attention.common.slices import K0, K1, Q0, Q1, areas, cut_q, trim
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


def owners(partitions: Sequence[Sequence[int]], num_chunks: int) -> NDArray[np.int64]:
    """(chunks,): the rank of each chunk."""
    owner = np.empty(num_chunks, dtype=np.int64)
    chunks = np.fromiter(chain.from_iterable(partitions), dtype=np.int64)
    owner[chunks] = np.repeat(np.arange(len(partitions)), [len(part) for part in partitions])
    return owner


def split_by_chunk(
    slices: NDArray[np.int64], bounds: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cuts slices at chunk bounds.

    Returns ``(pieces, chunk of each piece, index of its slice in q order)``, pieces in chunk order. Rows that
    see nothing are gone, and every non-FULL piece has at least as many keys as queries.
    """
    ordered = slices[np.lexsort((slices[:, Q1], slices[:, Q0]))]
    given = np.flatnonzero(areas(ordered))
    ordered = trim(ordered)
    low = np.searchsorted(bounds[:, 1], ordered[:, Q0], side="right")
    high = np.searchsorted(bounds[:, 0], ordered[:, Q1], side="left")
    counts = np.maximum(high - low, 0)
    slice_of = np.repeat(np.arange(len(ordered)), counts)
    chunk_of = ramps(low, counts)
    pieces, keep = cut_q(ordered[slice_of], bounds[chunk_of, 0], bounds[chunk_of, 1])
    chunk_of, slice_of = chunk_of[keep], given[slice_of[keep]]
    order = np.argsort(chunk_of, kind="stable")
    return pieces[order], chunk_of[order], slice_of[order]


def sum_by(index: NDArray[np.int64], values: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Exact int64 sums of ``values`` per index (bincount would go through float64)."""
    out = np.zeros(size, dtype=np.int64)
    np.add.at(out, index, values)
    return out


def chunk_areas(pieces: NDArray[np.int64], chunk_of: NDArray[np.int64], num_chunks: int) -> NDArray[np.int64]:
    """Allowed pairs per chunk, int64 ``(num_chunks,)``."""
    return sum_by(chunk_of, areas(pieces), num_chunks)


def remote_keys(
    pieces: NDArray[np.int64], rank_of: NDArray[np.int64], bounds: NDArray[np.int64], owner: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Merged ranges of keys that some rank reads and does not hold, by rank, and these ranks: of all ranks at once,
    each in coordinates of its own."""
    stride = int(bounds[-1, 1]) + 1  # so ranges of two ranks do not touch
    wanted = pieces[:, [K0, K1]] + (rank_of * stride)[:, None]
    found = subtract_intervals(wanted, bounds + (owner * stride)[:, None])
    ranks = found[:, 0] // stride
    return found - (ranks * stride)[:, None], ranks
