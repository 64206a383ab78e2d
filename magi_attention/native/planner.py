# SPDX-License-Identifier: Apache-2.0
"""Dispatch, and which rows move, by the planner library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from magi_attention.native.loader import check, load
from magi_attention.native.toolchain import PLANNER


def swap_chunks(
    parts: Sequence[Sequence[int]],
    areas: Sequence[int],
    masks: Sequence[int],
    chunk_cost: float,
    share_of_max: float,
    mean: float,
    proposals: np.ndarray,
    thresholds: np.ndarray,
) -> tuple[float, list[list[int]]]:
    """The least energy that is met on the way, and its partition; ``magi_swap_chunks`` in ``magi/abi.h`` says of what.

    ``parts``: the chunks of every rank. ``masks``: the chunks that each chunk reads, as bits of an integer.
    ``proposals`` (steps, 4) int32, ``thresholds`` (steps,) float64.

    Raises:
        ContractError: a chunk or a place that there is not. UnsupportedError: the planner library is not built.
    """
    words = -(-len(areas) // 64)
    bits = np.frombuffer(b"".join(mask.to_bytes(8 * words, "little") for mask in masks), dtype=np.uint64)
    sizes = np.array([len(part) for part in parts], dtype=np.int32)
    chunks, ends = np.array([c for part in parts for c in part], dtype=np.int32), np.cumsum(sizes, dtype=np.int32)
    areas_of = np.array(areas, dtype=np.int64)
    energy, library = ctypes.c_double(), load(PLANNER)
    status = library.magi_swap_chunks(
        chunks.ctypes.data, ends.ctypes.data, len(parts), areas_of.ctypes.data, bits.ctypes.data, len(areas),
        chunk_cost, share_of_max, mean, proposals.ctypes.data, thresholds.ctypes.data, len(thresholds),
        ctypes.byref(energy),
    )  # fmt: skip
    check(library, status, "Dispatching chunks")
    return energy.value, [part.tolist() for part in np.split(chunks, ends[:-1])]


def vertex_cover(
    left_weights: np.ndarray, right_weights: np.ndarray, left: np.ndarray, right: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Least weighted vertex cover of a bipartite graph: which vertices are chosen, two bool arrays.

    ``left_weights`` (L,), ``right_weights`` (R,) int64 from 0 on; edge e joins ``left[e]`` and ``right[e]``. Of each
    edge at least one end is chosen.

    Raises:
        ContractError: a vertex that there is not, or a negative weight. UnsupportedError: the library is not built.
    """
    weights = [np.ascontiguousarray(x, dtype=np.int64) for x in (left_weights, right_weights)]
    ends = [np.ascontiguousarray(x, dtype=np.int32) for x in (left, right)]
    chosen = [np.zeros(len(x), dtype=np.uint8) for x in weights]
    library = load(PLANNER)
    status = library.magi_vertex_cover(
        *map(len, weights), *(x.ctypes.data for x in weights), len(ends[0]), *(x.ctypes.data for x in ends),
        *(x.ctypes.data for x in chosen),
    )  # fmt: skip
    check(library, status, "Choosing the rows that move")
    return chosen[0].astype(bool), chosen[1].astype(bool)
