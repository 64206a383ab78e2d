# SPDX-License-Identifier: Apache-2.0
"""``GroundTruthDispatcher``: chunk areas and dispatch by brute force over a dense mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from magi_attention.errors import ContractError

if TYPE_CHECKING:
    import torch


class GroundTruthDispatcher:
    """A dense mask cut into chunks of query rows.

    Args:
        mask: ``(total_q, total_k)`` of zeros and ones, array or tensor.
        chunk_size: rows per chunk; the last chunk may be shorter.
    """

    def __init__(self, mask: np.ndarray | torch.Tensor, chunk_size: int) -> None:
        dense = mask.detach().cpu().numpy() if hasattr(mask, "detach") else np.asarray(mask)
        if dense.ndim != 2 or chunk_size < 1:
            raise ContractError(f"A mask of {dense.ndim} dimensions in chunks of {chunk_size}; give 2 and >= 1.")
        self.mask, self.chunk_size = dense != 0, chunk_size
        self.num_chunks = -(-len(dense) // chunk_size)

    def rows_of_chunk(self, chunk: int) -> range:
        start = chunk * self.chunk_size
        return range(start, min(start + self.chunk_size, len(self.mask)))

    def chunk_areas(self) -> list[int]:
        """Allowed pairs of every chunk, counted one by one."""
        return [sum(int(self.mask[row].sum()) for row in self.rows_of_chunk(chunk)) for chunk in range(self.num_chunks)]

    def rank_areas(self, partitions: Sequence[Sequence[int]]) -> list[int]:
        """Allowed pairs of every rank, given the chunks of each."""
        areas = self.chunk_areas()
        return [sum(areas[chunk] for chunk in chunks) for chunks in partitions]

    def check_partitions(self, partitions: Sequence[Sequence[int]]) -> None:
        """``ContractError`` unless every chunk has exactly one rank."""
        chunks = sorted(chunk for part in partitions for chunk in part)
        if chunks != list(range(self.num_chunks)):
            raise ContractError(f"Chunks {chunks} are not 0..{self.num_chunks - 1}, each once; fix partitions.")

    def position_ids(self, partitions: Sequence[Sequence[int]], rank: int) -> list[int]:
        """Global rows of a rank, its chunks in ascending order."""
        return [row for chunk in sorted(partitions[rank]) for row in self.rows_of_chunk(chunk)]

    def dispatch(self, x: torch.Tensor, partitions: Sequence[Sequence[int]], rank: int) -> torch.Tensor:
        """The rows of a rank of the global tensor ``(total_q, ...)``."""
        return x[self.position_ids(partitions, rank)]

    def undispatch(self, parts: Sequence[torch.Tensor], partitions: Sequence[Sequence[int]]) -> torch.Tensor:
        """The global tensor from the rows of all ranks."""
        out = parts[0].new_empty((len(self.mask), *parts[0].shape[1:]))
        for rank, part in enumerate(parts):
            out[self.position_ids(partitions, rank)] = part
        return out

    def best_max_area(self, num_ranks: int, equal_counts: bool = False) -> int:
        """Smallest possible largest rank area, by trying every assignment; for few chunks only.

        ``equal_counts`` demands the same number of chunks on every rank.
        """
        areas, best = self.chunk_areas(), sum(self.chunk_areas())
        limit = self.num_chunks // num_ranks if equal_counts else self.num_chunks
        for code in range(num_ranks**self.num_chunks):
            loads, counts = [0] * num_ranks, [0] * num_ranks
            for area in areas:
                code, rank = divmod(code, num_ranks)
                loads[rank] += area
                counts[rank] += 1
            if max(counts) <= limit:
                best = min(best, max(loads))
        return best
