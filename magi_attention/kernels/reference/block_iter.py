# SPDX-License-Identifier: Apache-2.0
"""Which (query block, key block) tiles hold allowed pairs, and the mask of a tile.

Query blocks and key blocks lie on fixed grids. The walk over the slices is vectorised and costs one array
row per (slice, tile). A tile is *full* if one unmasked piece covers it; its mask is the union of its pieces.
Where slices overlap, ``counts`` tells how many allow a pair.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from magi_attention.common.intervals import ramps
from magi_attention.common.plan_cache import Kind
from magi_attention.common.slices import (
    CAUSAL,
    FULL,
    INVCAUSAL,
    K0,
    K1,
    Q0,
    Q1,
    TYPE,
    SliceTable,
    cut_k,
    cut_q,
    merge,
    trim,
)
from magi_attention.kernels.reference.sdpa import count_pairs

_MANY_PIECES = 16  # above this many per tile, one vectorised pass is cheaper than a loop over pieces
_MERGE_LIMIT = 8192


class KeyTile(NamedTuple):
    """Keys ``[k0, k1)`` for one query block; ``pieces`` in tile coordinates (N, 5), or None if full."""

    k0: int
    k1: int
    pieces: np.ndarray | None


class QueryBlock(NamedTuple):
    """Rows ``[q0, q1)`` with at least one allowed pair, and their tiles in ascending key order."""

    q0: int
    q1: int
    tiles: tuple[KeyTile, ...]


_WALKS: Kind[tuple[int, int], tuple[QueryBlock, ...]] = Kind("query blocks")


def block_walk(slices: SliceTable, block_q: int, block_k: int) -> tuple[QueryBlock, ...]:
    """All query blocks of ``slices`` in ascending order; made once per slice table and block sizes."""
    return slices.cache.get(_WALKS, (block_q, block_k), lambda: _walk(slices.array, block_q, block_k))


def _spread(start: np.ndarray, end: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Grid blocks that meet the non-empty ranges: (index of the range, index of the block), flat."""
    first = start // block
    count = (end - 1) // block - first + 1
    parent = np.repeat(np.arange(len(start)), count)
    within = ramps(0, count)
    return parent, first[parent] + within


def _walk(array: np.ndarray, block_q: int, block_k: int) -> tuple[QueryBlock, ...]:
    live = trim(array)
    if len(live) <= _MERGE_LIMIT:
        live = merge(live)  # fewer, larger pieces; a loop in Python, so only where it is cheap
    parent, q_block = _spread(live[:, Q0], live[:, Q1], block_q)
    pieces, kept = cut_q(live[parent], q_block * block_q, (q_block + 1) * block_q)
    q_block = q_block[kept]
    parent, k_block = _spread(pieces[:, K0], pieces[:, K1], block_k)
    pieces, kept = cut_k(pieces[parent], k_block * block_k, (k_block + 1) * block_k)
    q_block, k_block = q_block[parent][kept], k_block[kept]
    if not len(pieces):
        return ()
    order = np.lexsort((k_block, q_block))
    pieces, q_block, k_block = pieces[order], q_block[order], k_block[order]
    new_row = np.flatnonzero(np.diff(q_block, prepend=-1))
    new_tile = np.flatnonzero((np.diff(q_block, prepend=-1) != 0) | (np.diff(k_block, prepend=-1) != 0))
    # The rows and keys of a block shrink to those that its pieces touch.
    q0 = np.minimum.reduceat(pieces[:, Q0], new_row)
    q1 = np.maximum.reduceat(pieces[:, Q1], new_row)
    k0 = np.minimum.reduceat(pieces[:, K0], new_tile)
    k1 = np.maximum.reduceat(pieces[:, K1], new_tile)
    row_of_tile = np.searchsorted(new_row, new_tile, side="right") - 1
    stop = np.append(new_tile[1:], len(pieces))
    head = pieces[new_tile]
    full = (stop - new_tile == 1) & (head[:, TYPE] == FULL)
    full &= (head[:, Q0] == q0[row_of_tile]) & (head[:, Q1] == q1[row_of_tile])
    tiles: list[list[KeyTile]] = [[] for _ in new_row]
    for t in range(len(new_tile)):
        row = row_of_tile[t]
        local = None
        if not full[t]:
            local = pieces[new_tile[t] : stop[t]] - np.array([q0[row], q0[row], k0[t], k0[t], 0])
        tiles[row].append(KeyTile(int(k0[t]), int(k1[t]), local))
    return tuple(QueryBlock(int(a), int(b), tuple(row)) for a, b, row in zip(q0, q1, tiles))


class TileMask:
    """Makes the *ceiling* of a tile: +inf where a pair is allowed, -inf where not.

    The minimum of logits and ceiling masks them. It is several times faster on a CPU than ``masked_fill``
    and, unlike adding -inf, keeps an overflowed logit of a forbidden pair out. ``transposed`` gives
    (keys, rows) instead of (rows, keys).
    """

    def __init__(
        self, block_q: int, block_k: int, dtype: torch.dtype, device: torch.device, transposed: bool = False
    ) -> None:
        rows = torch.arange(block_q, dtype=dtype, device=device)
        keys = torch.arange(block_k, dtype=dtype, device=device)
        self._transposed = transposed
        # Tile-local diagonals d = key - row; small integers, so exact in any float dtype of 24 bits.
        self._diagonal = keys[:, None] - rows[None] if transposed else keys[None] - rows[:, None]

    def _box(self, x: torch.Tensor, rows: slice, keys: slice) -> torch.Tensor:
        return x[keys, rows] if self._transposed else x[rows, keys]

    def counts(self, pieces: np.ndarray, rows: int, keys: int) -> torch.Tensor:
        """How many of ``pieces`` allow each pair, (rows, keys) or, if transposed, (keys, rows), in the mask's dtype."""
        counts = torch.from_numpy(count_pairs(pieces, rows, keys)).to(self._diagonal)
        return counts.T if self._transposed else counts

    def ceiling(self, pieces: np.ndarray, rows: int, keys: int) -> torch.Tensor:
        """Ceiling (rows, keys), or (keys, rows) if transposed, of the union of ``pieces``."""
        like = self._box(self._diagonal, slice(rows), slice(keys))
        if len(pieces) > _MANY_PIECES:
            allowed = self.counts(pieces, rows, keys) > 0
            return torch.where(allowed, float("inf"), float("-inf")).to(like.dtype).contiguous()
        out = torch.full(like.shape, float("-inf"), dtype=like.dtype, device=like.device)
        for q0, q1, k0, k1, kind in pieces.tolist():
            box = self._box(out, slice(q0, q1), slice(k0, k1))
            if kind == FULL:
                box.fill_(float("inf"))
                continue
            # Half-integers keep 0 * inf away: sign(margin) says which side of the diagonal a pair is on.
            diagonal = self._box(self._diagonal, slice(q0, q1), slice(k0, k1))
            margin = (k1 - q1 + 0.5) - diagonal if kind & CAUSAL else diagonal - (k0 - q0 - 0.5)
            if kind & CAUSAL and kind & INVCAUSAL:
                margin = torch.minimum(margin, diagonal - (k0 - q0 - 0.5))
            torch.maximum(box, margin.mul_(float("inf")), out=box)
        return out
