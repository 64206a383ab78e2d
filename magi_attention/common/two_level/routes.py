# SPDX-License-Identifier: Apache-2.0
"""Where the rows of a group cast go, whatever carries them there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.group_spec import GroupSpec, rows_per_rank, rows_per_source
from magi_attention.errors import ContractError

Rows = NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class Routes:
    """Where the rows of a cast go, those of all ranks. ``needed[s][d]``: rows of s that d needs, each once;
    ``placed[d][s]``: where in its output these go, in the same order. ``group_ends[d]``: where the groups of its output
    end, ascending; the last of them is group 0. Without them all rows are of one group."""

    input_rows: Sequence[int]
    output_rows: Sequence[int]
    needed: Sequence[Sequence[Rows]]
    placed: Sequence[Sequence[Rows]]
    group_ends: Sequence[Rows] | None = None

    @classmethod
    def of_specs(cls, specs: Sequence[GroupSpec], group_ends: Sequence[Rows] | None = None) -> Routes:
        """For the casts ``specs`` of all ranks, in rank order.

        Raises:
            ContractError: two ranks disagree about how many rows pass between them.
        """
        needed = [rows_per_rank(spec.input_splits, spec.dst_indices, spec.world) for spec in specs]
        placed = [rows_per_source(spec) for spec in specs]
        for s, row in enumerate(needed):
            for d, rows in enumerate(row):
                if rows.size != placed[d][s].size:
                    raise ContractError(
                        f"Rank {s} sends {rows.size} rows to rank {d}, which expects {placed[d][s].size}; the "
                        "specs do not belong together."
                    )
        return cls([s.input_rows for s in specs], [s.output_rows for s in specs], needed, placed, group_ends)

    def group_of(self, rank: int, places: Rows) -> Rows:
        """The group of each of these places of the output of ``rank``."""
        if self.group_ends is None:
            return np.zeros(places.size, np.int64)
        ends = self.group_ends[rank]
        groups: Rows = len(ends) - 1 - np.searchsorted(ends, places, side="right")
        return groups

    def by_group(self) -> tuple[list[list[Rows]], list[list[Rows]]]:
        """``needed`` and ``placed``, group by group, in each ascending."""
        needed, placed = [list(rows) for rows in self.needed], [list(rows) for rows in self.placed]
        if self.group_ends is not None:
            for s, of_source in enumerate(needed):
                for d, rows in enumerate(of_source):
                    order = np.lexsort((rows, self.group_of(d, placed[d][s])))
                    needed[s][d], placed[d][s] = rows[order], placed[d][s][order]
        return needed, placed
