# SPDX-License-Identifier: Apache-2.0
"""The order in which a backward takes its work tiles where documents are many: one document after the other.

By cost, the longest tiles of all documents come first. Then as many documents run at the same time as there are, each
on a few SMs, and their m-blocks do not stay in L2 together. So the tiles of one document and head follow one another,
the longest first, and all descend: under a causal mask they see the same end, so those that begin together are at the
same m-blocks. The longest documents come first.

``gain`` estimates whether that is better, from the times at which work tiles visit m-blocks: an m-block is read again
if more than L2 holds was read since its last visit (``docs/log/ffa_backward_order.md``).
"""

from __future__ import annotations

from math import log

import numpy as np

from magi_attention.common.intervals import ramps
from magi_attention.kernels.ffa.schedule.simulate import BEGIN_AND_END, IN_L2, TileBlocks, starts_of

_LOOKED = 40_000  # visits
_ONE_IN = 4  # blocks
_LOOKED_AT = 0.4  # of the work, where those are in the middle, as the longest documents come first
_TIME_BITS, _TICKS = 32, 100  # of a number with a time, and so many a block
_LEAST_SINGLE = 0.9  # of the work, which must be of tiles of one segment
_LEAST_TILES = 2  # of a document on average


def missed(tiles: TileBlocks, work_tiles: np.ndarray, starts: np.ndarray, num_ctas: int, kept: float) -> float:
    """The share of visits whose block is not among the last ``kept`` ones, of ``_LOOKED`` visits.

    ``work_tiles`` (U, 3): tile, head and how many blocks are taken descending before the others; they start at
    ``starts`` (U,), blocks. The time between two visits of a block is compared with what it takes to read ``kept``
    others at the rate of what is missed. One block in four is looked at: the others give the same.
    """
    lengths = tiles.count[work_tiles[:, 0]]
    before = np.cumsum(lengths)
    begin = max(_LOOKED_AT * int(before[-1]) - _LOOKED / 2, 0)
    some = slice(*np.searchsorted(before, (begin, begin + _LOOKED)).tolist())
    work_tiles, lengths, starts = work_tiles[some], lengths[some], starts[some]
    first = tiles.first[work_tiles[:, 0]]
    turn = first + lengths - np.minimum(work_tiles[:, 2], lengths)  # taken descending from here on
    first_seen = -(-first // _ONE_IN)
    seen = -(-(first + lengths) // _ONE_IN) - first_seen
    work_tile = np.repeat(np.arange(len(work_tiles)), seen)
    block = _ONE_IN * ramps(first_seen, seen)
    back, end = turn[work_tile], (first + lengths)[work_tile]
    time = starts[work_tile] + np.where(block >= back, end - 1 - block, end - back + block - first[work_tile])
    key = work_tiles[work_tile, 1] * tiles.blocks + block
    # Sorted as one number, block and head before time: that is much faster than by two.
    order = np.sort(key << _TIME_BITS | (time * _TICKS).astype(np.int64))
    gap = np.diff(order)
    gaps = np.sort(gap[np.diff(order >> _TIME_BITS) == 0]) / _TICKS
    low, high = 0.0, 1.0
    for _ in range(12):
        share = (low + high) / 2
        since = kept / (num_ctas * max(share, 1e-6))
        found = 1 - np.searchsorted(gaps, since) / max(len(time), 1)
        low, high = (share, high) if found > share else (low, share)
    return (low + high) / 2


def gain(tiles: TileBlocks, work_tiles: np.ndarray, heads: int, num_ctas: int, group: int) -> float:
    """By how much it is faster to take up work tiles ``by_document`` than as ``work_tiles``, as a logarithm; -1.0
    where there is no estimate. Measured with documents of 512 to 52,000 tokens, from 4K to 512K, and groups of 4
    to 16.
    """
    work = int(tiles.count.sum())
    if work == 0 or int(tiles.count[tiles.is_single].sum()) < _LEAST_SINGLE * work:
        return -1.0
    documents = len(np.unique(_documents_of(tiles)[tiles.count > 0]))
    if documents < 2 or _LEAST_TILES * documents > len(tiles.count):
        return -1.0
    shares, ends = [], []
    for some in (work_tiles, by_document(tiles, heads)):
        times = tiles.count[some[:, 0]] + BEGIN_AND_END
        starts = starts_of(times, num_ctas)
        shares.append(missed(tiles, some, starts, num_ctas, IN_L2 / group))
        ends.append(float((starts + times).max()))
    return log(ends[0] / ends[1]) + shares[0] ** 2 - shares[1] ** 2 / 2


def _documents_of(tiles: TileBlocks) -> np.ndarray:
    """(num_tiles,) a number for each document. Tiles that end with the same block are of one; one of several segments
    is alone, and so is one that sees nothing."""
    alone = tiles.blocks + 1 + np.arange(len(tiles.count))
    return np.where(tiles.is_single & (tiles.count > 0), tiles.first + tiles.count, alone)


def document_order(tiles: TileBlocks) -> np.ndarray:
    """(num_tiles,) tiles: those that see nothing, then the longest document first, in each the longest tile."""
    document = np.unique(_documents_of(tiles), return_inverse=True)[1]
    longest = np.zeros(len(tiles.count), dtype=np.int64)
    np.maximum.at(longest, document, tiles.count)
    return np.lexsort((-tiles.count, document, -longest[document], tiles.count > 0))


def by_document(tiles: TileBlocks, heads: int) -> np.ndarray:
    """(U, 3) all work tiles: tile, head and how many blocks are taken descending, which is all of them. In each
    document head by head."""
    order = document_order(tiles)
    document = _documents_of(tiles)[order]
    sizes = np.diff(np.flatnonzero(np.concatenate([[True], document[1:] != document[:-1], [True]])))
    begin, job = np.cumsum(sizes) - sizes, np.repeat(np.arange(len(sizes)), heads)
    tile = order[np.repeat(begin[job], sizes[job]) + ramps(0, sizes[job])]
    head = np.repeat(np.tile(np.arange(heads), len(sizes)), sizes[job])
    return np.column_stack([tile, head, tiles.count[tile]])
