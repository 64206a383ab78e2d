# SPDX-License-Identifier: Apache-2.0
"""The ``mask_mod`` of FlashAttention-4 for masks of key intervals; needs the wheel nvidia-cutlass-dsl.

The kernels ask it pair by pair in blocks that are seen in part. It reads the endpoints of ``mask_blocks`` from the
first auxiliary tensor, so one compiled kernel serves all masks of as many endpoints.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from flash_attn.cute.utils import scalar_to_ssa

_SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


@cache  # one function per length, by which FlashAttention-4 recognises its kernels
def mask_mod_of(num_endpoints: int) -> Any:
    """The function for so many endpoints: 2, 4, or 2^n - 1."""
    made = _by_comparing(num_endpoints) if num_endpoints <= 4 else _by_halving((num_endpoints + 1).bit_length() - 1)
    made.__cute_hash__ = f"magi_attention.{_SOURCE}.{num_endpoints}"
    return made


def _by_comparing(num_endpoints: int) -> Any:
    """Reads the endpoints of a row without regard to the key, so the compiler does it once a row."""
    if num_endpoints == 2:

        @cute.jit
        def see_interval(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
            endpoints = aux_tensors[0]
            start = scalar_to_ssa(endpoints[0, q_idx[0]], cutlass.Int32)
            end = scalar_to_ssa(endpoints[1, q_idx[0]], cutlass.Int32)
            return (start <= kv_idx) & (kv_idx < end)

        return see_interval

    @cute.jit
    def see_two_intervals(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        endpoints = aux_tensors[0]
        start = scalar_to_ssa(endpoints[0, q_idx[0]], cutlass.Int32)
        end = scalar_to_ssa(endpoints[1, q_idx[0]], cutlass.Int32)
        next_start = scalar_to_ssa(endpoints[2, q_idx[0]], cutlass.Int32)
        next_end = scalar_to_ssa(endpoints[3, q_idx[0]], cutlass.Int32)
        return ((start <= kv_idx) & (kv_idx < end)) | ((next_start <= kv_idx) & (kv_idx < next_end))

    return see_two_intervals


def _by_halving(num_steps: int) -> Any:
    """Counts the endpoints that are at most the key, by bisection of 2^num_steps - 1."""

    @cute.jit
    def see_any_intervals(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        endpoints = aux_tensors[0]
        row, key = q_idx[0], kv_idx[0]
        below = cutlass.Int32(0)
        for step in cutlass.range_constexpr(num_steps):
            width = cutlass.const_expr(2 ** (num_steps - 1 - step))
            below = below + width if endpoints[below + width - 1, row] <= key else below
        return scalar_to_ssa(below % 2, cutlass.Int32) == scalar_to_ssa(cutlass.Int32(1), cutlass.Int32)

    return see_any_intervals
