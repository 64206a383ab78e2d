# SPDX-License-Identifier: Apache-2.0
"""Tile plans: for each tile of queries the list of key intervals that it visits.

A plan is one int32 buffer whose layout ``csrc/include/magi/abi.h`` describes. It depends on the mask and on the
tile only, so one plan serves every layer, head and batch of values. The backward wants that of the transposed mask,
for each tile of keys the query intervals that see it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from magi_attention.common.plan_cache import Kind
from magi_attention.common.slices import SliceTable
from magi_attention.errors import ContractError
from magi_attention.native import abi
from magi_attention.native.loader import check, load
from magi_attention.native.toolchain import PLANNER

_INT32_END = 2**31


@dataclass(frozen=True)
class TilePlan:
    """``words`` is the whole plan: int32, one-dimensional, read-only."""

    words: np.ndarray

    @classmethod
    def build(
        cls, slices: SliceTable | np.ndarray, total_q: int, total_k: int, tile_tokens: int, num_groups: int
    ) -> TilePlan:
        """Plan of disjoint ``slices`` for ``total_q`` queries and ``total_k`` keys.

        A tile is ``tile_tokens`` consecutive queries in ``num_groups`` row groups.

        Raises:
            ContractError: a size is no int32, a slice is malformed or reaches beyond the tokens.
            UnsupportedError: the planner library is not built.
        """
        rows = _int32_rows(slices, total_q, total_k)
        library = load(PLANNER)
        needed = ctypes.c_int64()

        def call(plan: int | None, size: int) -> int:
            arguments = (rows.ctypes.data, len(rows), total_q, total_k, tile_tokens, num_groups, plan, size)
            return library.magi_tile_plan_host(*arguments, ctypes.byref(needed))

        # Room for what most masks need, so that they are planned once; memory that is not written is not taken.
        segments = 2 * (-(-total_q // max(tile_tokens, 1)) + len(rows))
        words = _aligned_words(max(library.magi_tile_plan_words(total_q, tile_tokens, segments), 0))
        status = call(words.ctypes.data, len(words))
        if status == abi.CAPACITY and needed.value > len(words):
            words = _aligned_words(needed.value)
            status = call(words.ctypes.data, len(words))
        check(library, status, "Planning tiles")
        words = words[: needed.value]
        words.setflags(write=False)
        return cls(words)

    @classmethod
    def of_table(
        cls,
        slices: SliceTable,
        total_q: int,
        total_k: int,
        tile_tokens: int,
        num_groups: int,
        is_transposed: bool = False,
        is_kept: bool = False,
    ) -> TilePlan:
        """Plan of a slice table, or of its transposed mask: ``total_k`` rows, ``total_q`` columns, tiles of keys.

        Its slices are coalesced first where that saves time. With ``is_kept`` the table keeps the plan for the next
        caller, who takes it out unless the plan is to be kept again. Errors as of ``build``.
        """
        key = (total_q, total_k, tile_tokens, num_groups, is_transposed)
        plan = slices.cache.pop(HOST_PLANS, key)
        if plan is None:
            rows = transposed(slices, total_q, total_k) if is_transposed else _int32_rows(slices, total_q, total_k)
            sizes = (total_k, total_q) if is_transposed else (total_q, total_k)
            plan = cls.build(strips(rows, tile_tokens), *sizes, tile_tokens, num_groups)
        return slices.cache.get(HOST_PLANS, key, lambda: plan) if is_kept else plan

    def check(self, slices: SliceTable | np.ndarray) -> None:
        """Walks the plan against the slices; ``ContractError`` names the first pair or field that is wrong."""
        header = self.header
        rows = _int32_rows(slices, header.total_q, header.total_k)
        library = load(PLANNER)
        status = library.magi_tile_plan_check(rows.ctypes.data, len(rows), self.words.ctypes.data, len(self.words))
        check(library, status, "Checking the tile plan")

    @property
    def header(self) -> abi.TilePlanHeader:
        return abi.TilePlanHeader.from_buffer_copy(self.words[: ctypes.sizeof(abi.TilePlanHeader) // 4].tobytes())

    @property
    def tiles(self) -> np.ndarray:
        """(num_tiles, 8): token0, num_tokens, segment_begin, num_segments, cost, num_blocks, two reserved."""
        header = self.header
        return self.words[header.words_tiles :][: 8 * header.num_tiles].reshape(-1, 8)

    @property
    def order(self) -> np.ndarray:
        """(num_tiles,) tile ids by decreasing cost."""
        header = self.header
        return self.words[header.words_order :][: header.num_tiles]

    @property
    def records(self) -> np.ndarray:
        """(num_segments, segment_words): the fields of ``magi_tile_segment``, then a pair (lo, hi) of each token."""
        header = self.header
        size = header.num_segments * header.segment_words
        return self.words[header.words_records :][:size].reshape(-1, header.segment_words)

    @property
    def intervals(self) -> np.ndarray:
        """(num_segments, tile_tokens, 2): key interval of each token of the tile in each segment."""
        tokens = self.header.tile_tokens
        pairs = self.records[:, abi.SEGMENT_WORDS :][:, : 2 * tokens]
        return pairs.reshape(len(pairs), tokens, 2)


HOST_PLANS: Kind[tuple[int, int, int, int, bool], TilePlan] = Kind("tile plan, on the host", lambda plan: [plan.words])


def transposed(slices: SliceTable | np.ndarray, total_q: int, total_k: int) -> np.ndarray:
    """The transposed mask: disjoint slices whose rows are the keys and whose columns are the queries.

    ``slices`` (N, 5) gives int32 (M, 5) with M <= 3 N: none for a slice that allows nothing.

    Raises:
        ContractError: a size is no int32, a slice is malformed or reaches beyond the tokens.
        UnsupportedError: the planner library is not built.
    """
    rows = _int32_rows(slices, total_q, total_k)
    library = load(PLANNER)
    parts = np.zeros((3 * len(rows), 5), dtype=np.int32)
    status = library.magi_tile_transpose_host(rows.ctypes.data, len(rows), parts.ctypes.data)
    check(library, status, "Transposing the mask")
    return parts[parts[:, 0] < parts[:, 1]]


def strips(rows: np.ndarray, tile_tokens: int) -> np.ndarray:
    """The same mask, int32 (M, 5) with M <= 3 N, of disjoint slices, int32 (N, 5): its FULL slices are cut so that
    tiles of ``tile_tokens`` rows meet fewer of them, where that at least halves how long a plan takes.

    Raises:
        ContractError: a type is none. UnsupportedError: the planner library is not built.
    """
    if len(rows) < 2:
        return rows
    library = load(PLANNER)
    made, count = np.empty((3 * len(rows), 5), dtype=np.int32), ctypes.c_int64()
    status = library.magi_tile_strips_host(
        rows.ctypes.data, len(rows), tile_tokens, made.ctypes.data, ctypes.byref(count)
    )
    check(library, status, "Cutting the mask into strips")
    return made[: count.value]


def plan_words(total_q: int, tile_tokens: int, num_segments: int) -> int:
    """Size in int32 words of a plan with up to ``num_segments`` segments."""
    return load(PLANNER).magi_tile_plan_words(total_q, tile_tokens, num_segments)


def _int32_rows(slices: SliceTable | np.ndarray, total_q: int, total_k: int) -> np.ndarray:
    array = slices.array if isinstance(slices, SliceTable) else np.asarray(slices, dtype=np.int64).reshape(-1, 5)
    if not (0 <= total_q < _INT32_END and 0 <= total_k < _INT32_END):
        raise ContractError(f"{total_q} queries and {total_k} keys: a tile plan counts fewer than 2**31 of each.")
    for name, start, total in (("q", 0, total_q), ("k", 2, total_k)):
        a, b = array[:, start], array[:, start + 1]
        bad = np.flatnonzero((a < 0) | (b < a) | (b > total))
        if len(bad):
            i = int(bad[0])
            raise ContractError(
                f"Slice {i} has {name} range [{a[i]}, {b[i]}) with {total} rows of {name}; "
                f"ranges are half-open within 0..{total}."
            )
    return np.ascontiguousarray(array, dtype=np.int32)


def _aligned_words(size: int) -> np.ndarray:
    """Zeroed int32 words at a multiple of 16 bytes."""
    raw = np.zeros(size + 4, dtype=np.int32)
    skip = (-raw.ctypes.data % 16) // 4
    return raw[skip : skip + size]
