# SPDX-License-Identifier: Apache-2.0
"""``AttnRectangles``: a list of ``AttnRectangle``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.disjoint import check_disjoint
from magi_attention.common.enum import AttnMaskType
from magi_attention.common.list_like import ListLike
from magi_attention.common.range import AttnRange
from magi_attention.common.ranges import AttnRanges, NaiveRanges
from magi_attention.common.slices import SliceTable, trim
from magi_attention.compat.values.rectangle import AttnRectangle
from magi_attention.errors import ContractError

Sides = tuple[AttnRectangle | None, AttnRectangle | None]


class AttnRectangles(ListLike[AttnRectangle]):
    """List-like. Only ``append``, ``extend``, ``clear`` and item assignment change it; the rest returns new objects."""

    __slots__ = ()

    @staticmethod
    def from_ranges(
        q_ranges: AttnRanges | NaiveRanges | Iterable[AttnRange],
        k_ranges: AttnRanges | NaiveRanges | Iterable[AttnRange],
        mask_types: Sequence[AttnMaskType | int | str] | AttnMaskType | int | str,
        check: bool = False,
    ) -> AttnRectangles:
        """One rectangle per slice that holds a pair; ``check`` also demands that no two share one.

        Raises:
            ContractError: the lists differ in length, or ``check`` and two slices overlap.
        """
        table = SliceTable.from_ranges(q_ranges, k_ranges, mask_types)
        if check:
            check_disjoint(table)
        out = AttnRectangles()
        for row in table.array.tolist():
            if len(trim(np.array([row]))):
                q_range, k_range = AttnRange(*row[0:2]), AttnRange(*row[2:4])
                out._items.append(AttnRectangle(q_range, k_range, mask_type=row[4]))
        return out

    # ---- container --------------------------------------------------------------------------------

    def append(self, attn_rect: AttnRectangle, check: bool = False) -> None:
        if check:
            attn_rect.check_valid()
        self._items.append(attn_rect)

    def extend(self, attn_rects: AttnRectangles | Iterable[AttnRectangle], check: bool = False) -> None:
        for rect in list(attn_rects):
            self.append(rect, check)

    def clear(self) -> None:
        self._items.clear()

    def clone(self) -> AttnRectangles:
        return self._of(rect.clone() for rect in self._items)

    def is_valid(self) -> bool:
        return all(rect.is_valid() for rect in self._items)

    def check_valid(self) -> None:
        """``RangeError`` if one of them holds no pair or has an invalid range."""
        for rect in self._items:
            rect.check_valid()

    # ---- geometry ---------------------------------------------------------------------------------

    def area(self) -> int:
        """Sum of the areas."""
        return sum(rect.area() for rect in self._items)

    def to_slices(self) -> NDArray[np.int64]:
        """AttnSlices of all rectangles, int64 ``(n, 5)``."""
        parts = [rect.to_slices() for rect in self._items]
        return np.concatenate([np.zeros((0, 5), dtype=np.int64), *parts])

    def get_qo_ranges_union(self) -> AttnRanges:
        """Merged q ranges."""
        return AttnRanges.from_ranges(rect.q_range for rect in self._items).merge()

    def get_kv_ranges_union(self) -> AttnRanges:
        """Merged k ranges."""
        return AttnRanges.from_ranges(rect.k_range for rect in self._items).merge()

    def total_seqlen_qo(self) -> int:
        """Number of rows in the union of the q ranges."""
        return self.get_qo_ranges_union().total_seqlen

    def total_seqlen_kv(self) -> int:
        """Number of keys in the union of the k ranges."""
        return self.get_kv_ranges_union().total_seqlen

    def cut_q(self, cut_pos: int) -> tuple[AttnRectangles, AttnRectangles]:
        """Rows before ``cut_pos`` and from it on."""
        return self._cut(lambda rect: rect.cut_q(cut_pos))

    def cut_k(self, cut_pos: int) -> tuple[AttnRectangles, AttnRectangles]:
        """Keys before ``cut_pos`` and from it on."""
        return self._cut(lambda rect: rect.cut_k(cut_pos))

    def _cut(self, cut: Callable[[AttnRectangle], Sides]) -> tuple[AttnRectangles, AttnRectangles]:
        pairs = [cut(rect) for rect in self._items]
        return (
            self._of(first for first, _ in pairs if first is not None),
            self._of(second for _, second in pairs if second is not None),
        )

    def get_rects_within_q_segment(self, q_start: int, q_end: int) -> AttnRectangles:
        """What lies in rows ``[q_start, q_end)``."""
        found = (rect.get_rect_within_q_segment(q_start, q_end) for rect in self._items)
        return self._of(rect for rect in found if rect is not None)

    def get_rects_within_k_segment(self, k_start: int, k_end: int) -> AttnRectangles:
        """What lies in keys ``[k_start, k_end)``."""
        found = (rect.get_rect_within_k_segment(k_start, k_end) for rect in self._items)
        return self._of(rect for rect in found if rect is not None)

    @staticmethod
    def _item(value: Any) -> AttnRectangle:
        if not isinstance(value, AttnRectangle):
            raise ContractError(f"{value!r} is no rectangle; assign AttnRectangle objects.")
        return value

    def __repr__(self) -> str:
        return f"[{'; '.join(map(repr, self._items))}]" if self._items else "[-1, -1) x [-1, -1): None"
