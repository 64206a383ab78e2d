# SPDX-License-Identifier: Apache-2.0
"""Where each rank gets its rows from when the layout of a recurrent layer is not that of the plan.

* contiguous: shard r follows shard r - 1 and has as many rows as rank r holds anyway
* by heads: a rank has all tokens of the sequence, without pads, and one of ``cp_size`` equal parts of the heads
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.infer import CuSeqlens
from magi_attention.meta.fragments import Fragments
from magi_attention.meta.plan import Plan

Ints = NDArray[np.int64]


class Wanted(NamedTuple):
    """(N,) each, of one rank: the owner of each row, -1 for zeros, and the row there."""

    owner: Ints
    row: Ints


def owned(plan: Plan, tokens: Ints) -> Wanted:
    """Where global tokens, -1 for none, are held."""
    chunk, is_some = np.maximum(tokens, 0) // plan.chunk_size, tokens >= 0
    row = plan.local_start_of_chunk[chunk] + np.maximum(tokens, 0) % plan.chunk_size
    return Wanted(np.where(is_some, plan.rank_of_chunk[chunk], -1), row)


# ---- contiguous shards --------------------------------------------------------------------------------


def contiguous_bounds(plan: Plan) -> Ints:
    """``(cp_size + 1,)``: global positions, of the padded sequence, where contiguous shards begin and the last ends."""
    bounds: Ints = np.concatenate([[0], np.cumsum(plan.shard_sizes)])
    return bounds


def contiguous_fragments(plan: Plan, cu_seqlens: CuSeqlens | None = None) -> Fragments:
    """``Plan.fragments`` of contiguous shards: one of each rank."""
    bounds = contiguous_bounds(plan)
    ranges = tuple(np.array([[a, b]]) for a, b in zip(bounds[:-1], bounds[1:]))
    return Fragments(ranges, plan.fragments(cu_seqlens).cu_seqlens)


def to_contiguous(plan: Plan) -> list[Wanted]:
    """The rows of each contiguous shard."""
    bounds = contiguous_bounds(plan)
    return [owned(plan, np.arange(a, b)) for a, b in zip(bounds[:-1], bounds[1:])]


def from_contiguous(plan: Plan) -> list[Wanted]:
    """The rows of each rank, from contiguous shards."""
    bounds, found = contiguous_bounds(plan), []
    for tokens in map(plan.position_array, range(plan.cp_size)):
        rank = np.searchsorted(bounds, tokens, side="right") - 1
        found.append(Wanted(rank, tokens - bounds[rank]))
    return found


# ---- by heads -----------------------------------------------------------------------------------------


def to_heads(plan: Plan) -> list[Wanted]:
    """All tokens, for each rank its part of the heads. Row ``t * cp_size + r`` of a rank is part r of its row t."""
    owner, row = owned(plan, np.arange(plan.total_tokens))
    return [Wanted(owner, row * plan.cp_size + rank) for rank in range(plan.cp_size)]


def from_heads(plan: Plan) -> list[Wanted]:
    """Row ``t * cp_size + r`` of a rank is part r of its token t, which rank r made; zeros for pads."""
    parts, found = np.arange(plan.cp_size), []
    for tokens in map(plan.position_array, range(plan.cp_size)):
        owner = np.where(tokens[:, None] < plan.total_tokens, parts, -1)
        found.append(Wanted(owner.reshape(-1), tokens.repeat(plan.cp_size)))
    return found


def whole_fragments(plan: Plan, cu_seqlens: CuSeqlens | None = None) -> Fragments:
    """What a rank holds by heads, as the only rank: all tokens without pads."""
    return Fragments((np.array([[0, plan.total_tokens]]),), plan.fragments(cu_seqlens).cu_seqlens)
