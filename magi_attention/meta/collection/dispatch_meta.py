# SPDX-License-Identifier: Apache-2.0
"""``DispatchMeta``: which chunks each rank holds. May be built by hand to bring one's own partition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from magi_attention.common.enum import AttnRole, AttnType
from magi_attention.common.intervals import merge_intervals
from magi_attention.common.ranges import AttnRanges
from magi_attention.errors import ContractError
from magi_attention.meta.chunking import chunk_bounds

if TYPE_CHECKING:
    import torch


@dataclass
class DispatchMeta:
    """Sizes are tokens of the padded sequence; ``shard_seqlen`` is this rank's count.

    ``partitions[r]`` are the chunk ids of rank r; ``partitions_perm_idxs`` all of them in rank order and
    ``partitions_unperm_idxs`` its inverse. Positions are clipped to ``max_valid_ids - 1``. In the uneven form
    ``chunk_actual_sizes`` and ``split_sizes`` hold the tokens per chunk and per rank.
    """

    attn_role: AttnRole
    attn_type: AttnType
    total_seqlen: int
    shard_seqlen: int
    max_valid_ids: int
    chunk_size: int
    num_chunks: int
    cp_rank: int
    cp_size: int
    partitions: list[list[int]]
    partitions_perm_idxs: list[int]
    partitions_unperm_idxs: list[int]
    chunk_actual_sizes: list[int] | None = None
    split_sizes: list[int] | None = None

    def __post_init__(self) -> None:
        if len(self.partitions) != self.cp_size:
            raise ContractError(f"{len(self.partitions)} partitions for cp_size {self.cp_size}; give one per rank.")
        for name in ("partitions_perm_idxs", "partitions_unperm_idxs"):
            if len(getattr(self, name)) != self.num_chunks:
                raise ContractError(
                    f"{name} has {len(getattr(self, name))} entries for {self.num_chunks} chunks; give one per chunk."
                )

    @property
    def host_ranges_per_rank(self) -> list[AttnRanges]:
        """Merged token ranges of every rank."""
        bounds = chunk_bounds(self.total_seqlen, self.chunk_size)
        return [AttnRanges.from_ranges(merge_intervals(bounds[list(p)]).tolist()) for p in self.partitions]

    @property
    def position_ids(self) -> torch.Tensor:
        """int64 tensor of this rank's positions; on the current GPU if there is one, else on the CPU."""
        import torch

        bounds = chunk_bounds(self.total_seqlen, self.chunk_size)
        parts = [np.arange(*bounds[c]) for c in self.partitions[self.cp_rank]]
        ids = np.minimum(np.concatenate(parts), self.max_valid_ids - 1)
        return torch.from_numpy(ids).to("cuda" if torch.cuda.is_available() else "cpu")
