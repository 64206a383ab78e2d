# SPDX-License-Identifier: Apache-2.0
"""Labels and positions that respect the documents of a packed sequence.

``cu_seqlens`` is a list, array or tensor ``[0, n0, n0 + n1, ...]`` over the unpadded sequence, or None for the
documents that the plan's mask knows.
"""

from __future__ import annotations

from typing import Any

import torch

from magi_attention.common.scalars import as_int
from magi_attention.errors import ContractError
from magi_attention.functional.tokens.layout import TokenLayout, positions, roll


def labels(
    tokens: torch.Tensor,
    layout: TokenLayout,
    depth: int = 1,
    ignore_index: int = -100,
    dim: int = 0,
    cu_seqlens: Any = None,
) -> torch.Tensor:
    """For every local row the row ``depth`` further in the same document, ``ignore_index`` where there is none.

    There is none for the last ``depth`` rows of a document and for pad rows. ``tokens`` is local along ``dim``, of any
    dtype that can hold ``ignore_index``. Collective, as ``roll`` is. ``ContractError`` where the documents are not
    known, for a depth below 1 and for a dtype too small.
    """
    with layout.telling(tokens, "labels"):
        depth = as_int(depth, "depth")
        if depth < 1:
            raise ContractError(f"depth is {depth}; 1 is the next token, 2 the one after it.")
        _check_holds(tokens.dtype, ignore_index)
        _, ends = layout.document_bounds(cu_seqlens, tokens.device)
    is_last = layout.index("local", tokens.device) + depth >= ends
    rolled = roll(tokens, layout, -depth, dim).movedim(dim, 0)
    return rolled.masked_fill(is_last.view(-1, *[1] * (rolled.dim() - 1)), ignore_index).movedim(0, dim)


def document_positions(layout: TokenLayout, device: torch.device | str, cu_seqlens: Any = None) -> torch.Tensor:
    """Position of every local row in its document, int64, from 0; pad rows get that of the last real token."""
    starts, _ = layout.document_bounds(cu_seqlens, torch.device(device))
    return positions(layout, device) - starts


def _check_holds(dtype: torch.dtype, value: int) -> None:
    if dtype == torch.bool:
        raise ContractError("The tokens are bools, which cannot mark where a label is absent; give tokens.long().")
    if not dtype.is_floating_point and not dtype.is_complex:
        limits = torch.iinfo(dtype)
        if not limits.min <= as_int(value, "ignore_index") <= limits.max:
            raise ContractError(
                f"The tokens are {dtype}, which cannot hold ignore_index {value}; give tokens.long(), as "
                "cross_entropy wants labels."
            )
