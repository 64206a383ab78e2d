# SPDX-License-Identifier: Apache-2.0
"""Which backward runs lists that ``IndexFfa`` takes: the query-stationary or the key-stationary one.

The query-stationary one (``csrc/ffa/sm90/index/bwd``) takes all lists, and adds dk and dv in float32 in memory. The
key-stationary one (``csrc/ffa/sm90/index/bwd/keys``) adds dq, half as much, and has steps as the dense backward. Its
tiles are 128 keys and its steps 64 queries of one head, so lists that fewer queries share would leave rows unused.
"""

from __future__ import annotations

from magi_attention.env import general
from magi_attention.kernels.index_attn.types import IndexProblem, PreparedIndices

STEP_QUERIES, TILE_KEYS = 64, 128
GRANULE_KEYS = 16  # rows of a warp, which see a block of queries or do not
MOST_GROUP, MOST_QUERY_BLOCKS = 255, 1 << 23
LEAST_KEY_BLOCK = 64  # half a tile: with smaller ones, few keys of a tile may be seen
MOST_PARTS = 8  # among which the query heads of a tile are split
LEAST_WORK_TILES = 132  # one for each multiprocessor of an H100
MOST_LIST_BYTES = 1 << 30  # of the lists by tiles of keys, which have room for all blocks of queries


def why_not_by_keys(problem: IndexProblem, lists: PreparedIndices) -> str | None:
    """None if the key-stationary backward can run the problem, else a sentence."""
    if problem.options.deterministic:
        return "The key-stationary backward adds dq in any order, so it is not deterministic."
    if lists.q_block_size % STEP_QUERIES or lists.k_block_size % GRANULE_KEYS:
        return (
            f"Blocks are of {lists.q_block_size} queries and {lists.k_block_size} keys; the key-stationary backward "
            f"takes multiples of {STEP_QUERIES} and {GRANULE_KEYS}."
        )
    if lists.k_start is not None or lists.k_end is not None:
        return "The key-stationary backward takes no lists with a k_start or k_end."
    if problem.num_heads_q // problem.num_heads_kv > MOST_GROUP or lists.rows.shape[0] > MOST_QUERY_BLOCKS:
        return f"The key-stationary backward takes {MOST_GROUP} heads on a kv head, {MOST_QUERY_BLOCKS} query blocks."
    return None


def is_key_stationary(problem: IndexProblem, lists: PreparedIndices) -> bool:
    """Does the key-stationary backward run? As ``MAGI_ATTENTION_INDEX_BACKWARD`` says, where it can.

    By default where key blocks are half a tile or more, there are enough tiles for a GPU, and its lists take no more
    than ``MOST_LIST_BYTES``.
    """
    asked, query_blocks = general.index_backward(), lists.rows.shape[0]
    is_empty = query_blocks == 0 or lists.total_k == 0
    if asked == "queries" or is_empty or why_not_by_keys(problem, lists) is not None:
        return False
    if asked == "keys":
        return True
    tiles = problem.num_heads_kv * -(-lists.total_k // TILE_KEYS)
    parts = min(problem.num_heads_q // problem.num_heads_kv, MOST_PARTS)
    is_enough = tiles * parts >= LEAST_WORK_TILES and 4 * query_blocks * tiles <= MOST_LIST_BYTES
    return is_enough and lists.k_block_size >= LEAST_KEY_BLOCK
