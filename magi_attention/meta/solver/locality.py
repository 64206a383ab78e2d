# SPDX-License-Identifier: Apache-2.0
"""Swaps of chunks between ranks, so that fewer rows have to travel at the same balance.

The modelled time of a partition is the area of the heaviest rank plus what its rows cost to fetch. Threshold accepting
(Dueck and Scheuer, 1990): random swaps, and those are kept that raise the time by less than a threshold, which falls.
With a fixed seed, a fixed number of steps and no function whose last bit depends on the machine, so every rank that
asks gets the same answer.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.slices import K0, K1
from magi_attention.errors import UnsupportedError
from magi_attention.native.planner import swap_chunks

_log = logging.getLogger("magi_attention.meta")

STEPS = 12_000
_FIRST, _LAST = 0.01, 3e-5  # thresholds, relative to the mean area of a rank
_SHARE_OF_MAX = 0.7  # how much the rank that fetches most counts, against the mean of all
_SEED = 1


def key_masks(pieces: NDArray[np.int64], chunk_of: NDArray[np.int64], num_chunks: int, chunk_size: int) -> list[int]:
    """For every chunk, the chunks whose keys its queries read, as bits of an integer."""
    masks = [0] * num_chunks
    ends = zip(chunk_of.tolist(), (pieces[:, K0] // chunk_size).tolist(), ((pieces[:, K1] - 1) // chunk_size).tolist())
    for chunk, first, last in ends:
        if last >= first:
            masks[chunk] |= ((1 << (last - first + 1)) - 1) << first
    return masks


class _State:
    """Chunks of every rank, with their areas and the number of chunks that they fetch."""

    def __init__(self, parts: Sequence[Sequence[int]], areas: Sequence[int], masks: Sequence[int], cost: float) -> None:
        self.parts = [list(part) for part in parts]
        self._areas, self._masks, self._cost = areas, masks, cost
        self.mean = max(sum(areas) / len(parts), 1)
        self.loads = [sum(areas[c] for c in part) for part in self.parts]
        self.own = [sum(1 << c for c in part) for part in self.parts]
        self.fetched = [self._fetched(r, self.own[r]) for r in range(len(parts))]
        self.energy = self._energy(self.loads, self.fetched)

    def _fetched(self, rank: int, own: int) -> int:
        read = 0
        for chunk in self.parts[rank]:
            read |= self._masks[chunk]
        return bin(read & ~own).count("1")

    def _energy(self, loads: list[int], fetched: list[int]) -> float:
        rows = _SHARE_OF_MAX * max(fetched) + (1 - _SHARE_OF_MAX) * sum(fetched) / len(fetched)
        return (max(loads) + self._cost * rows) / self.mean

    def try_swap(self, r: int, i: int, s: int, j: int, limit: float) -> bool:
        """Swaps the i-th chunk of rank r and the j-th of s, unless the energy would be above ``limit``."""
        a, b = self.parts[r][i], self.parts[s][j]
        loads, fetched = list(self.loads), list(self.fetched)
        loads[r] += self._areas[b] - self._areas[a]
        loads[s] += self._areas[a] - self._areas[b]
        both = 1 << a | 1 << b
        self.parts[r][i], self.parts[s][j] = b, a
        fetched[r], fetched[s] = self._fetched(r, self.own[r] ^ both), self._fetched(s, self.own[s] ^ both)
        energy = self._energy(loads, fetched)
        if energy > limit:
            self.parts[r][i], self.parts[s][j] = a, b
            return False
        self.loads, self.fetched, self.energy = loads, fetched, energy
        self.own[r] ^= both
        self.own[s] ^= both
        return True


@lru_cache(maxsize=16)
def _proposals(sizes: tuple[int, ...], steps: int) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """(steps, 4) int32, rank, place, other rank and place there of the chunks to be swapped; and (steps,) thresholds.
    They do not depend on what is swapped, so masks of one training run share them."""
    draw, world = random.Random(_SEED), len(sizes)
    proposals, thresholds = np.empty((steps, 4), dtype=np.int32), np.empty(steps)
    threshold, ratio = _FIRST, round((_LAST / _FIRST) ** (1 / max(steps, 1)), 9)
    for step in range(steps):
        r = draw.randrange(world)
        s = (r + 1 + draw.randrange(world - 1)) % world
        proposals[step] = r, draw.randrange(sizes[r]), s, draw.randrange(sizes[s])
        thresholds[step] = threshold
        threshold *= ratio
    proposals.setflags(write=False)
    thresholds.setflags(write=False)
    return proposals, thresholds


def improve(
    parts: Sequence[Sequence[int]], areas: Sequence[int], masks: Sequence[int], chunk_cost: float, steps: int = STEPS
) -> tuple[float, list[list[int]]]:
    """The least modelled time that was found, over the mean area of a rank, and its partition.

    ``parts`` are the chunk ids of every rank; each keeps as many. ``areas`` are those of chunks, ``chunk_cost`` is the
    area that takes as long as fetching a chunk. By the planner library where there is one: the same answer.
    """
    proposals, thresholds = _proposals(tuple(len(part) for part in parts), steps)
    mean = max(sum(areas) / len(parts), 1)
    try:
        return swap_chunks(parts, areas, masks, chunk_cost, _SHARE_OF_MAX, mean, proposals, thresholds)
    except UnsupportedError as reason:
        _say_once(str(reason))
        return _improve_here(_State(parts, areas, masks, chunk_cost), proposals, thresholds)


def _improve_here(
    state: _State, proposals: NDArray[np.int32], thresholds: NDArray[np.float64]
) -> tuple[float, list[list[int]]]:
    best = (state.energy, [list(part) for part in state.parts])
    for (r, i, s, j), threshold in zip(proposals.tolist(), thresholds.tolist()):
        if state.try_swap(r, i, s, j, state.energy + threshold) and state.energy < best[0] - 1e-12:
            best = (state.energy, [list(part) for part in state.parts])
    return best


@lru_cache(maxsize=1)
def _say_once(reason: str) -> None:
    _log.info("Dispatch by locality takes some 0.1 s for each mask rather than milliseconds: %s", reason)


__all__ = ["STEPS", "improve", "key_masks"]
