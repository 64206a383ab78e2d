# SPDX-License-Identifier: Apache-2.0
"""Run time: token layout, distributed attention, the kernel function and the correction helpers."""

from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.functional.policy import AttnPolicy
from magi_attention.functional.runtime import AttnRuntime
from magi_attention.functional.sparse.block_sparse import block_sparse_attn_func
from magi_attention.functional.sparse.index_attn import index_attn_func
from magi_attention.functional.tokens.layout import TokenLayout, gather, positions, shard
from magi_attention.kernels.reference.correction import (
    correct_attn_lse,
    correct_attn_lse_with_sink,
    correct_attn_out,
    correct_attn_out_lse,
    correct_attn_out_lse_with_sink,
    correct_attn_out_with_sink,
)

__all__ = [
    "AttnPolicy",
    "AttnRuntime",
    "TokenLayout",
    "correct_attn_lse",
    "correct_attn_lse_with_sink",
    "correct_attn_out",
    "correct_attn_out_lse",
    "correct_attn_out_lse_with_sink",
    "correct_attn_out_with_sink",
    "flex_flash_attn_func",
    "gather",
    "block_sparse_attn_func",
    "index_attn_func",
    "positions",
    "shard",
]
