# SPDX-License-Identifier: Apache-2.0
"""Some ranks of a group as a group, over the messages of the whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from magi_attention.comm.transport.base import Rows, Transport, Work
from magi_attention.errors import ContractError


class PartTransport:
    """An ``AllToAll``: the ranks ``members`` of ``whole``, ascending, this one among them.

    The members divide ``whole``, and all ranks of ``whole`` call ``all_to_all_v`` together, each for its part: no new
    process group is made, for which processes outside ``whole`` might have to call too.
    """

    def __init__(self, whole: Transport, members: Sequence[int]) -> None:
        self.whole, self.members = whole, tuple(members)
        if whole.rank not in self.members:
            raise ContractError(f"Rank {whole.rank} is none of the ranks {list(members)}; pass the part that it is in.")
        self.rank, self.size = self.members.index(whole.rank), len(self.members)
        self.ranks = tuple(whole.ranks[member] for member in self.members)

    def all_to_all_v(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: Rows, input_splits: Rows, async_op: bool = False
    ) -> Work:
        splits = [self._spread(output_splits), self._spread(input_splits)]
        return self.whole.all_to_all_v(output, input, *splits, async_op=async_op)

    def _spread(self, splits: Sequence[int]) -> list[int]:
        """Rows per rank of the part as rows per rank of the whole."""
        if len(splits) != self.size:
            raise ContractError(f"{len(splits)} splits for {self.size} ranks; give one row count per rank.")
        spread = [0] * self.whole.size
        for member, rows in zip(self.members, splits):
            spread[member] = rows
        return spread
