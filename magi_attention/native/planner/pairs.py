# SPDX-License-Identifier: Apache-2.0
"""Which rows move and who computes which pairs, by the planner library."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from magi_attention.native import abi
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


@dataclass(frozen=True, eq=False)
class PairGraph:
    """Pairs of a query chunk and a key chunk, each once, ascending by ``query`` and then ``key``, at ``world`` ranks.

    All int64: ``query``, ``key`` and ``area`` (pairs,), ``query_cost`` and ``query_owner`` (query chunks,),
    ``key_cost`` and ``key_owner`` (key chunks,). Costs are those of sending a chunk to one rank. Costs and areas are
    from 0 on, in all at most 2**44 and 2**60.
    """

    query: NDArray[np.int64]
    key: NDArray[np.int64]
    area: NDArray[np.int64]
    query_cost: NDArray[np.int64]
    query_owner: NDArray[np.int64]
    key_cost: NDArray[np.int64]
    key_owner: NDArray[np.int64]
    world: int

    def balanced(self, rank: NDArray[np.int64], most: float, most_steps: int) -> NDArray[np.int64]:
        """``rank`` (pairs,), -1 for none, after up to ``most_steps`` times the rank with most area has handed over what
        costs least for its area, until none has more than ``most`` or nothing helps.

        Raises:
            ContractError: pairs out of order, or chunks or ranks that there are not. UnsupportedError: the library is
                not built.
        """
        return self._hand_over("magi_balance_pairs", rank, _floor(most), most_steps)

    def improved(self, rank: NDArray[np.int64], most: float) -> NDArray[np.int64]:
        """``rank`` after ranks have handed over what saves most, none to a rank that would have more than ``most``
        then, until nothing does. Errors as of ``balanced``."""
        return self._hand_over("magi_improve_pairs", rank, _floor(most))

    def _hand_over(self, function: str, rank: NDArray[np.int64], *limits: int) -> NDArray[np.int64]:
        names = ("query", "key", "area", "query_cost", "query_owner", "key_cost", "key_owner")
        arrays = [np.ascontiguousarray(getattr(self, name), dtype=np.int64) for name in names]
        sizes = len(self.query), len(self.query_cost), len(self.key_cost), self.world, 0
        pairs = abi.Pairs(*sizes, *(array.ctypes.data for array in arrays))
        out = np.array(rank, dtype=np.int64)
        library = load(PLANNER)
        status = getattr(library, function)(ctypes.addressof(pairs), *limits, out.ctypes.data)
        check(library, status, "Handing pairs to other ranks")
        return out


def _floor(most: float) -> int:
    """As an int64: areas and loads are whole, and far from its end."""
    return int(min(max(most, -1), 2**62))
