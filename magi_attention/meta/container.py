# SPDX-License-Identifier: Apache-2.0
"""Slices grouped by chunk and by rank, as the published API shows them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from magi_attention.common.enum import AttnMaskType
from magi_attention.common.range import AttnRange
from magi_attention.common.ranges import AttnRanges
from magi_attention.common.slices import areas
from magi_attention.meta.solver.dispatch_solver import IOUAffinity


@dataclass
class AttnSlice:
    """One rectangle with a mask type, in global coordinates."""

    q_range: AttnRange
    k_range: AttnRange
    mask_type: AttnMaskType = AttnMaskType.FULL
    slice_id: int | None = None

    @classmethod
    def from_row(cls, row, slice_id: int | None = None) -> AttnSlice:
        q0, q1, k0, k1, kind = (int(x) for x in row)
        return cls(AttnRange(q0, q1), AttnRange(k0, k1), AttnMaskType.from_int_type(kind), slice_id)

    def to_row(self) -> list[int]:
        kind = self.mask_type.to_int_type()
        return [self.q_range.start, self.q_range.end, self.k_range.start, self.k_range.end, kind]

    @property
    def area(self) -> int:
        """Allowed pairs."""
        return int(areas(np.array([self.to_row()], dtype=np.int64))[0])


@dataclass
class MultiKAttnSlice:
    """Several slices that share one q range."""

    q_range: AttnRange
    k_ranges: AttnRanges
    mask_types: list[AttnMaskType]
    slice_id: int | None = None

    @property
    def attn_slices(self) -> list[AttnSlice]:
        return [AttnSlice(self.q_range, k, t, self.slice_id) for k, t in zip(self.k_ranges, self.mask_types)]

    @property
    def area(self) -> int:
        return sum(s.area for s in self.attn_slices)


@dataclass
class AttnChunk:
    """What one chunk of queries attends to; ``sample_ids[i]`` is the input slice behind ``q_slices[i]``."""

    chunk_id: int
    q_slices: list[AttnSlice] = field(default_factory=list)
    sample_ids: list[int] = field(default_factory=list)

    @property
    def attn_slices(self) -> list[AttnSlice]:
        return self.q_slices

    @property
    def area(self) -> int:
        return sum(s.area for s in self.q_slices)

    @property
    def q_ranges(self) -> AttnRanges:
        return AttnRanges.from_ranges([s.q_range for s in self.q_slices])

    @property
    def k_ranges(self) -> AttnRanges:
        return AttnRanges.from_ranges([s.k_range for s in self.q_slices])

    def iou_with(self, other: AttnChunk) -> float:
        """Shared keys over all keys of both, 0 if neither has any."""
        mine, theirs = self.k_ranges.merge(), other.k_ranges.merge()
        union = mine.union_size_with(theirs)
        return mine.intersect_size_with(theirs) / union if union else 0.0


@dataclass
class AttnBucket:
    """The chunks of one rank, or of all ranks (``cp_rank`` None)."""

    cp_rank: int | None = None
    q_chunks: list[AttnChunk] = field(default_factory=list)

    @property
    def attn_slices(self) -> list[AttnSlice]:
        return [s for chunk in self.q_chunks for s in chunk.q_slices]

    @property
    def areas(self) -> list[int]:
        return [chunk.area for chunk in self.q_chunks]

    @property
    def area(self) -> int:
        return sum(self.areas)

    @property
    def q_ranges(self) -> AttnRanges:
        return AttnRanges.from_ranges([s.q_range for s in self.attn_slices])

    @property
    def k_ranges(self) -> AttnRanges:
        return AttnRanges.from_ranges([s.k_range for s in self.attn_slices])

    @property
    def iou(self) -> float:
        """Mean IOU of the key sets of all pairs of chunks; 1 for fewer than two chunks."""
        pairs = [a.iou_with(b) for i, a in enumerate(self.q_chunks) for b in self.q_chunks[i + 1 :]]
        return sum(pairs) / len(pairs) if pairs else 1.0

    def iou_with(self, other: AttnBucket) -> float:
        """Shared keys of both buckets over all keys of both."""
        mine, theirs = IOUAffinity(self._k_pairs()), IOUAffinity(other._k_pairs())
        shared = -mine.distance_to(theirs)
        mine.update(theirs)
        total = -mine.distance_to(mine)
        return shared / total if total else 0.0

    def _k_pairs(self) -> list[tuple[int, int]]:
        return [(s.k_range.start, s.k_range.end) for s in self.attn_slices]
