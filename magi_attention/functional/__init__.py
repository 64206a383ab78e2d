# SPDX-License-Identifier: Apache-2.0
"""Run time: token layout, distributed attention, the kernel function and the correction helpers."""

from magi_attention.functional.dist_attn import dist_attn as dist_attn_func
from magi_attention.functional.fa4 import ffa_fa4_func
from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.functional.layout import TokenLayout, gather, positions, roll, shard
from magi_attention.functional.layout import gather as undispatch_func
from magi_attention.functional.layout import roll as roll_func
from magi_attention.functional.layout import shard as dispatch_func
from magi_attention.functional.runtime import AttnPolicy, AttnRuntime
from magi_attention.kernels.correction import (
    correct_attn_lse,
    correct_attn_lse_with_sink,
    correct_attn_out,
    correct_attn_out_lse,
    correct_attn_out_lse_with_sink,
    correct_attn_out_with_sink,
)


def roll_simple_func(x, layout: TokenLayout, shift: int, dim: int = 0):
    """``roll`` with one message per contiguous piece; the same result."""
    return roll(x, layout, shift, dim, simple=True)


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
    "dispatch_func",
    "dist_attn_func",
    "ffa_fa4_func",
    "flex_flash_attn_func",
    "gather",
    "positions",
    "roll",
    "roll_func",
    "roll_simple_func",
    "shard",
    "undispatch_func",
]
