# SPDX-License-Identifier: Apache-2.0
"""How few rows any dispatch has to move, to judge a plan by."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.intervals import merge_intervals
from magi_attention.common.slices import FULL, INVCAUSAL, K0, K1, Q0, Q1, TYPE, trim
from magi_attention.meta.plan import Plan

MOST_TOKENS = 1 << 25  # for which a number for each query is at hand within a second


def least_rows(plan: Plan) -> int | None:
    """Rows of keys and values that all ranks together fetch at least, in any plan of this mask whose queries stay where
    they are, whose heaviest rank is as light as this plan's and whose ranks hold no more tokens. None for more than
    ``MOST_TOKENS`` tokens.

    The mask falls into blocks that have nothing to do with one another, such as documents. A rank that fetches or holds
    u keys of a block computes only queries that see u keys or fewer. So of the ranks with queries of a block, all but
    the j with the most keys have at most ``F(u)`` pairs, where u is the number of keys of the next one and F counts the
    pairs of all queries with at most u keys: ``F(u) >= area - j * heaviest rank``. The same holds for the number of
    queries. The least such u of all j, less the tokens of the block, which somebody holds, have to move.
    """
    if plan.total_tokens > MOST_TOKENS:
        return None
    slices = trim(plan.slices.array)
    if not len(slices):
        return 0
    heaviest, rows = int(plan.areas.max()), max(plan.shard_sizes)
    keys = _keys_of_queries(slices, plan.padded_tokens)
    pairs = np.concatenate([[0], np.cumsum(keys)])
    blocks = blocks_of(slices)
    area = pairs[blocks[:, 1]] - pairs[blocks[:, 0]]
    is_split = (area > heaviest) | (blocks[:, 1] - blocks[:, 0] > rows)
    total = 0
    for start, end in blocks[is_split].tolist():
        seen = np.sort(keys[start:end])
        total += max(_keys_of_ranks(seen[seen > 0], heaviest, rows) - (end - start), 0)
    return total


def _keys_of_ranks(seen: NDArray[np.int64], heaviest: int, rows: int) -> int:
    """Keys that the ranks with queries of a block need together; ``seen`` (queries,) are those of each, ascending."""
    pairs = np.cumsum(seen)
    ranks = max(-(-int(pairs[-1]) // heaviest), -(-len(seen) // rows))
    above = np.arange(ranks)  # ranks with more keys
    by_area = np.searchsorted(pairs, np.maximum(pairs[-1] - above * heaviest, 1))
    by_count = np.maximum(len(seen) - 1 - above * rows, 0)
    return int(seen[np.maximum(by_area, by_count)].sum())


def _keys_of_queries(slices: NDArray[np.int64], total: int) -> NDArray[np.int64]:
    """(total,): keys that each query sees. Slices are trimmed and disjoint."""
    rows, columns = slices[:, Q1] - slices[:, Q0], slices[:, K1] - slices[:, K0]
    kind = slices[:, TYPE]
    first = np.where((kind == FULL) | (kind == INVCAUSAL), columns, columns - rows + 1)
    slope = np.array([0, 1, -1, 0])[kind]
    constant, linear = np.zeros(total + 1, dtype=np.int64), np.zeros(total + 1, dtype=np.int64)
    for sign, at in ((1, slices[:, Q0]), (-1, slices[:, Q1])):
        np.add.at(constant, at, sign * (first - slope * slices[:, Q0]))
        np.add.at(linear, at, sign * slope)
    keys: NDArray[np.int64] = np.cumsum(constant)[:-1] + np.cumsum(linear)[:-1] * np.arange(total)
    return keys


def blocks_of(slices: NDArray[np.int64]) -> NDArray[np.int64]:
    """(blocks, 2) of tokens: no slice reaches from one block into another. Blocks that touch stay two."""
    first, end = np.minimum(slices[:, Q0], slices[:, K0]), np.maximum(slices[:, Q1], slices[:, K1])
    return (merge_intervals(np.stack([2 * first, 2 * end - 1], axis=1)) + 1) // 2
