# SPDX-License-Identifier: Apache-2.0
"""What a rank computes per stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from magi_attention.api.keys.attn_arg import AttnArg
from magi_attention.common.slices import SliceTable
from magi_attention.errors import UnsupportedError


@dataclass
class FA4AttnArg(AttnArg):
    """``AttnArg`` with the sizes that the FA4 entry points ask for; the tile sizes are hints."""

    tile_m: int = -1
    tile_n: int = -1
    tile_m_bwd: int = -1
    tile_n_bwd: int = -1
    seqlen_q: int = 0
    seqlen_k: int = 0
    headdim: int = 128

    def to_fa4_args(self, is_bwd: bool = False) -> NoReturn:
        """Not here: the tables of blocks that FlashAttention-4 reads are not made."""
        raise UnsupportedError(
            "to_fa4_args is not built; give the FA4AttnArg itself to magi_attention.functional.fa4.fa4_fwd or fa4_bwd."
        )


@dataclass
class CalcMeta:
    """The host stage and the remote stages of one rank; remote k ranges count rows of the stage's buffer."""

    local_attn_arg: AttnArg
    remote_attn_args_list: list[AttnArg]
    no_overlap: bool = False
    headdim: int = 128
    seqlen_q_shard: int = 0
    seqlen_k_local: int = 0
    seqlen_k_per_remote_stage: list[int] = field(default_factory=list)

    @property
    def overlap_degree(self) -> int:
        return len(self.remote_attn_args_list)

    @property
    def merged_attn_arg(self) -> AttnArg:
        """Local and remote slices over local keys followed by the remote buffers."""
        parts, offset = [self.local_attn_arg.slices.array], self.seqlen_k_local
        for arg, rows in zip(self.remote_attn_args_list, self.seqlen_k_per_remote_stage):
            parts.append(arg.slices.array + np.array([0, 0, offset, offset, 0]))
            offset += rows
        return AttnArg.from_slices(SliceTable(np.concatenate(parts)))
