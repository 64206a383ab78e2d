# SPDX-License-Identifier: Apache-2.0
"""Run time: token layout, distributed attention and the kernel functions."""

from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.functional.policy import AttnPolicy
from magi_attention.functional.runtime import AttnRuntime
from magi_attention.functional.sparse.block_sparse import block_sparse_attn_func
from magi_attention.functional.sparse.index_attn import index_attn_func
from magi_attention.functional.tokens.layout import TokenLayout, gather, positions, shard

__all__ = [
    "AttnPolicy",
    "AttnRuntime",
    "TokenLayout",
    "flex_flash_attn_func",
    "gather",
    "block_sparse_attn_func",
    "index_attn_func",
    "positions",
    "shard",
]
