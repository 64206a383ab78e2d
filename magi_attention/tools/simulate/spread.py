# SPDX-License-Identifier: Apache-2.0
"""How other ways spread a packed sequence: every document in as many pieces as ranks, or twice as many (zigzag).

Rank r has pieces r and ``2 * ranks - 1 - r`` of each document whose mask looks back, so that all ranks have as much to
do. A document is padded until its pieces are equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.mask import Mask
from magi_attention.common.slices import CAUSAL, Q0, Q1, TYPE, cut_q, pairs_before, trim
from magi_attention.tools.simulate.kernels import kind_of

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """``rows`` of a rank, pad included; ``pairs`` of the whole mask. ``step_pairs`` (parts, parts): pairs of each rank
    with the keys of the rank that is so many before it; None where all ranks have ``first`` pairs with their own keys
    and ``other`` with those of each other rank."""

    kind: str
    parts: int
    rows: float
    pairs: int
    is_zigzag: bool
    first: float
    other: float
    step_pairs: NDArray[np.float32] | None = None

    def pairs_of_step(self, step: int) -> Floats:
        """(parts,) of each rank."""
        if self.step_pairs is not None:
            return self.step_pairs[:, step].astype(np.float64)
        return np.full(self.parts, self.other if step else self.first)


def spread(mask: Mask, parts: int, multiple: int = 1) -> Spread:
    """Over ``parts`` ranks, in pieces of a multiple of ``multiple`` tokens. The mask of one sequence is counted as it
    is. Each of several documents is counted as a causal or a full one of the same area."""
    slices = mask.slices.array
    lengths = np.diff(np.array(mask.cu_seqlens or (0, mask.total_q), dtype=np.int64))
    # Full documents only see themselves as a whole; any other mask looks back.
    is_zigzag = parts > 1 and not _is_full(slices, len(lengths))
    pieces = parts * (2 if is_zigzag else 1)
    piece = -(-lengths // (pieces * multiple)) * multiple
    rows, pairs = float(piece.sum() * (pieces // parts)), mask.slices.area
    kind, matrix = kind_of(slices), None
    # Pairs of a document in pieces of p tokens, on each rank: with its own keys, with those of another rank.
    squares = float((piece.astype(np.float64) ** 2).sum())
    first, other = (2 * squares + float(piece.sum()), 2 * squares) if is_zigzag else (squares, squares)
    scale = pairs / (parts * (first + (parts - 1) * other))
    if len(lengths) == 1 and parts > 1 and kind not in ("full", "causal"):
        matrix = _matrix(trim(slices), int(piece[0]), parts, is_zigzag)
    return Spread(kind, parts, rows, pairs, is_zigzag, first * scale, other * scale, matrix)


def _is_full(slices: NDArray[np.int64], documents: int) -> bool:
    is_plain = bool((slices[:, TYPE] & CAUSAL == 0).all())
    return is_plain and len(slices) == documents and bool((slices[:, Q1] > slices[:, Q0]).all())


def _matrix(slices: NDArray[np.int64], piece: int, parts: int, is_zigzag: bool) -> NDArray[np.float32]:
    """``Spread.step_pairs`` of one sequence, counted."""
    pieces = parts * (2 if is_zigzag else 1)
    owner = np.arange(pieces)
    owner = np.minimum(owner, pieces - 1 - owner) if is_zigzag else owner
    edges = np.arange(pieces)[:, None] * piece + np.array([0, piece])
    order = np.argsort(slices[:, Q0], kind="stable")
    slices = slices[order]
    found = np.zeros((parts, parts), dtype=np.float32)
    for number in range(pieces):
        near = slices[(slices[:, Q0] < edges[number, 1]) & (slices[:, Q1] > edges[number, 0])]
        mine, rank = cut_q(near, *edges[number].tolist())[0], owner[number]
        before = pairs_before(mine, edges)
        by_owner = np.bincount(owner, weights=before[:, 1] - before[:, 0], minlength=parts)
        found[rank] += by_owner[(rank - np.arange(parts)) % parts]
    return found
