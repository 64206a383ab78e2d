# SPDX-License-Identifier: Apache-2.0
"""One group cast as one rank sees it. The group reduce is its transpose.

Rows are tokens. The sender's rows are cut into consecutive *input splits*; split ``i`` goes to every rank
in ``dst_indices[i]``. The receiver's buffer is cut into consecutive *output splits*; split ``j`` comes from
rank ``src_index[j]``. Splits of one source arrive in the order in which that source holds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.scalars import as_int
from magi_attention.errors import ContractError


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Arguments of a group cast for ``rank`` of ``world`` ranks; all sizes in rows (tokens)."""

    rank: int
    world: int
    input_splits: tuple[int, ...]
    dst_indices: tuple[tuple[int, ...], ...]
    output_splits: tuple[int, ...]
    src_index: tuple[int, ...]

    @classmethod
    def make(
        cls,
        rank: int,
        world: int,
        input_splits: Sequence[int],
        dst_indices: Sequence[Sequence[int]],
        output_splits: Sequence[int],
        src_index: Sequence[int],
    ) -> GroupSpec:
        """Copies the lists to tuples and checks them; ``ContractError`` names the first fault."""
        spec = cls(
            rank,
            world,
            tuple(as_int(n, "An input split") for n in input_splits),
            tuple(tuple(as_int(r, "A rank in dst_indices") for r in dst) for dst in dst_indices),
            tuple(as_int(n, "An output split") for n in output_splits),
            tuple(as_int(r, "A rank in src_index") for r in src_index),
        )
        spec.check()
        return spec

    @property
    def input_rows(self) -> int:
        return sum(self.input_splits)

    @property
    def output_rows(self) -> int:
        return sum(self.output_splits)

    def check(self) -> None:
        if len(self.input_splits) != len(self.dst_indices):
            raise ContractError(
                f"{len(self.input_splits)} input splits but {len(self.dst_indices)} destination lists; "
                "give one list of ranks (possibly empty) per input split."
            )
        if len(self.output_splits) != len(self.src_index):
            raise ContractError(
                f"{len(self.output_splits)} output splits but {len(self.src_index)} source ranks; "
                "give one source rank per output split."
            )
        if any(n < 0 for n in self.input_splits + self.output_splits):
            raise ContractError("A split size is negative; sizes are row counts >= 0.")
        for dsts in self.dst_indices:
            if len(set(dsts)) != len(dsts) or any(not 0 <= r < self.world for r in dsts):
                raise ContractError(
                    f"Destination list {list(dsts)} repeats a rank or leaves 0..{self.world - 1}; "
                    "list each destination of a split once."
                )
        if any(not 0 <= r < self.world for r in self.src_index):
            raise ContractError(f"A source rank lies outside 0..{self.world - 1}.")


def rows_per_rank(
    splits: Sequence[int], ranks_of_split: Sequence[Sequence[int]], world: int
) -> list[NDArray[np.int64]]:
    """For every rank, the row numbers of the splits whose list names it, in order."""
    bounds = np.concatenate([[0], np.cumsum(np.asarray(splits, dtype=np.int64))])
    parts: list[list[NDArray[np.int64]]] = [[] for _ in range(world)]
    for i, ranks in enumerate(ranks_of_split):
        for r in ranks:
            parts[r].append(np.arange(bounds[i], bounds[i + 1]))
    return [np.concatenate(p) if p else np.zeros(0, np.int64) for p in parts]


def rows_per_source(spec: GroupSpec) -> list[NDArray[np.int64]]:
    """For every rank the rows of the output that come from it, in order."""
    return rows_per_rank(spec.output_splits, [(s,) for s in spec.src_index], spec.world)
