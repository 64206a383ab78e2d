# SPDX-License-Identifier: Apache-2.0
"""``AttnArg``: slices of one kernel call, as ``get_xattn_args`` gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.ranges import AttnRanges
from magi_attention.common.slices import Q0, SliceTable, areas

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


def _are_disjoint(ranges: NDArray[np.int64]) -> bool:
    ordered = ranges[np.argsort(ranges[:, 0], kind="stable")]
    return bool((ordered[1:, 0] >= ordered[:-1, 1]).all())
