# SPDX-License-Identifier: Apache-2.0
"""Plans for the layout that Megatron, Transformer Engine and torch give to context-parallel ranks: zigzag.

A framework that has dispatched its tokens so can keep them, and its positions and labels, and call ``attend``.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

from magi_attention.api import Mask, Plan
from magi_attention.errors import ContractError
from magi_attention.meta.planner import plan_for_partitions


@lru_cache(maxsize=64)  # the layers of some batches; equal calls give the plan that has been used
def zigzag_plan(
    bounds: tuple[int, ...], cp_size: int, is_causal: bool = True, window: tuple[int, int] | None = None
) -> Plan:
    """The plan of documents between ``bounds`` where rank r holds chunks r and ``2 cp_size - 1 - r`` of each document.

    ``window`` is (left, right), -1 for no bound. ``ContractError`` if a document's length is no
    multiple of ``2 cp_size``.
    """
    lengths = [b - a for a, b in zip(bounds, bounds[1:])]
    if cp_size > 1 and (bad := [n for n in lengths if n % (2 * cp_size)]):
        raise ContractError(f"A document has {bad[0]} tokens; pad it to a multiple of 2 * {cp_size}, for the ranks.")
    if window is None or tuple(window) == (-1, -1):
        mask = Mask.varlen(bounds, causal=is_causal)
    else:
        mask = Mask.varlen(bounds, window=(window[0], 0 if is_causal else window[1]))
    if cp_size == 1:
        size, owners = bounds[-1], [[0]]
    else:
        size = gcd(*(n // (2 * cp_size) for n in lengths if n))
        owners = [[] for _ in range(cp_size)]
        for begin, length in zip(bounds, lengths):
            per_part = length // (2 * cp_size) // size
            for part in range(2 * cp_size):
                first = begin // size + part * per_part
                owners[min(part, 2 * cp_size - 1 - part)] += range(first, first + per_part)
    return plan_for_partitions(mask.slices, bounds[-1], 0, size, owners, cu_seqlens=mask.cu_seqlens, plan_type=Plan)


__all__ = ["zigzag_plan"]
