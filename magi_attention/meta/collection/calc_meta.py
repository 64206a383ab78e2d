# SPDX-License-Identifier: Apache-2.0
"""What a rank computes per stage, in the published form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.ranges import AttnRanges
from magi_attention.common.slices import Q0, SliceTable, areas
from magi_attention.errors import UnsupportedError

if TYPE_CHECKING:
    import torch


@dataclass
class AttnArg:
    """Slices of one kernel call; ones without pairs are dropped. ``total_area`` is computed if -1."""

    q_ranges: AttnRanges
    k_ranges: AttnRanges
    attn_type_map: list[int]
    total_area: int = -1

    def __post_init__(self) -> None:
        table = SliceTable.from_ranges(
            self.q_ranges.to_naive_ranges(), self.k_ranges.to_naive_ranges(), list(self.attn_type_map)
        )
        array = table.array[areas(table.array) > 0]
        self.slices = SliceTable(array)
        self.q_ranges = AttnRanges.from_ranges(array[:, 0:2].tolist())
        self.k_ranges = AttnRanges.from_ranges(array[:, 2:4].tolist())
        self.attn_type_map = array[:, 4].tolist()
        if self.total_area == -1:
            self.total_area = self.slices.area

    @classmethod
    def from_slices(cls, slices: SliceTable) -> AttnArg:
        array = slices.array
        return cls(
            AttnRanges.from_ranges(array[:, 0:2].tolist()),
            AttnRanges.from_ranges(array[:, 2:4].tolist()),
            array[:, 4].tolist(),
        )

    def to_ffa_args(self, is_bwd: bool = False) -> dict[str, torch.Tensor | bool]:
        """Keyword arguments of ``flex_flash_attn_func``: int32 tensors on the current GPU, else on the CPU."""
        import torch

        q, k, kinds = self.slices.tensors("cuda" if torch.cuda.is_available() else "cpu")
        args: dict[str, torch.Tensor | bool] = {"q_ranges": q, "k_ranges": k, "attn_type_map": kinds}
        if not is_bwd:
            args["disable_fwd_atomic_reduction"] = _are_disjoint(self.slices.array[:, Q0 : Q0 + 2])
        return args

    def can_skip(self, is_bwd: bool = False) -> bool:
        """True if there is no pair to compute."""
        return not len(self.slices)


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


def _are_disjoint(ranges: NDArray[np.int64]) -> bool:
    ordered = ranges[np.argsort(ranges[:, 0], kind="stable")]
    return bool((ordered[1:, 0] >= ordered[:-1, 1]).all())
