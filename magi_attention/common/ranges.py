# SPDX-License-Identifier: Apache-2.0
"""``AttnRanges``: a list of half-open intervals, and the algebra of the sets that they cover."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.intervals import intersect_intervals, merge_intervals, subtract_intervals
from magi_attention.common.list_like import ListLike
from magi_attention.common.range import AttnRange, NaiveRange, RangeType
from magi_attention.errors import ContractError, RangeError

if TYPE_CHECKING:
    import torch

NaiveRanges: TypeAlias = Sequence[NaiveRange]


def is_valid_cu_seqlens(cu_seqlens: Sequence[int], seq_len: int) -> bool:
    """Does ``cu_seqlens`` start at 0, strictly increase and end at ``seq_len``? An empty list is valid, too."""
    if len(cu_seqlens) == 0:
        return True
    rising = all(a < b for a, b in pairwise(cu_seqlens))
    return cu_seqlens[0] == 0 and rising and cu_seqlens[-1] == seq_len


def check_valid_cu_seqlens(cu_seqlens: Sequence[int], seq_len: int) -> None:
    """``ContractError`` (a ``ValueError``) unless ``is_valid_cu_seqlens``."""
    if not is_valid_cu_seqlens(cu_seqlens, seq_len):
        raise ContractError(
            f"cu_seqlens {list(cu_seqlens)[:16]} must start at 0, strictly increase and end at {seq_len}."
        )


class AttnRanges(ListLike[AttnRange]):
    """List of ``AttnRange`` in any order; they may repeat, overlap and be empty.

    Only ``append``, ``insert``, ``extend``, ``pop`` and item assignment change the object. They keep the very
    ranges that they are given, which ``check`` asks to be valid now; methods that use positions raise
    ``RangeError`` for one that is not. Sets are meant where the text says "covers".
    """

    __slots__ = ()

    # ---- build ------------------------------------------------------------------------------------

    @staticmethod
    def from_ranges(ranges: RangesType | Iterable[RangeType], check: bool = False) -> AttnRanges:
        """New object with new ranges, from pairs, ranges or another ``AttnRanges``."""
        return AttnRanges._of(AttnRange.from_range(r, check) for r in ranges)

    @staticmethod
    def from_cu_seqlens(cu_seqlens: Sequence[int], seq_len: int) -> AttnRanges:
        """``[cu[i], cu[i + 1])`` for all i, none for an empty list; ``ContractError`` if invalid for ``seq_len``."""
        check_valid_cu_seqlens(cu_seqlens, seq_len)
        return AttnRanges.from_ranges(pairwise(cu_seqlens))

    @staticmethod
    def from_array(array: NDArray[np.integer]) -> AttnRanges:
        """From integers of shape ``(n, 2)``."""
        return AttnRanges.from_ranges(array.reshape(-1, 2).tolist())

    def to_array(self) -> NDArray[np.int64]:
        """int64 ``(n, 2)``, a copy."""
        flat = [bound for r in self._items for bound in r]
        return np.array(flat, dtype=np.int64).reshape(-1, 2)

    def clone(self) -> AttnRanges:
        """Deep copy."""
        return AttnRanges.from_ranges(self._items)

    def append(self, attn_range: AttnRange, check: bool = False) -> None:
        self._items.append(self._item(attn_range, check))

    def insert(self, idx: int, attn_range: AttnRange, check: bool = False) -> None:
        self._items.insert(idx, self._item(attn_range, check))

    def extend(self, attn_ranges: AttnRanges | Iterable[AttnRange], check: bool = False) -> None:
        self._items.extend([self._item(r, check) for r in attn_ranges])

    def pop(self, idx: int = -1) -> AttnRange:
        return self._items.pop(idx)

    @staticmethod
    def _item(value: RangeType, check: bool = False) -> AttnRange:
        attn_range = value if isinstance(value, AttnRange) else AttnRange.from_range(value)
        if check:
            attn_range.check_valid()
        return attn_range

    # ---- normal forms (new objects) ---------------------------------------------------------------

    def clear_empty(self) -> AttnRanges:
        """Without empty ranges, in the same order."""
        return AttnRanges.from_ranges(r for r in self._items if not r.is_empty())

    def sort(self) -> AttnRanges:
        """Ordered by start, then end."""
        ordered = sorted(self._items, key=AttnRange.to_naive_range)
        return AttnRanges.from_ranges(ordered)

    def merge(self) -> AttnRanges:
        """The least list that covers the same: sorted, none empty, none overlapping or touching."""
        return AttnRanges.from_array(merge_intervals(self.to_array()))

    def merge_with_split_alignment(self, split_alignment: int = 1) -> AttnRanges:
        """Every bound moved outward to a multiple of ``split_alignment``, then merged; no empty ranges."""
        if split_alignment < 1:
            raise ContractError(f"split_alignment is {split_alignment}; give at least 1.")
        array = self.to_array()
        array = array[array[:, 1] > array[:, 0]]
        array[:, 0] = array[:, 0] // split_alignment * split_alignment
        array[:, 1] = -(-array[:, 1] // split_alignment) * split_alignment
        return AttnRanges.from_array(merge_intervals(array))

    def chunk(self, chunk_size: int, check: bool = True) -> list[AttnRanges]:
        """Consecutive groups of ``chunk_size`` tokens in stored order; the last may be shorter.

        Raises:
            ContractError: chunk_size < 1, or ``check`` and two ranges overlap.
        """
        if chunk_size < 1:
            raise ContractError(f"chunk_size is {chunk_size}; give at least 1 token.")
        if check and not self.is_non_overlap():
            raise ContractError(f"Chunks are cut from non-overlapping ranges; merge() {self!r} first.")
        chunks: list[AttnRanges] = []
        room = 0
        for attn_range in self._items:
            start, end = attn_range.to_naive_range()
            while start < end:
                if room == 0:
                    chunks.append(AttnRanges())
                    room = chunk_size
                stop = min(end, start + room)
                chunks[-1]._items.append(AttnRange(start, stop))
                room -= stop - start
                start = stop
        return chunks

    def truncate(self, start: int | None = None, end: int | None = None) -> AttnRanges:
        """What lies in ``[start, end)``, in the same order; ranges without any position in it are dropped."""
        clipped = (r.truncate(start, end) for r in self._items)
        return AttnRanges.from_ranges(r for r in clipped if not r.is_empty())

    # ---- predicates -------------------------------------------------------------------------------

    def is_valid(self) -> bool:
        return all(r.is_valid_close() for r in self._items)

    def check_valid(self) -> None:
        """``RangeError`` unless ``is_valid``."""
        if not self.is_valid():
            raise RangeError(f"Some of the ranges {self!r} have start > end; give start <= end.")

    def is_sorted(self) -> bool:
        """Ordered by start, then end."""
        return all(a <= b for a, b in pairwise(self.to_naive_ranges()))

    def is_merged(self) -> bool:
        """Sorted, none empty, none overlapping or touching."""
        bounds = self.to_naive_ranges()
        gaps = all(end < start for (_, end), (start, _) in pairwise(bounds))
        return gaps and all(start < end for start, end in bounds)

    def is_non_overlap(self) -> bool:
        """Is no position covered twice?"""
        return self.total_seqlen == self.union_size()

    def is_cu_seqlens(self, seqlen: int) -> bool:
        """Are these consecutive non-empty ranges from 0 to ``seqlen``?"""
        pairs = self.to_naive_ranges()
        bounds = [0, *(end for _, end in pairs)]
        if any(start != bound for (start, _), bound in zip(pairs, bounds)):
            return False
        return is_valid_cu_seqlens(bounds, seqlen)

    # ---- coordinates ------------------------------------------------------------------------------

    def make_range_local(
        self,
        other_attn_range: AttnRange,
        is_self_merged: bool = False,
        prefix_offset: Sequence[int] | None = None,
    ) -> tuple[AttnRange, AttnRange]:
        """Where ``other_attn_range`` lies in the buffer that packs the merged ranges one after another.

        Args:
            other_attn_range: a global range inside one of the merged ranges.
            is_self_merged: the caller knows that ``self`` is merged.
            prefix_offset: buffer offset of each merged range, if known.
        Returns:
            (local range, the merged range that covers it).
        Raises:
            RangeError: (a ``ValueError``) it is not inside one merged range.
        """
        merged = self if is_self_merged else self.merge()
        if prefix_offset is None:
            prefix_offset = merged._prefix_offsets()
        return merged._localize(other_attn_range, [r.start for r in merged._items], prefix_offset)

    def make_ranges_local(self, other_attn_ranges: AttnRanges, is_self_merged: bool = False) -> AttnRanges:
        """``make_range_local`` for many ranges; only the local ranges are returned."""
        merged = self if is_self_merged else self.merge()
        starts, offsets = [r.start for r in merged._items], merged._prefix_offsets()
        return AttnRanges._of(merged._localize(r, starts, offsets)[0] for r in other_attn_ranges)

    def _prefix_offsets(self) -> list[int]:
        return list(accumulate((r.seqlen for r in self._items), initial=0))[:-1]

    def _localize(
        self, attn_range: AttnRange, starts: Sequence[int], offsets: Sequence[int]
    ) -> tuple[AttnRange, AttnRange]:
        index = bisect_right(starts, attn_range.start) - 1
        if index < 0 or not attn_range.is_subrange_of(self._items[index]):
            raise RangeError(
                f"The attn_range {attn_range!r} is not inside one of {self!r}; cut it at their bounds first."
            )
        host = self._items[index]
        return attn_range.offset(offsets[index] - host.start), host.clone()

    # ---- sets -------------------------------------------------------------------------------------

    def find_hole_ranges(
        self, other_attn_ranges: AttnRanges, is_self_merged: bool = False, is_other_merged: bool = False
    ) -> AttnRanges:
        """What ``self`` covers and ``other`` does not, merged. The flags are hints and change nothing."""
        return AttnRanges.from_array(subtract_intervals(self.to_array(), other_attn_ranges.to_array()))

    def find_overlap_ranges(
        self, other_attn_ranges: AttnRanges, is_self_merged: bool = False, is_other_merged: bool = False
    ) -> AttnRanges:
        """What both cover, merged. The flags are hints and change nothing."""
        both = intersect_intervals(self.to_array(), other_attn_ranges.to_array())
        return AttnRanges.from_array(merge_intervals(both))

    def intersect_size(self) -> int:
        """How much the ranges overlap each other: ``total_seqlen - union_size()``."""
        return self.total_seqlen - self.union_size()

    def intersect_size_with(self, other: AttnRanges) -> int:
        """Number of positions that both cover."""
        return self.find_overlap_ranges(other).total_seqlen

    def union_size(self) -> int:
        """Number of positions covered."""
        return self.merge().total_seqlen

    def union_size_with(self, other: AttnRanges) -> int:
        """Number of positions that at least one covers (the published function adds the lengths of all ranges)."""
        return self.union_size() + other.union_size() - self.intersect_size_with(other)

    # ---- conversion -------------------------------------------------------------------------------

    def to_tensor(self, device: torch.device | str | int = "cpu") -> torch.Tensor:
        """int32 tensor ``(n, 2)``."""
        import torch

        return torch.tensor(self.to_array(), dtype=torch.int32, device=device)

    def to_naive_ranges(self) -> list[tuple[int, int]]:
        return [r.to_naive_range() for r in self._items]

    def to_cu_seqlens(self, seq_len: int) -> list[int]:
        """``ContractError`` unless ``is_cu_seqlens(seq_len)``."""
        if not self.is_cu_seqlens(seq_len):
            raise ContractError(f"Ranges {self!r} do not run from 0 to {seq_len}; sort or fill them.")
        return [0, *(r.end for r in self._items)]

    # ---- properties -------------------------------------------------------------------------------

    @property
    def total_seqlen(self) -> int:
        """Sum of the lengths."""
        return sum(r.seqlen for r in self._items)

    @property
    def max_seqlen(self) -> int:
        """Largest length, 0 if there are no ranges."""
        return max((r.seqlen for r in self._items), default=0)

    @property
    def start(self) -> int:
        """Smallest start; ``ValueError`` if there are no ranges."""
        self._need_ranges("start")
        return min(start for start, _ in self._items)

    @property
    def end(self) -> int:
        """Largest end; ``ValueError`` if there are no ranges."""
        self._need_ranges("end")
        return max(end for _, end in self._items)

    def _need_ranges(self, what: str) -> None:
        if not self._items:
            raise RangeError(f"AttnRanges without ranges has no {what}; append a range first.")

    @property
    def points(self) -> list[int]:
        """Distinct bounds in ascending order."""
        return sorted({bound for r in self._items for bound in r})

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self._items))}]" if self._items else "[[,)]"

    def __getstate__(self) -> list[tuple[int, int]]:
        return self.to_naive_ranges()

    def __setstate__(self, state: list[tuple[int, int]]) -> None:
        self._items = [AttnRange(*pair) for pair in state]


RangesType: TypeAlias = AttnRanges | NaiveRanges
