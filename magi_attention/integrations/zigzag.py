# SPDX-License-Identifier: Apache-2.0
"""Plans for the layout that Megatron, Transformer Engine and torch give to context-parallel ranks: zigzag.

A framework that has dispatched its tokens so can keep them, and its positions and labels, and call ``attend``.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

import numpy as np

from magi_attention.api import Mask, Plan
from magi_attention.common.infer import as_cu_seqlens
from magi_attention.common.slices import SliceTable
from magi_attention.errors import ContractError
from magi_attention.meta.planner import PlanOptions, plan_for_partitions


@lru_cache(maxsize=64)  # the layers of some batches; equal calls give the plan that has been used
def zigzag_plan(
    bounds: tuple[int, ...],
    cp_size: int,
    is_causal: bool = True,
    window: tuple[int, int] | None = None,
    lengths: tuple[int, ...] | None = None,
) -> Plan:
    """The plan of documents between ``bounds`` where rank r holds chunks r and ``2 cp_size - 1 - r`` of each document.

    Args:
        bounds: ``(0, n0, n0 + n1, ...)``, tokens; pads of a document count in.
        cp_size: ranks that share the sequence.
        window: (left, right), -1 for no bound.
        lengths: real tokens at the beginning of each document, or None where no document has pads. Pad rows attend
            nothing and nobody attends them, so their output and gradients are 0. For labels and positions the pads of
            a document are a document of their own.
    Raises:
        ContractError: ``bounds`` decrease or hold no token; a document's length is no multiple of ``2 cp_size``, with
            ``cp_size`` above 1; ``lengths`` do not fit between ``bounds``.
    """
    sizes = tuple(np.diff(as_cu_seqlens(bounds, "bounds")).tolist())
    if not bounds[-1]:
        raise ContractError(f"bounds {list(bounds)[:8]} hold no token; give at least one document that is not empty.")
    if cp_size > 1 and (bad := [n for n in sizes if n % (2 * cp_size)]):
        raise ContractError(f"A document has {bad[0]} tokens; pad it to a multiple of 2 * {cp_size}, for the ranks.")
    mask = _mask_with_pads(bounds, sizes, sizes if lengths is None else lengths, is_causal, window)
    if cp_size == 1:
        size, owners = bounds[-1], [[0]]
    else:
        size = gcd(*(n // (2 * cp_size) for n in sizes if n))
        owners = [[] for _ in range(cp_size)]
        for begin, length in zip(bounds, sizes):
            per_part = length // (2 * cp_size) // size
            for part in range(2 * cp_size):
                first = begin // size + part * per_part
                owners[min(part, 2 * cp_size - 1 - part)] += range(first, first + per_part)
    options = PlanOptions(cu_seqlens=mask.cu_seqlens, plan_type=Plan)
    return plan_for_partitions(mask.slices, bounds[-1], 0, size, owners, options)


def _mask_with_pads(
    bounds: tuple[int, ...],
    sizes: tuple[int, ...],
    lengths: tuple[int, ...],
    is_causal: bool,
    window: tuple[int, int] | None,
) -> Mask:
    """Documents of ``lengths`` tokens that begin at ``bounds``: the mask of the real tokens alone, moved apart."""
    if len(lengths) != len(sizes) or any(not 0 <= n <= room for n, room in zip(lengths, sizes)):
        raise ContractError(
            f"lengths {list(lengths)[:8]} do not fit between bounds {list(bounds)[:9]}; give one for each document, "
            "at most its length with pads."
        )
    begin, length = np.array(bounds[:-1], dtype=np.int64), np.array(lengths, dtype=np.int64)
    begin, length = begin[length > 0], length[length > 0]
    real = np.concatenate([[0], np.cumsum(length)])
    if window is None or tuple(window) == (-1, -1):
        mask = Mask.varlen(real, causal=is_causal)
    else:
        mask = Mask.varlen(real, window=(window[0], 0 if is_causal else window[1]))
    array = mask.slices.array.copy()
    document = np.searchsorted(real, array[:, 0], side="right") - 1
    array[:, :4] += (begin - real[:-1])[document, None]
    documents = np.unique(np.concatenate([bounds, begin + length]))
    return Mask(SliceTable(array), bounds[-1], bounds[-1], mask.name, tuple(documents.tolist()))


__all__ = ["zigzag_plan"]
