# SPDX-License-Identifier: Apache-2.0
"""Which forward runs lists that ``IndexFfa`` takes: the one that gathers keys or the one that copies blocks of them.

The one that gathers (``csrc/ffa/sm90/index/fwd``) takes all lists, and spends a warpgroup on the rows of K and V. The
one that copies blocks (``csrc/ffa/sm90/index/fwd/blocks``) is the dense forward with the key blocks of a list. Its
tiles are 128 rows of queries that share a list, or 64 where these do not fill 128.
"""

from __future__ import annotations

from magi_attention.env import general
from magi_attention.kernels.index_attn.types import IndexProblem, PreparedIndices

TILE_ROWS = 64  # the smaller tile
LEAST_BOX_KEYS = 16  # of one copy
LEAST_KEY_BLOCK = 64  # a step is two copies or one
MOST_ROWS = 1 << 31  # tokens times query heads


def why_not_by_blocks(problem: IndexProblem, lists: PreparedIndices) -> str | None:
    """None if the forward that copies blocks can run the problem, else a sentence."""
    if lists.k_block_size % LEAST_BOX_KEYS:
        return (
            f"Blocks are of {lists.k_block_size} keys; the forward that copies blocks takes multiples of "
            f"{LEAST_BOX_KEYS}."
        )
    group = problem.num_heads_q // problem.num_heads_kv
    if TILE_ROWS % group or lists.q_block_size * group % TILE_ROWS:
        return (
            f"Lists are of {lists.q_block_size} queries of {group} heads; the forward that copies blocks takes heads "
            f"that divide {TILE_ROWS}, and multiples of {TILE_ROWS} rows."
        )
    if lists.k_start is not None or lists.k_end is not None:
        return "The forward that copies blocks takes no lists with a k_start or k_end."
    if lists.rows.shape[0] * lists.q_block_size * problem.num_heads_q >= MOST_ROWS:
        return f"The forward that copies blocks takes fewer than {MOST_ROWS} tokens times query heads."
    return None


def copies_blocks(problem: IndexProblem, lists: PreparedIndices) -> bool:
    """Does the forward that copies blocks run? As ``MAGI_ATTENTION_INDEX_FORWARD`` says, where it can.

    By default where key blocks are ``LEAST_KEY_BLOCK`` or more.
    """
    asked, is_empty = general.index_forward(), lists.rows.shape[0] == 0 or lists.total_k == 0
    if asked == "gather" or is_empty or why_not_by_blocks(problem, lists) is not None:
        return False
    return asked == "blocks" or lists.k_block_size >= LEAST_KEY_BLOCK
