# SPDX-License-Identifier: Apache-2.0
"""Rows in the other layouts of recurrent layers, contiguous shards and all tokens of a part of the heads, and back.

Each way is one all-to-all-v. Gradients take the other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from magi_attention.errors import ContractError
from magi_attention.functional.recurrent.rows import RowExchange
from magi_attention.functional.tokens.layout import TokenLayout
from magi_attention.meta.recurrent import tables
from magi_attention.meta.recurrent.ways import parts_of_heads


def to_contiguous(x: torch.Tensor, layout: TokenLayout, dim: int = 0) -> torch.Tensor:
    """The rows of this rank's contiguous shard, along ``dim``, from the local rows of all ranks."""
    return _moved(x, layout, dim, _inwards(layout, "contiguous"))


def from_contiguous(x: torch.Tensor, layout: TokenLayout, dim: int = 0) -> torch.Tensor:
    """The inverse of ``to_contiguous``."""
    return _moved(x, layout, dim, _outwards(layout, "contiguous"))


def _moved(x: torch.Tensor, layout: TokenLayout, dim: int, exchange: RowExchange) -> torch.Tensor:
    layout.check_rows_of_all(x, dim, layout.num_local, exchange.stage)
    return exchange.fetch(x.movedim(dim, 0)).movedim(0, dim)


def _inwards(layout: TokenLayout, way: str) -> RowExchange:
    make = {"contiguous": tables.to_contiguous, "heads": tables.to_heads}[way]
    return RowExchange(layout, f"to {way}", f"to_{way}", partial(make, layout.plan))


def _outwards(layout: TokenLayout, way: str) -> RowExchange:
    make = {"contiguous": tables.from_contiguous, "heads": tables.from_heads}[way]
    return RowExchange(layout, f"from {way}", f"from_{way}", partial(make, layout.plan))


@dataclass(frozen=True)
class LayerLayout:
    """``way`` "contiguous" or "heads" for the tensors of a layer with ``heads`` heads of values."""

    layout: TokenLayout
    way: str
    heads: int

    @property
    def parts(self) -> int:
        """Into how many the heads of a token divide."""
        return self.layout.transport.size if self.way == "heads" else 1

    def inwards(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Local tensors ``(T, h, ...)`` as this rank's ``(N, h / parts, ...)``; those of one dtype travel together."""
        exchange, split = _inwards(self.layout, self.way), [self._split(x, 1) for x in tensors]
        found: dict[int, torch.Tensor] = {}
        for dtype in dict.fromkeys(x.dtype for x in tensors):
            at = [i for i, x in enumerate(tensors) if x.dtype == dtype]
            sent = torch.cat([split[i].flatten(2).flatten(0, 1) for i in at], dim=1)
            got = exchange.fetch(sent).split([split[i].shape[2:].numel() for i in at], dim=1)
            found |= {i: rows.reshape(len(rows), *split[i].shape[2:]) for i, rows in zip(at, got)}
        return [found[i] for i in range(len(tensors))]

    def outwards(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse: ``(N, h, ...)`` of this rank as local ``(T, h parts, ...)``."""
        rows = _outwards(self.layout, self.way).fetch(x)
        return rows.reshape(self.layout.num_local, self.parts * x.shape[1], *x.shape[2:])

    def own_heads(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``(h, ...)``, in the order of ``inwards``."""
        part = self.layout.rank if self.way == "heads" else 0
        return self._split(parameter, 0).select(0, part)

    def _split(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """``(..., h, ...)`` as ``(..., parts, h / parts, ...)``, heads copied where they are too few to divide."""
        copies = parts_of_heads(x.shape[dim], self.heads, self.parts)
        if copies is None:
            raise ContractError(
                f"A tensor has {x.shape[dim]} heads and values {self.heads}, which do not divide by {self.parts} "
                'ranks; give way="states" or "contiguous".'
            )
        if copies > 1:
            x = x.unsqueeze(dim + 1).expand(*x.shape[: dim + 1], copies, *x.shape[dim + 1 :]).flatten(dim, dim + 1)
        return x.reshape(*x.shape[:dim], self.parts, x.shape[dim] // self.parts, *x.shape[dim + 1 :])
