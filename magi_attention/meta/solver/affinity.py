# SPDX-License-Identifier: Apache-2.0
"""Affinities: what a chunk, or the chunks of a rank together, have in common with others.

``ToppHeapDispatchAlg`` and ``BatchToppHeapDispatchAlg`` give a chunk to the rank whose affinity is closest. A class of
one's own derives from ``BaseDispatchAffinity``; called without arguments it is the affinity of a rank without chunks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.intervals import as_intervals, intersect_intervals, merge_intervals, total_length
from magi_attention.common.range import AttnRange, RangeType
from magi_attention.common.ranges import AttnRanges
from magi_attention.errors import ContractError


class BaseDispatchAffinity(ABC):
    """What an affinity must offer; the comparisons follow from ``distance_to``."""

    @abstractmethod
    def distance_to(self, other: Any) -> float:
        """Less is closer."""

    @abstractmethod
    def update(self, other: Any) -> None:
        """Takes ``other`` in; changes the object."""

    @abstractmethod
    def __repr__(self) -> str: ...

    def make_cmp_key(self) -> Callable[[Any], float]:
        """A ``key`` for ``sorted``, ``min`` and ``max`` that orders affinities by their distance to this one."""
        return self.distance_to

    def get_closest_affinity_idx(self, others: Sequence[Any]) -> int:
        """Index of the closest, the first of those equally close."""
        return min(range(len(others)), key=[self.make_cmp_key()(other) for other in others].__getitem__)

    def get_farthest_affinity_idx(self, others: Sequence[Any]) -> int:
        """Index of the farthest, the first of those equally far."""
        return max(range(len(others)), key=[self.make_cmp_key()(other) for other in others].__getitem__)


class IOUAffinity(BaseDispatchAffinity):
    """Key ranges; closest means most shared keys."""

    def __init__(self, k_ranges: Iterable[RangeType] | NDArray[np.int64] = ()) -> None:
        self._merged = merge_intervals(as_intervals(k_ranges))

    @classmethod
    def from_ranges(cls, ranges: AttnRanges | Iterable[RangeType]) -> IOUAffinity:
        return cls(ranges)

    @property
    def iou_ranges(self) -> AttnRanges:
        """The keys, merged; a copy."""
        return AttnRanges.from_array(self._merged)

    def append(self, attn_range: AttnRange) -> None:
        """Takes the keys of one more range in."""
        self.extend([attn_range])

    def extend(self, attn_ranges: AttnRanges | Iterable[RangeType]) -> None:
        """Takes the keys of more ranges in."""
        self.update(IOUAffinity(attn_ranges))

    def distance_to(self, other: IOUAffinity) -> float:
        """Minus the number of keys that both hold."""
        return -total_length(intersect_intervals(self._merged, other._merged))

    def update(self, other: IOUAffinity) -> None:
        self._merged = merge_intervals(np.concatenate([self._merged, other._merged]))

    def __repr__(self) -> str:
        return f"IOUAffinity({self.iou_ranges!r})"


class SampleIDAffinity(BaseDispatchAffinity):
    """Sample ids with their counts; closest means most of the sample that this one has most of."""

    def __init__(self, sample_ids: Iterable[int] = ()) -> None:
        self.sample_id_cnt_dict: Counter[int] = Counter()
        for sample_id in sample_ids:
            self.add_sample_id(sample_id)

    @classmethod
    def from_list(cls, ids: Iterable[int]) -> SampleIDAffinity:
        return cls(ids)

    def add_sample_id(self, sample_id: int) -> None:
        """``ContractError`` if it is negative."""
        if sample_id < 0:
            raise ContractError(f"Sample id {sample_id} is negative; ids count samples from 0.")
        self.sample_id_cnt_dict[sample_id] += 1

    def get_count(self, sample_id: int) -> int:
        """How often ``sample_id`` was added."""
        return self.sample_id_cnt_dict[sample_id]

    def get_sample_id_by(self, mode: str = "max_count") -> int:
        """The id with the largest (``max_count``) or least (``min_count``) count, of equal ones the first added.

        ``ContractError`` if there is none, or for another mode.
        """
        if mode not in ("max_count", "min_count"):
            raise ContractError(f"mode is {mode!r}; use 'max_count' or 'min_count'.")
        if self.is_empty():
            raise ContractError("This affinity has no sample ids; add one first.")
        pick = max if mode == "max_count" else min
        return pick(self.sample_id_cnt_dict, key=self.sample_id_cnt_dict.__getitem__)

    def num_sample_ids(self, distinct: bool = True) -> int:
        """Number of different ids, or of all that were added."""
        return len(self.sample_id_cnt_dict) if distinct else self.sample_id_cnt_dict.total()

    def is_empty(self) -> bool:
        return not self.sample_id_cnt_dict

    def distance_to(self, other: SampleIDAffinity) -> float:
        """Minus how often ``other`` has the id that this one has most of; 0 without ids."""
        return 0 if self.is_empty() else -other.get_count(self.get_sample_id_by("max_count"))

    def update(self, other: SampleIDAffinity) -> None:
        self.sample_id_cnt_dict.update(other.sample_id_cnt_dict)

    def __repr__(self) -> str:
        return f"SampleIDAffinity({dict(self.sample_id_cnt_dict)})"
