# SPDX-License-Identifier: Apache-2.0
"""Rows that ranks fetch from one another by a table that all of them know: one all-to-all-v, and one for gradients.

Rank r wants row ``row[r][i]`` of rank ``owner[r][i]`` as its i-th row, or zeros where that owner is -1. The gradient of
a row is the sum of those of all its copies, added in rank order, so it has the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from magi_attention.common.plan_cache import Kind, on_gpu
from magi_attention.functional.tokens.layout import TokenLayout, table_tensor
from magi_attention.meta.recurrent.tables import Ints, Wanted


@dataclass(frozen=True, eq=False)
class RowRoute:
    """A table as one rank sees it. ``copies[n]`` are pairs of what was sent, as numbers in ``send_rows``, and the rows
    that it was, each row once: the first copies of rows, the second ones, and so on."""

    num_rows: int  # that this rank gets
    send_rows: Ints  # grouped by receiving rank
    send_counts: tuple[int, ...]
    recv_places: Ints  # of every arriving row, grouped by sending rank
    recv_counts: tuple[int, ...]
    copies: tuple[tuple[Ints, Ints], ...]
    is_local: bool  # no rank gets a row of another

    @classmethod
    def of(cls, wanted: Sequence[Wanted], rank: int) -> RowRoute:
        mine = wanted[rank]
        sent = [w.row[w.owner == rank] for w in wanted]
        send_rows = np.concatenate(sent).astype(np.int64)
        by_owner = np.argsort(mine.owner, kind="stable")
        places = by_owner[np.searchsorted(mine.owner[by_owner], 0) :]
        counts = np.bincount(mine.owner[places], minlength=len(wanted))
        is_local = all(((w.owner == r) | (w.owner < 0)).all() for r, w in enumerate(wanted))
        return cls(
            len(mine.owner), send_rows, tuple(map(len, sent)), places, tuple(counts.tolist()), _copies(send_rows),
            is_local,
        )  # fmt: skip


def _copies(rows: Ints) -> tuple[tuple[Ints, Ints], ...]:
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    number = np.arange(len(rows)) - np.searchsorted(ordered, ordered)  # how many copies of a row went before this one
    most = int(number.max()) + 1 if len(rows) else 0
    return tuple((order[number == n], ordered[number == n]) for n in range(most))


_ROUTES: Kind[Hashable, RowRoute] = Kind(
    "routes of rows", lambda route: [route.send_rows, route.recv_places, *(x for pair in route.copies for x in pair)]
)
_TENSORS: Kind[tuple[Hashable, torch.device], list[torch.Tensor]] = Kind("rows of routes", on_gpu)


class RowExchange:
    """``make`` gives what all ranks want; it is asked once for each ``name`` and layout. ``stage`` names the exchange
    in messages."""

    def __init__(self, layout: TokenLayout, name: Hashable, stage: str, make: Callable[[], Sequence[Wanted]]) -> None:
        self.layout, self.name, self.stage = layout, name, stage
        self.route = layout.cache.get(_ROUTES, name, lambda: RowRoute.of(make(), layout.rank))

    def fetch(self, x: torch.Tensor) -> torch.Tensor:
        """``(num_rows, ...)`` from the rows ``x`` of this rank. Differentiable, twice too. Collective."""
        return _apply_fetch(x, self)

    def move(self, x: torch.Tensor) -> torch.Tensor:
        """``fetch`` without gradients."""
        route, (send_rows, places, *_) = self.route, self._tensors(x.device)
        got = self._send(x.index_select(0, send_rows), len(places), route.recv_counts, route.send_counts, self.stage)
        if len(places) < route.num_rows:
            return x.new_zeros((route.num_rows, *x.shape[1:])).index_copy_(0, places, got)
        return torch.empty_like(got).index_copy_(0, places, got)

    def give_back(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """The adjoint of ``move``: ``(rows, ...)``."""
        route, (send_rows, places, *copies) = self.route, self._tensors(x.device)
        stage = f"{self.stage}, backward"
        got = self._send(x.index_select(0, places), len(send_rows), route.send_counts, route.recv_counts, stage)
        out = x.new_zeros((rows, *x.shape[1:]))
        for at, to in zip(copies[::2], copies[1::2]):
            out[to] = out[to] + got[at]
        return out

    def _send(
        self, x: torch.Tensor, rows: int, recv_counts: tuple[int, ...], send_counts: tuple[int, ...], stage: str
    ) -> torch.Tensor:
        if self.route.is_local:
            return x
        got = x.new_empty((rows, *x.shape[1:]))
        with self.layout.exchange(x, stage):
            self.layout.transport.all_to_all_v(got, x, recv_counts, send_counts).wait()
        return got

    def _tensors(self, device: torch.device) -> list[torch.Tensor]:
        def make() -> list[torch.Tensor]:
            route = self.route
            arrays = [route.send_rows, route.recv_places, *(x for pair in route.copies for x in pair)]
            return [table_tensor(array, device) for array in arrays]

        return self.layout.cache.get(_TENSORS, (self.name, device), make)


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
        ctx.exchange, ctx.rows = exchange, x.shape[0]
        return exchange.move(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _apply_give_back(grad, ctx.exchange, ctx.rows), None


class _GiveBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: RowExchange, rows: int) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.give_back(x, rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _apply_fetch(grad, ctx.exchange), None, None


# With the types that torch does not give to ``apply``.
_apply_fetch: Callable[..., torch.Tensor] = _Fetch.apply
_apply_give_back: Callable[..., torch.Tensor] = _GiveBack.apply
