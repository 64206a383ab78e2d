# SPDX-License-Identifier: Apache-2.0
"""``AttnRange``: one half-open interval of integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from magi_attention.errors import RangeError

NaiveRange = tuple[int, int]


class AttnRange:
    """Half-open interval ``[start, end)`` of token positions; bounds may be negative, ``start <= end``.

    ``start`` and ``end`` can be set; every other method leaves the object alone and returns new ones. The
    hash follows the bounds, so do not change a range that is a dictionary key.

    Raises:
        RangeError: ``start > end``, at construction or when a bound is set.
    """

    __slots__ = ("_start", "_end")

    def __init__(self, start: int, end: int) -> None:
        self._set(start, end)

    def _set(self, start: int, end: int) -> None:
        if start > end:
            raise RangeError(f"[{start}, {end}) is no range; give start <= end.")
        self._start, self._end = int(start), int(end)

    @property
    def start(self) -> int:
        return self._start

    @start.setter
    def start(self, value: int) -> None:
        self._set(value, self._end)

    @property
    def end(self) -> int:
        return self._end

    @end.setter
    def end(self, value: int) -> None:
        self._set(self._start, value)

    @property
    def seqlen(self) -> int:
        return self._end - self._start

    # ---- conversion -------------------------------------------------------------------------------

    @staticmethod
    def from_range(attn_range: AttnRange | Sequence[int], check: bool = False) -> AttnRange:
        """A new range from ``(start, end)`` or another range; validity is always checked."""
        start, end = attn_range
        return AttnRange(start, end)

    def to_naive_range(self) -> NaiveRange:
        return self._start, self._end

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
        low, high = self._start, self._end
        if start is not None:
            low, high = max(low, start), max(high, start)
        if end is not None:
            low, high = min(low, end), min(high, end)
        return AttnRange(low, high)

    def intersect(self, other: AttnRange) -> AttnRange:
        """What both hold; an empty range if nothing."""
        start = max(self._start, other._start)
        return AttnRange(start, max(start, min(self._end, other._end)))

    def intersect_size(self, other: AttnRange) -> int:
        return self.intersect(other).seqlen

    def union(self, other: AttnRange) -> list[AttnRange]:
        """One range if they overlap, touch or one is empty, else both in ascending order."""
        if other.is_empty():
            return [self.clone()]
        if self.is_empty():
            return [other.clone()]
        first, second = sorted((self, other), key=AttnRange.to_naive_range)
        if first._end >= second._start:
            return [AttnRange(first._start, max(first._end, second._end))]
        return [first.clone(), second.clone()]

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
        return other._start <= self._start and self._end <= other._end

    def is_overlap_with(self, other: AttnRange) -> bool:
        """Do the two share a position?"""
        return max(self._start, other._start) < min(self._end, other._end)

    def is_empty(self) -> bool:
        return self._start == self._end

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
            low = self._start if start is None else start
            raise RangeError(f"[{low}, {self._end if end is None else end}) is no range; give start <= end.")

    # ---- protocol of values -----------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        """Unpacks as ``start, end``."""
        yield self._start
        yield self._end

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

    def __reduce__(self):
        return AttnRange, (self._start, self._end)
