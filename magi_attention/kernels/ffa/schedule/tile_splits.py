# SPDX-License-Identifier: Apache-2.0
"""Which tiles of keys a deterministic backward splits by query heads (``docs/log/ffa_backward_turns.md``).

Where there are about two work tiles for each SM, documents of different lengths leave some SMs idle at the end. With
deterministic dq the caller names a run of tiles, in the order of the plan, whose query heads are split into so many
work tiles. The parts of their dk and dv pass through memory. A simulation of the schedule chooses the run and the
number of parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

import numpy as np

from magi_attention.common.enum import AttnMaskType
from magi_attention.common.slices import SliceTable
from magi_attention.kernels.ffa.schedule.simulate import NARROW, starts_of, tile_steps

_FULL = AttnMaskType.FULL.to_int_type()
_PARTS = (2, 4, 8)
_MOST_IN_PAIRS = 2  # parts of which any run of tiles is; of more, where each waits for the others, only those in front
_FIRST = 3
_EDGES = 6  # runs begin and end at so many places among the tiles, and at each of the first few
# In steps of 80 queries of one head, 2.6 us with head dim 128 on an H100, by what 94 masks and heads took there: a step
# of 64, 1.06 times as long for each query; to begin and end a work tile; what it takes all SMs together to leave
# a part of dk and dv in memory and to add it up; how many rows of q the kernels before and behind the main one go
# through; and how much of the time counts in which some have ended: whoever works on meanwhile is faster.
_NARROW_STEP = 0.848
_BEGIN_AND_END = 1.9
_PART = 0.14
_ROWS = 3200
_LATE = 0.75
_GAIN = 0.98  # of the time of whole tiles, what split ones must not exceed


class Split(NamedTuple):
    """Tiles from ``begin`` to before ``end``, in the order of the plan, in so many ``parts``; all 0 for none."""

    begin: int
    end: int
    parts: int


NONE = Split(0, 0, 0)


class SimulatedTiles(NamedTuple):
    """Tiles whose work tiles are scheduled in the order of the plan, ``heads_kv`` of each, to so many ``num_sms``.

    ``steps``: (num_tiles,), of all query heads of a kv head, in steps of 80 queries. ``rows``: what the kernels before
    and behind take.
    """

    steps: np.ndarray
    heads_kv: int
    num_sms: int
    rows: float = 0.0

    @property
    def least(self) -> float:
        """What it takes if all SMs end together."""
        return float(self.steps.sum() + _BEGIN_AND_END * len(self.steps)) * self.heads_kv / self.num_sms + self.rows

    def end(self, split: Split = NONE) -> float:
        """When the last work tile ends."""
        parts = np.ones(len(self.steps), dtype=np.int64)
        if split.parts:
            parts[split.begin : split.end] = split.parts
        times = np.repeat(self.steps / parts + _BEGIN_AND_END, parts * self.heads_kv)
        return float((starts_of(times, self.num_sms) + times).max())

    def time(self, split: Split = NONE) -> float:
        parts = (split.end - split.begin) * split.parts * self.heads_kv
        return self.least + _LATE * (self.end(split) + self.rows - self.least) + _PART * parts


def can_split(group: int) -> bool:
    """Whether there is a kernel for parts of so many query heads of a kv head."""
    return any(_heads_of_part(group, parts) for parts in _PARTS)


def select_tile_split(
    slices: SliceTable, q_shape: tuple[int, ...], v_shape: tuple[int, ...], num_sms: int, block_m: int
) -> Split:
    """In steps of 80; ``NONE`` where whole tiles in steps of ``block_m`` take about as long, or where a slice is
    not full: tiles that end at a diagonal wait for each other, and parts of them were slower in 27 of 31 measurements.

    ``q_shape`` (Tq, Hq, D), ``v_shape`` (Tk, Hk, Dv), with a group that can be split; ``num_sms``: SMs
    of the device, with a work tile or two for each.
    """
    (total_q, heads, _), (total_k, heads_kv, _) = q_shape, v_shape
    if (slices.array[:, 4] != _FULL).any():
        return NONE
    found, group = tile_steps(slices, total_q, total_k), heads // heads_kv
    wide = SimulatedTiles(found.wide[found.order] * group, heads_kv, num_sms, total_q * heads / _ROWS)
    whole = wide
    if block_m == NARROW:
        whole = wide._replace(steps=found.narrow[found.order] * (group * _NARROW_STEP))
    limit = _GAIN * whole.time()
    if wide.least > limit:
        return NONE
    times = {split: wide.time(split) for split in _runs(len(wide.steps), group)}
    best = min(times, key=times.__getitem__)
    return best if times[best] <= limit else NONE


def _heads_of_part(group: int, parts: int) -> int:
    heads = group // parts
    return heads if heads * parts == group and heads & (heads - 1) == 0 else 0


def _runs(tiles: int, group: int) -> Iterator[Split]:
    first = range(min(_FIRST, tiles) + 1)
    edges = sorted({*np.linspace(0, tiles, _EDGES + 1).round().astype(int).tolist(), *first})
    for parts in _PARTS:
        if _heads_of_part(group, parts):
            for begin, end in combinations(edges if parts <= _MOST_IN_PAIRS else first, 2):
                yield Split(begin, end, parts)
