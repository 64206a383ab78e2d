# SPDX-License-Identifier: Apache-2.0
"""Which rows move, by the planner library."""

from __future__ import annotations

import numpy as np

from magi_attention.native.loader import check, load
from magi_attention.native.toolchain import PLANNER


def vertex_cover(
    left_weights: np.ndarray, right_weights: np.ndarray, left: np.ndarray, right: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Least weighted vertex cover of a bipartite graph: which vertices are chosen, two bool arrays.

    ``left_weights`` (L,), ``right_weights`` (R,) int64 from 0 on; edge e joins ``left[e]`` and ``right[e]``, one
    of which is chosen at least.

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
