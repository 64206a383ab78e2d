# SPDX-License-Identifier: Apache-2.0
"""The native tile planner through its C functions, and plans that can be written to."""

from __future__ import annotations

import ctypes
import functools

import numpy as np

from magi_attention.native import abi
from magi_attention.native.loader import load
from magi_attention.native.planner.tile_plan import TilePlan
from magi_attention.native.toolchain import PLANNER
from magi_attention.testing.libraries import planner_or_skip
from magi_attention.testing.masks import random_slices

GARBAGE = -7  # what buffers hold before; no word of a plan is -7
OK, INVALID_ARGUMENT, UNSUPPORTED, CUDA_ERROR, CAPACITY = range(5)

HEADER, TILE = np.dtype(abi.TilePlanHeader), np.dtype(abi.TileDesc)
SEGMENT = np.dtype(abi.TileSegment)


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The planner; skips the test where it cannot be built."""
    planner_or_skip()
    return load(PLANNER)


def as_rows(slices) -> np.ndarray:
    """Slices as contiguous int32 ``(N, 5)``."""
    return np.ascontiguousarray(getattr(slices, "array", slices), dtype=np.int32).reshape(-1, 5)


def last_error() -> str:
    return library().magi_last_error().decode()


def plan_into(rows, total_q, total_k, tile_tokens, num_groups, plan) -> tuple[int, int]:
    """``(status, words_needed)``; ``plan`` is an int32 array, or None to ask for the size only."""
    needed = ctypes.c_int64(0)
    pointer, words = (None, 0) if plan is None else (plan.ctypes.data, plan.size)
    shape = (total_q, total_k, tile_tokens, num_groups)
    status = library().magi_tile_plan_host(rows.ctypes.data, len(rows), *shape, pointer, words, ctypes.byref(needed))
    return status, needed.value


def make_plan(slices, total_q: int, total_k: int, tile_tokens: int, num_groups: int = 1) -> np.ndarray:
    """The plan as int32 words, in a buffer of exactly the size that was asked for."""
    rows = as_rows(slices)
    status, needed = plan_into(rows, total_q, total_k, tile_tokens, num_groups, None)
    assert status == OK, last_error()
    plan = np.full(needed, GARBAGE, dtype=np.int32)
    status, again = plan_into(rows, total_q, total_k, tile_tokens, num_groups, plan)
    assert status == OK and again == needed, last_error()
    return plan


def check_plan(slices, plan: np.ndarray) -> tuple[int, str]:
    """``(status, sentence)`` of the walker; the sentence is empty when the status is OK."""
    rows = as_rows(slices)
    status = library().magi_tile_plan_check(rows.ctypes.data, len(rows), plan.ctypes.data, plan.size)
    return status, "" if status == OK else last_error()


class View:
    """Named views into the words of a plan; writing to them changes the plan."""

    def __init__(self, plan: np.ndarray) -> None:
        self.plan = plan
        self.header = plan[:28].view(HEADER)
        parsed = TilePlan(plan)
        self.tiles, self.order, self.records = parsed.tiles.view(TILE)[:, 0], parsed.order, parsed.records
        self.tile_tokens, self.num_groups = parsed.header.tile_tokens, parsed.header.num_groups

    def segment(self, record: int) -> np.ndarray:
        """Header of a record, a view of shape ``(1,)``."""
        return self.records[record, :32].view(SEGMENT)

    def pairs(self, record: int) -> np.ndarray:
        """``(tile_tokens, 2)`` intervals of a record."""
        return self.records[record, 32 : 32 + 2 * self.tile_tokens].reshape(-1, 2)

    def group_rows(self, group: int, num_tokens: int) -> range:
        begin, end = (g * self.tile_tokens // self.num_groups for g in (group, group + 1))
        return range(min(begin, num_tokens), min(end, num_tokens))


# (tile_tokens, num_groups)
SHAPES = [(t, g) for t in (1, 5, 8, 16, 24, 64, 128, 192) for g in (1, 2, 3)]


def random_case(seed: int, most_tokens: int = 400, most_slices: int = 24):
    """``(rng, slices, total_q, total_k)`` of a random mask."""
    rng = np.random.default_rng(seed)
    total_q, total_k = (int(x) for x in rng.integers(1, most_tokens + 1, size=2))
    slices = random_slices(rng, total_q, total_k, max_slices=int(rng.integers(1, most_slices + 1)))
    return rng, slices, total_q, total_k
