# SPDX-License-Identifier: Apache-2.0
"""A mask cut where the ranges of ranks begin and end, and rectangles from who computes which piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from magi_attention.common.range import AttnRange
from magi_attention.common.ranges import AttnRanges
from magi_attention.common.slices import areas, merge
from magi_attention.compat.values.rectangle import AttnRectangle
from magi_attention.compat.values.rectangles import AttnRectangles
from magi_attention.errors import ContractError
from magi_attention.meta.chunking import split_by_chunk
from magi_attention.meta.solver.placement import Cells, Ints, Pairs


@dataclass(frozen=True, eq=False)
class Grid:
    """``pairs`` of a host range of queries and one of keys, and the ``cells`` of the mask in them."""

    cells: Cells
    pairs: Pairs
    world: int

    @classmethod
    def cut(
        cls, rects: AttnRectangles, hosts_q: Sequence[AttnRanges], hosts_k: Sequence[AttnRanges], heads: tuple[int, int]
    ) -> Grid:
        """``hosts_*[r]`` are the rows of rank r; ``heads``: what a row of queries and one of keys costs.

        ``ContractError``: ranges of two ranks overlap, or a pair of the mask is in no rank's ranges.
        """
        if len(hosts_q) != len(hosts_k) or not hosts_q:
            raise ContractError(f"Ranges of {len(hosts_q)} ranks for q and {len(hosts_k)} for k; give as many of both.")
        (bounds_q, owner_q), (bounds_k, owner_k) = _bounds(hosts_q, "q"), _bounds(hosts_k, "k")
        slices = rects.to_slices()
        pieces, chunk_of, _ = split_by_chunk(slices, bounds_q)
        cells = Cells.cut(pieces, chunk_of, bounds_k)
        lost = int(areas(slices).sum() - cells.area.sum())
        if lost:
            raise ContractError(f"{lost:,} pairs of the mask are in no rank's host ranges; cover all rows and keys.")
        return cls(cells, Pairs.of_cells(cells, (owner_q, owner_k), heads), len(hosts_q))

    @property
    def mean(self) -> float:
        """Area of a rank."""
        return float(self.pairs.area.sum()) / self.world

    def fill(self, rank: Ints, buckets: Sequence[AttnRectangles]) -> None:
        """Puts the rectangles of each rank into its bucket, in place of what is there; ``rank`` (pairs,)."""
        of_cell = rank[self.pairs.of]
        for r, bucket in enumerate(buckets):
            bucket.clear()
            for q0, q1, k0, k1, kind in merge(self.cells.pieces[of_cell == r]).tolist():
                bucket.append(AttnRectangle(AttnRange(q0, q1), AttnRange(k0, k1), mask_type=kind))


def _bounds(hosts: Sequence[AttnRanges], side: str) -> tuple[Ints, Ints]:
    """All ranges (n, 2), ascending, and the rank of each."""
    ranges = [np.array(host.merge().to_naive_ranges(), dtype=np.int64).reshape(-1, 2) for host in hosts]
    owner = np.repeat(np.arange(len(hosts)), [len(x) for x in ranges])
    bounds = np.concatenate(ranges)
    order = np.argsort(bounds[:, 0], kind="stable")
    bounds, owner = bounds[order], owner[order]
    if (bounds[1:, 0] < bounds[:-1, 1]).any():
        raise ContractError(f"The host ranges of {side} of two ranks overlap; a row has one owner.")
    return bounds, owner


__all__ = ["Grid"]
