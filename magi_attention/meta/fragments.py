# SPDX-License-Identifier: Apache-2.0
"""Who holds which tokens in what order, for layers that carry a state from token to token.

A fragment is a range of consecutive tokens of one rank; the tokens before and behind it are of other ranks. A segment
is the part of one document in a fragment. Within a segment a layer runs as it does on one device. A state leaves a
fragment where a document goes on in the next one, which another rank holds. Pad rows, behind the last document, are
segments of their own and pass nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Fragments:
    """All ranks' fragments, as a value: it pickles, and two are equal if their content is.

    ``ranges[r]`` ``(F_r, 2)`` int64 are the fragments of rank r, half-open ranges of global tokens, in the order of its
    shard, pad rows included. ``cu_seqlens`` ``(documents + 1,)`` int64 says where documents begin and where the last
    one ends; what lies behind is pad.
    """

    ranges: tuple[Ints, ...]
    cu_seqlens: Ints

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fragments) or len(self.ranges) != len(other.ranges):
            return False
        pairs = zip((*self.ranges, self.cu_seqlens), (*other.ranges, other.cu_seqlens))
        return all(np.array_equal(a, b) for a, b in pairs)

    def __hash__(self) -> int:
        return hash((self.cu_seqlens.tobytes(), *(ranges.tobytes() for ranges in self.ranges)))

    def __getstate__(self) -> dict[str, Any]:
        return {"ranges": self.ranges, "cu_seqlens": self.cu_seqlens}

    @property
    def most(self) -> int:
        """Fragments of the rank with the most of them."""
        return max(map(len, self.ranges))

    @cached_property
    def order(self) -> Ints:
        """``(F, 2)`` int64: rank, and number in that rank, of all fragments in the order of the sequence."""
        rank = np.repeat(np.arange(len(self.ranges)), self._counts)
        number = np.arange(len(rank)) - np.repeat(self._first, self._counts)
        return np.stack([rank, number], axis=1)[self._by_start]

    @cached_property
    def passes(self) -> Ints:
        """``(N, 4)`` int64: which fragment passes a state to which, in the order of the sequence: the rank and the
        fragment's number in that rank, of the giver and then of the taker."""
        at = np.flatnonzero(self._takes[self._by_start])
        return np.concatenate([self.order[at - 1], self.order[at]], axis=1)

    def takes(self, rank: int) -> Bools:
        """``(F_r,)``: does a fragment begin within a document, whose state it takes from the one before?"""
        return self._of(rank, self._takes)

    def gives(self, rank: int) -> Bools:
        """``(F_r,)``: does a fragment end within a document, whose state the next one takes?"""
        return self._of(rank, self._gives)

    def carries(self, rank: int) -> Bools:
        """``(F_r,)``: does the state that a fragment takes reach the one that it gives, as no document begins in it?"""
        return self._of(rank, self.carried)

    @cached_property
    def carried(self) -> Bools:
        """``(F,)``: ``carries`` of all ranks, one after another."""
        ranges = np.concatenate(self.ranges)
        inside = np.searchsorted(self._starts, ranges[:, 1]) - np.searchsorted(self._starts, ranges[:, 0], side="right")
        carried: Bools = self._takes & self._gives & (inside == 0)
        return carried

    def segments(self, rank: int) -> Ints:
        """``(S_r + 1,)`` int64: cumulative lengths of the segments of a rank, in rows of its shard: the ``cu_seqlens``
        of a kernel for packed documents, which begins anew in each."""
        return self._segments(rank)[0]

    def first_segments(self, rank: int) -> Ints:
        """``(F_r,)`` int64: the first segment of each fragment, which takes the state."""
        return self._segments(rank)[1]

    def last_segments(self, rank: int) -> Ints:
        """``(F_r,)`` int64: the last segment of each fragment, which gives the state."""
        return self._segments(rank)[2]

    def _segments(self, rank: int) -> tuple[Ints, Ints, Ints]:
        ranges = self.ranges[rank]
        low = np.searchsorted(self._starts, ranges[:, 0], side="right")
        counts = np.searchsorted(self._starts, ranges[:, 1]) - low  # documents that begin behind the first token
        row = np.cumsum(ranges[:, 1] - ranges[:, 0]) - ranges[:, 1]  # of a global token, less that token
        inner = [self._starts[a : a + n] + shift for a, n, shift in zip(low, counts, row)]
        begins = [np.concatenate([[token + shift], rows]) for token, shift, rows in zip(ranges[:, 0], row, inner)]
        bounds = np.concatenate([*begins, [int((ranges[:, 1] - ranges[:, 0]).sum())]])
        first = np.cumsum(counts + 1) - counts - 1
        return bounds, first, first + counts

    # ---- of all ranks, one after another ------------------------------------------------------------

    @cached_property
    def _counts(self) -> Ints:
        return np.array([len(ranges) for ranges in self.ranges])

    @cached_property
    def _first(self) -> Ints:
        return np.cumsum(self._counts) - self._counts

    def _of(self, rank: int, values: Bools) -> Bools:
        return values[self._first[rank] : self._first[rank] + self._counts[rank]]

    @cached_property
    def _by_start(self) -> Ints:
        return np.argsort(np.concatenate(self.ranges)[:, 0])

    @cached_property
    def _starts(self) -> Ints:
        """Where documents begin, and the pad."""
        return np.unique(self.cu_seqlens)

    @cached_property
    def _takes(self) -> Bools:
        return self._is_within(np.concatenate(self.ranges)[:, 0])

    @cached_property
    def _gives(self) -> Bools:
        return self._is_within(np.concatenate(self.ranges)[:, 1])

    def _is_within(self, tokens: Ints) -> Bools:
        within: Bools = ~np.isin(tokens, self._starts) & (tokens < self._starts[-1])
        return within
