# SPDX-License-Identifier: Apache-2.0
"""Causal convolution over the borders of fragments: the rows before a fragment come from the ranks that hold them."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import torch
import torch.nn.functional as F

from magi_attention.common.infer import CuSeqlens
from magi_attention.common.plan_cache import Kind
from magi_attention.common.scalars import as_int
from magi_attention.errors import ContractError
from magi_attention.functional.recurrent.rows import RowExchange
from magi_attention.functional.tokens.layout import TokenLayout, table_tensor
from magi_attention.meta.fragments import Fragments
from magi_attention.meta.recurrent.tables import Ints, Wanted, owned

_SPREAD: Kind[Hashable, tuple[torch.Tensor, torch.Tensor]] = Kind("rows of a convolution")


def history(x: torch.Tensor, layout: TokenLayout, width: int, cu_seqlens: CuSeqlens | None = None) -> torch.Tensor:
    """The ``width - 1`` rows before each fragment of this rank, ``(F, width - 1, ...)``, zero where they are not of the
    document that the fragment begins with. ``x`` ``(T, ...)`` are the local rows."""
    width = as_int(width, "width")
    if width < 1:
        raise ContractError(f"width is {width}; a convolution has at least the token itself, 1.")
    layout.check_rows_of_all(x, 0, layout.num_local, "conv history")
    fragments = layout.plan.fragments(cu_seqlens)

    def wanted() -> list[Wanted]:
        return [owned(layout.plan, _before(fragments, r, width).reshape(-1)) for r in range(layout.plan.cp_size)]

    name = ("conv history", width, None if cu_seqlens is None else tuple(fragments.cu_seqlens.tolist()))
    rows = RowExchange(layout, name, "conv history", wanted).fetch(x)
    return rows.reshape(len(fragments.ranges[layout.rank]), width - 1, *x.shape[1:])


def _before(fragments: Fragments, rank: int, width: int) -> Ints:
    """``(F, width - 1)``: global tokens before each fragment, ascending, -1 where another document is."""
    starts, begin = fragments.cu_seqlens, fragments.ranges[rank][:, 0]
    tokens = begin[:, None] + np.arange(1 - width, 0)
    of_document = starts[np.searchsorted(starts, begin, side="right") - 1]
    found: Ints = np.where(fragments.takes(rank)[:, None] & (tokens >= of_document[:, None]), tokens, -1)
    return found


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layout: TokenLayout,
    cu_seqlens: CuSeqlens | None = None,
) -> torch.Tensor:  # fmt: skip
    """``out[t, c] = bias[c] + sum_w weight[c, w] x[t - W + 1 + w, c]`` over the tokens of t's own document.

    ``x`` ``(T, C)`` are the local rows, ``weight`` ``(C, W)``, ``bias`` ``(C,)`` or None. One convolution runs over
    all segments, with the rows before each of them in between.
    """
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[0] != x.shape[1]:
        raise ContractError(
            f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}; give (T, C) and (C, W), one filter a channel."
        )
    width = weight.shape[1]
    before = history(x, layout, width, cu_seqlens)
    fragments, rank, device = layout.plan.fragments(cu_seqlens), layout.rank, x.device

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        at = _spread(fragments, rank, width)
        halo = at[_fragment_rows(fragments, rank)][:, None] + np.arange(1 - width, 0)
        return table_tensor(at, device), table_tensor(halo.reshape(-1), device)

    key = (width, device, None if cu_seqlens is None else tuple(fragments.cu_seqlens.tolist()))
    own, halo = layout.cache.get(_SPREAD, key, make)
    spread = x.new_zeros((len(x) + (width - 1) * (len(fragments.segments(rank)) - 1), x.shape[1]))
    spread = spread.index_copy(0, own, x).index_copy(0, halo, before.flatten(0, 1))
    out = F.conv1d(spread.T[None], weight[:, None], bias, groups=x.shape[1])[0].T
    return out.index_select(0, own - (width - 1))


def _fragment_rows(fragments: Fragments, rank: int) -> Ints:
    """``(F,)``: the first local row of each fragment."""
    lengths = np.diff(fragments.ranges[rank], axis=1)[:, 0]
    rows: Ints = np.cumsum(lengths) - lengths
    return rows


def _spread(fragments: Fragments, rank: int, width: int) -> Ints:
    """Where local rows stand with ``width - 1`` rows before each segment."""
    bounds = fragments.segments(rank)
    segment = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    at: Ints = np.arange(bounds[-1]) + (width - 1) * (segment + 1)
    return at
