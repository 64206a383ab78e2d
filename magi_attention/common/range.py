# SPDX-License-Identifier: Apache-2.0
"""``AttnRange``: one half-open interval of integers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from magi_attention.common.scalars import as_int
from magi_attention.errors import RangeError

NaiveRange: TypeAlias = tuple[int, int] | list[int]


class AttnRange:
    """Half-open interval ``[start, end)`` of token positions; bounds may be negative, ``start <= end``.

    ``start`` and ``end`` can be set, in either order: only the use of a range asks whether it is valid. Every
    method leaves the object alone and returns new ones. The hash follows the bounds, so do not change a range
    that is a dictionary key.

    Raises:
        RangeError: ``start > end``, at construction or when a method needs the positions.
        ContractError: a bound is no integer.
    """

    __slots__ = ("_start", "_end")

    def __init__(self, start: int, end: int) -> None:
        self._start, self._end = as_int(start, "start"), as_int(end, "end")
        self.check_valid()

    @property
    def start(self) -> int:
        return self._start

    @start.setter
    def start(self, value: int) -> None:
        self._start = as_int(value, "start")

    @property
    def end(self) -> int:
        return self._end

    @end.setter
    def end(self, value: int) -> None:
        self._end = as_int(value, "end")

    @property
    def seqlen(self) -> int:
        """Number of positions."""
        start, end = self._bounds()
        return end - start

    def _bounds(self) -> tuple[int, int]:
        """``(start, end)`` for a method that uses the positions."""
        if self._start > self._end:
            raise RangeError(_invalid(self._start, self._end))
        return self._start, self._end

    # ---- conversion -------------------------------------------------------------------------------

    @staticmethod
    def from_range(attn_range: RangeType, check: bool = False) -> AttnRange:
        """A new range from ``(start, end)`` or another range; validity is always checked."""
        start, end = attn_range
        return AttnRange(start, end)

    def to_naive_range(self) -> tuple[int, int]:
        return self._bounds()

    def clone(self) -> AttnRange:
        return AttnRange(self._start, self._end)

    # ---- new ranges -------------------------------------------------------------------------------

    def offset(self, offset: int) -> AttnRange:
        """Shifted by ``offset``."""
        return AttnRange(self._start + offset, self._end + offset)

    def truncate(self, start: int | None = None, end: int | None = None) -> AttnRange:
        """Clipped to ``[start, end)``; None leaves that side open. The result may be empty."""
        if start is not None and end is not None and start > end:
            raise RangeError(f"The window [{start}, {end}) is no range; give start <= end.")
        low, high = self._bounds()
        if start is not None:
            low, high = max(low, start), max(high, start)
        if end is not None:
            low, high = min(low, end), min(high, end)
        return AttnRange(low, high)

    def intersect(self, other: AttnRange) -> AttnRange:
        """What both hold; an empty range if nothing."""
        (a0, a1), (b0, b1) = self._bounds(), other._bounds()
        start = max(a0, b0)
        return AttnRange(start, max(start, min(a1, b1)))

    def intersect_size(self, other: AttnRange) -> int:
        return self.intersect(other).seqlen

    def union(self, other: AttnRange) -> list[AttnRange]:
        """One range if the two share a position, else both as they are, an empty one included."""
        if not self.is_overlap_with(other):
            return [self.clone(), other.clone()]
        return [AttnRange(min(self._start, other._start), max(self._end, other._end))]

    def union_size(self, other: AttnRange) -> int:
        return self.seqlen + other.seqlen - self.intersect_size(other)

    def diff_by(self, other: AttnRange) -> list[AttnRange]:
        """The pieces of ``other`` that ``self`` does not cover (mind the direction), none of them empty."""
        if self.intersect_size(other) == 0:
            return [] if other.is_empty() else [other.clone()]
        pieces = []
        if other._start < self._start:
            pieces.append(AttnRange(other._start, self._start))
        if self._end < other._end:
            pieces.append(AttnRange(self._end, other._end))
        return pieces

    # ---- predicates -------------------------------------------------------------------------------

    def is_subrange_of(self, other: AttnRange) -> bool:
        (a0, a1), (b0, b1) = self._bounds(), other._bounds()
        return b0 <= a0 and a1 <= b1

    def is_overlap_with(self, other: AttnRange) -> bool:
        """Do the two share a position?"""
        (a0, a1), (b0, b1) = self._bounds(), other._bounds()
        return max(a0, b0) < min(a1, b1)

    def is_empty(self) -> bool:
        return self.seqlen == 0

    def is_valid_close(self, start: int | None = None, end: int | None = None) -> bool:
        """``start <= end``, with own bounds where none are given."""
        low = self._start if start is None else start
        return low <= (self._end if end is None else end)

    def is_valid_open(self, start: int | None = None, end: int | None = None) -> bool:
        """``start < end``, with own bounds where none are given."""
        low = self._start if start is None else start
        return low < (self._end if end is None else end)

    def check_valid(self, start: int | None = None, end: int | None = None) -> None:
        """``RangeError`` unless ``is_valid_close``."""
        if not self.is_valid_close(start, end):
            raise RangeError(_invalid(self._start if start is None else start, self._end if end is None else end))

    # ---- protocol of values -----------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        """Unpacks as ``start, end``."""
        return iter(self._bounds())

    def __len__(self) -> int:
        return self.seqlen

    def __bool__(self) -> bool:
        return True  # an empty range is still a range; use is_empty()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AttnRange) and self._start == other._start and self._end == other._end

    def __hash__(self) -> int:
        return hash((self._start, self._end))

    def __repr__(self) -> str:
        return f"[{self._start}, {self._end})"

    def __reduce__(self) -> tuple[type[AttnRange], tuple[int, int]]:
        return AttnRange, (self._start, self._end)


RangeType: TypeAlias = AttnRange | NaiveRange


def _invalid(start: int, end: int) -> str:
    return f"[{start}, {end}) is no range; give start <= end."
