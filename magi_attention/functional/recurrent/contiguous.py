# SPDX-License-Identifier: Apache-2.0
"""Rows to contiguous shards and back, each by one all-to-all-v, for layers that want their tokens in order.

Shard r of these has as many rows as rank r holds anyway, the ones that follow those of rank r - 1.
"""

from __future__ import annotations

import numpy as np
import torch

from magi_attention.functional.recurrent.rows import Ints, RowExchange, Wanted
from magi_attention.functional.tokens.layout import TokenLayout
from magi_attention.meta.plan import Plan


def contiguous_bounds(plan: Plan) -> Ints:
    """``(cp_size + 1,)``: global positions, of the padded sequence, where contiguous shards begin and the last ends."""
    bounds: Ints = np.concatenate([[0], np.cumsum(plan.shard_sizes)])
    return bounds


def owned(plan: Plan, tokens: Ints) -> Wanted:
    """Where global tokens, -1 for none, are held."""
    chunk, is_some = np.maximum(tokens, 0) // plan.chunk_size, tokens >= 0
    row = plan.local_start_of_chunk[chunk] + np.maximum(tokens, 0) % plan.chunk_size
    return Wanted(np.where(is_some, plan.rank_of_chunk[chunk], -1), row)


def to_contiguous(x: torch.Tensor, layout: TokenLayout, dim: int = 0) -> torch.Tensor:
    """The rows of this rank's contiguous shard, along ``dim``, from the local rows of all ranks."""
    plan, bounds = layout.plan, contiguous_bounds(layout.plan)

    def wanted() -> list[Wanted]:
        return [owned(plan, np.arange(a, b)) for a, b in zip(bounds[:-1], bounds[1:])]

    return _moved(x, layout, dim, RowExchange(layout, "to contiguous", "to_contiguous", wanted))


def from_contiguous(x: torch.Tensor, layout: TokenLayout, dim: int = 0) -> torch.Tensor:
    """The inverse of ``to_contiguous``."""
    plan, bounds = layout.plan, contiguous_bounds(layout.plan)

    def wanted() -> list[Wanted]:
        found = []
        for tokens in map(plan.position_array, range(plan.cp_size)):
            rank = np.searchsorted(bounds, tokens, side="right") - 1
            found.append(Wanted(rank, tokens - bounds[rank]))
        return found

    return _moved(x, layout, dim, RowExchange(layout, "from contiguous", "from_contiguous", wanted))


def _moved(x: torch.Tensor, layout: TokenLayout, dim: int, exchange: RowExchange) -> torch.Tensor:
    layout.check_rows_of_all(x, dim, layout.num_local, exchange.stage)
    return exchange.fetch(x.movedim(dim, 0)).movedim(0, dim)


__all__ = ["contiguous_bounds", "from_contiguous", "owned", "to_contiguous"]
