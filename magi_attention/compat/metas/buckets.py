# SPDX-License-Identifier: Apache-2.0
"""Slices grouped by chunk and by rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from magi_attention.common.enum import AttnMaskType
from magi_attention.common.range import AttnRange
from magi_attention.common.ranges import AttnRanges
from magi_attention.common.slices import areas
from magi_attention.errors import ContractError


@dataclass
class AttnSlice:
    """One rectangle with a mask type, in global coordinates. Fields and their order are the published ones.

    ``area`` is computed when it is first asked for, unless it was set. It takes no part in equality.
    """

    slice_id: int | None = None
    mask_type: AttnMaskType | None = None
    q_range: AttnRange | None = None
    k_range: AttnRange | None = None
    _area: int | None = field(default=None, compare=False, repr=False)

    @classmethod
    def from_row(cls, row: Iterable[int], slice_id: int | None = None) -> AttnSlice:
        q0, q1, k0, k1, kind = (int(x) for x in row)
        return cls(slice_id, AttnMaskType.from_int_type(kind), AttnRange(q0, q1), AttnRange(k0, k1))

    def to_row(self) -> list[int]:
        """``[q_start, q_end, k_start, k_end, type]``; ``ContractError`` for an unknown type or a range that is None."""
        if self.q_range is None or self.k_range is None:
            raise ContractError(f"{self!r} lacks a range; give q_range and k_range.")
        return [*self.q_range, *self.k_range, _type_of_slice(self.mask_type).to_int_type()]

    @property
    def area(self) -> int:
        """Allowed pairs."""
        if self._area is None:
            self._area = int(areas(np.array([self.to_row()], dtype=np.int64))[0])
        return self._area

    @area.setter
    def area(self, area: int) -> None:
        self._area = area

    def iou_with(self, other: AttnSlice) -> float:
        """Shared keys over all keys of both, 0 if neither has any."""
        if self.k_range is None or other.k_range is None:
            raise ContractError("A slice without k_range has no keys to compare; give k_range.")
        union = self.k_range.union_size(other.k_range)
        return self.k_range.intersect_size(other.k_range) / union if union else 0.0


def _type_of_slice(mask_type: object) -> AttnMaskType:
    try:
        return AttnMaskType.of(mask_type)
    except ContractError as error:
        raise ContractError(f"Only supported mask types have an area. {error}") from None


def _given(attn_range: AttnRange | None, name: str) -> AttnRange:
    if attn_range is None:
        raise ContractError(f"A slice lacks {name}; give it.")
    return attn_range


@dataclass
class MultiKAttnSlice:
    """Several slices that share one q range. ``ContractError`` unless there is one mask type per k range."""

    q_range: AttnRange
    k_ranges: AttnRanges
    mask_types: list[AttnMaskType]
    slice_id: int | None = None
    _area: int | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.mask_types) != len(self.k_ranges):
            raise ContractError(f"{len(self.mask_types)} mask types for {len(self.k_ranges)} k ranges; give one each.")

    @property
    def attn_slices(self) -> list[AttnSlice]:
        return [AttnSlice(self.slice_id, t, self.q_range, k) for k, t in zip(self.k_ranges, self.mask_types)]

    @property
    def area(self) -> int:
        """Allowed pairs, unless it was set."""
        return sum(s.area for s in self.attn_slices) if self._area is None else self._area

    @area.setter
    def area(self, area: int) -> None:
        self._area = area


class _Keys:
    """What chunks and buckets say about their slices' keys."""

    @property
    def attn_slices(self) -> list[AttnSlice]:
        raise NotImplementedError(f"{type(self).__name__} does not say which slices it has; define attn_slices.")

    @property
    def q_ranges(self) -> AttnRanges:
        return AttnRanges.from_ranges([_given(s.q_range, "q_range") for s in self.attn_slices])

    @property
    def k_ranges(self) -> AttnRanges:
        return AttnRanges.from_ranges([_given(s.k_range, "k_range") for s in self.attn_slices])

    @property
    def area(self) -> int:
        return sum(s.area for s in self.attn_slices)

    @property
    def iou(self) -> float:
        """Share of the listed keys that slices before list already, 0 if there are none."""
        keys = self.k_ranges
        return keys.intersect_size() / keys.total_seqlen if keys.total_seqlen else 0.0

    def iou_with(self, other: _Keys) -> float:
        """Shared keys over all keys of both, 0 if neither has any."""
        union = self.k_ranges.union_size_with(other.k_ranges)
        return self.k_ranges.intersect_size_with(other.k_ranges) / union if union else 0.0


@dataclass
class AttnChunk(_Keys):
    """What one chunk of queries attends to; ``sample_ids[i]`` is the input slice behind ``q_slices[i]``.

    The sample ids take no part in equality.
    """

    chunk_id: int | None = None
    q_slices: list[AttnSlice] = field(default_factory=list)
    sample_ids: list[int] = field(default_factory=list, compare=False)

    @property
    def attn_slices(self) -> list[AttnSlice]:
        return self.q_slices


@dataclass
class AttnBucket(_Keys):
    """The chunks of one rank, or of all ranks (``cp_rank`` None)."""

    cp_rank: int | None = None
    q_chunks: list[AttnChunk] = field(default_factory=list)

    @property
    def attn_slices(self) -> list[AttnSlice]:
        return [s for chunk in self.q_chunks for s in chunk.q_slices]

    @property
    def areas(self) -> list[int]:
        return [chunk.area for chunk in self.q_chunks]


@dataclass
class HostRankEntry:
    """Ranges and slices of one rank; ``*_per_chunk`` by chunk of remote keys. Filled by whoever wants one."""

    host_q_ranges_global: AttnRanges
    host_k_ranges_global: AttnRanges
    attn_calc_slice_global_list: list[AttnSlice]
    attn_calc_host_slice_local_list: list[AttnSlice]
    remote_k_ranges_global: AttnRanges
    remote_k_ranges_global_per_chunk: list[AttnRanges]
    attn_calc_remote_slice_list_per_chunk: list[list[MultiKAttnSlice]]

    def __post_init__(self) -> None:
        ranges, slices = len(self.remote_k_ranges_global_per_chunk), len(self.attn_calc_remote_slice_list_per_chunk)
        if ranges != slices:
            raise ContractError(f"{ranges} chunks of remote ranges and {slices} of slices; give as many of both.")

    def get_host_calc_area(self) -> int:
        return sum(piece.area for piece in self.attn_calc_host_slice_local_list)

    def get_remote_calc_area(self, chunk_idx: int | None = None) -> int:
        """Pairs of one chunk, or of all."""
        chunks = self.attn_calc_remote_slice_list_per_chunk
        return sum(p.area for p in (chain.from_iterable(chunks) if chunk_idx is None else chunks[chunk_idx]))

    def get_remote_comm_size(self, chunk_idx: int | None = None) -> int:
        """Tokens of one chunk, or of all."""
        chunks = self.remote_k_ranges_global_per_chunk
        return sum(r.total_seqlen for r in (chunks if chunk_idx is None else [chunks[chunk_idx]]))


@dataclass
class RemoteRankEntry:
    """What one rank gets from the others for one chunk."""

    host_k_ranges_global: AttnRanges
    remote_k_ranges_global: AttnRanges
    attn_calc_remote_slice_local_list: list[MultiKAttnSlice]
