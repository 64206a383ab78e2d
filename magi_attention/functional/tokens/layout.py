# SPDX-License-Identifier: Apache-2.0
"""Moving rows between the global order of the packed sequence and the order in which ranks hold them.

All functions are differentiable. *Local* tensors have this rank's tokens along ``dim``, in ascending global
order, pad rows included; *global* tensors have the unpadded ``total_tokens``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from magi_attention.comm.transport.base import Transport
from magi_attention.common.plan_cache import Kind, PlanCache, on_gpu
from magi_attention.common.scalars import as_int, as_number
from magi_attention.errors import ContractError
from magi_attention.functional.calls.first_use import ensure_plan
from magi_attention.functional.calls.inputs import refuse_dtensor
from magi_attention.meta.plan import Plan


@dataclass(frozen=True)
class RollRoute:
    """One roll as this rank sees it; row indices are local."""

    send_rows: np.ndarray  # grouped by receiving rank
    send_counts: tuple[int, ...]
    recv_rows: np.ndarray  # place of every arriving row, grouped by sending rank
    recv_counts: tuple[int, ...]


_INDICES: Kind[tuple[str, torch.device], torch.Tensor] = Kind("positions of tokens")
_DOCUMENTS: Kind[torch.device, tuple[torch.Tensor, torch.Tensor]] = Kind("bounds of documents")
_ROUTES: Kind[int, RollRoute] = Kind("route of a roll", lambda route: [route.send_rows, route.recv_rows])
_ROUTE_ROWS: Kind[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = Kind("rows of a roll", on_gpu)


def table_tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """An array of a plan's tables on ``device``. Autograd may save it, though an evaluation in ``inference_mode`` was
    the first to want it."""
    with torch.inference_mode(False):
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def check_ranks(plan: Plan, transport: Transport) -> None:
    """``ContractError`` unless the group has as many ranks as the plan."""
    if transport.size != plan.cp_size:
        raise ContractError(
            f"The plan is for {plan.cp_size} ranks and the group has {transport.size}; "
            "make the plan with cp_size equal to the group's size."
        )


class TokenLayout:
    """Where the tokens of ``plan`` live, as seen by ``transport.rank``; index tensors are made once."""

    def __init__(self, plan: Plan, transport: Transport) -> None:
        check_ranks(plan, transport)
        self.plan = plan
        self.transport = transport
        self.rank = transport.rank
        self.num_local = plan.shard_sizes[transport.rank]
        self.cache = PlanCache()
        plan.cache.include(self.cache)

    def _dispatched(self) -> np.ndarray:
        """Global position of every row of all shards put one after another."""
        return np.concatenate([self.plan.position_array(r) for r in range(self.plan.cp_size)])

    def index(self, name: str, device: torch.device) -> torch.Tensor:
        """Index tensor ``name`` on ``device``: ``local`` (positions of this shard), ``dispatched``, or
        ``natural`` (place of every token among the shards put one after another)."""

        def make() -> torch.Tensor:
            if name == "local":
                array = self.plan.position_array(self.rank)
            elif name == "dispatched":
                array = self._dispatched()
            else:
                array = np.argsort(self._dispatched(), kind="stable")
            return table_tensor(array, device)

        return self.cache.get(_INDICES, (name, torch.device(device)), make)

    def document_bounds(self, cu_seqlens: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """``plan.document_bounds`` of this rank on ``device``; tensors of the plan's own documents are made once."""
        if cu_seqlens is not None:
            starts, ends = self.plan.document_bounds(self.rank, cu_seqlens)
            return table_tensor(starts, device), table_tensor(ends, device)

        def make() -> tuple[torch.Tensor, torch.Tensor]:
            starts, ends = self.plan.document_bounds(self.rank)
            return table_tensor(starts, device), table_tensor(ends, device)

        return self.cache.get(_DOCUMENTS, torch.device(device), make)

    def roll_route(self, shift: int) -> RollRoute:
        """Who sends which rows to whom for ``out[t] = x[(t - shift) mod padded_tokens]``."""
        shift %= self.plan.padded_tokens
        return self.cache.get(_ROUTES, shift, lambda: self._roll_route(shift))

    def _roll_route(self, shift: int) -> RollRoute:
        plan, me = self.plan, self.rank
        send, recv = [], None
        for rank in range(plan.cp_size):
            source = (plan.position_array(rank) - shift) % plan.padded_tokens
            chunk = source // plan.chunk_size
            owner = plan.rank_of_chunk[chunk]
            row = plan.local_start_of_chunk[chunk] + source % plan.chunk_size
            send.append(row[owner == me])
            if rank == me:
                recv = (np.argsort(owner, kind="stable"), np.bincount(owner, minlength=plan.cp_size))
        assert recv is not None
        return RollRoute(np.concatenate(send), tuple(map(len, send)), recv[0], tuple(recv[1].tolist()))

    def route_rows(self, shift: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """``send_rows`` and ``recv_rows`` of ``roll_route`` on ``device``."""

        def make() -> tuple[torch.Tensor, torch.Tensor]:
            route = self.roll_route(shift)
            return table_tensor(route.send_rows, device), table_tensor(route.recv_rows, device)

        return self.cache.get(_ROUTE_ROWS, (shift % self.plan.padded_tokens, device), make)

    @contextmanager
    def exchange(self, x: torch.Tensor, stage: str, are_rows: bool = True, shift: str = "") -> Iterator[None]:
        """Around every exchange of rows like those of ``x``: its failure is told to the other ranks, and the ranks
        compare what they hold. Without ``are_rows`` something else than the rows of x travels. ``shift``: of a roll."""
        with self.transport.guard(stage):
            ensure_plan(self.plan, self.transport, x, stage, x if are_rows else None, shift)
            yield

    @contextmanager
    def telling(self, x: torch.Tensor, what: str) -> Iterator[None]:
        """Around checks before an exchange: the other ranks, which wait for this one there, are told of a failure."""
        try:
            yield
        except Exception as exc:
            self.transport.decline(exc, x, what)
            raise

    def check_rows_of_all(self, x: torch.Tensor, dim: int, rows: int, what: str, is_global: bool = False) -> None:
        """``check_rows`` before an exchange."""
        with self.telling(x, what):
            self.check_rows(x, dim, rows, what, is_global)

    def check_rows(self, x: torch.Tensor, dim: int, rows: int, what: str, is_global: bool = False) -> None:
        if not isinstance(x, torch.Tensor):
            raise ContractError(f"{what} got a {type(x).__name__}; give a tensor with {rows} rows along dim {dim}.")
        refuse_dtensor("the tensor", x, is_global)
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != rows:
            raise ContractError(
                f"{what} takes {rows} rows along dim {dim}, but the tensor has shape {tuple(x.shape)}; "
                f"this rank holds {self.num_local} of {self.plan.total_tokens} tokens (+{self.plan.pad_size} pad)."
            )


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        ctx.layout = layout
        return x.index_select(0, layout.index("local", x.device))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # the gradient may be differentiated
            return _apply_gather(grad, ctx.layout, False), None
        return _gather_rows(grad, ctx.layout), None


def _gather_rows(x: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
    with layout.exchange(x, "gather (undispatch)"):
        rows = layout.transport.all_gather_v(x.contiguous(), layout.plan.shard_sizes)
    return rows.index_select(0, layout.index("natural", x.device))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: TokenLayout, is_partial_grad: bool) -> torch.Tensor:
        ctx.layout, ctx.is_partial_grad = layout, is_partial_grad
        return _gather_rows(x, layout)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layout: TokenLayout = ctx.layout
        if torch.is_grad_enabled():
            return (_apply_sum_rows if ctx.is_partial_grad else _apply_shard)(grad, layout), None, None
        if not ctx.is_partial_grad:
            return grad.index_select(0, layout.index("local", grad.device)), None, None
        return _sum_rows(grad, layout), None, None


class _SumRows(torch.autograd.Function):
    """The adjoint of ``_Gather`` with partial gradients: every rank's tensor reaches every rank's result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        ctx.layout = layout
        return _sum_rows(x, layout)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _apply_gather(grad, ctx.layout, True), None


def _sum_rows(x: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
    dispatched = x.index_select(0, layout.index("dispatched", x.device))
    with layout.exchange(x, "gather (undispatch), backward"):
        return layout.transport.reduce_scatter_v(dispatched, layout.plan.shard_sizes)


class _Roll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: TokenLayout, shift: int) -> torch.Tensor:
        ctx.layout, ctx.shift = layout, shift
        return _roll(x, layout, shift)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            return _apply_roll(grad, ctx.layout, -ctx.shift), None, None
        return _roll(grad.contiguous(), ctx.layout, -ctx.shift), None, None


def _roll(x: torch.Tensor, layout: TokenLayout, shift: int) -> torch.Tensor:
    total = layout.plan.padded_tokens
    least = (shift + total // 2) % total - total // 2  # of the shifts that do the same
    with layout.exchange(x, "roll", shift=str(least)):
        route, (send_rows, recv_rows) = layout.roll_route(shift), layout.route_rows(shift, x.device)
        sent = x.index_select(0, send_rows)
        got = torch.empty_like(sent) if len(sent) == layout.num_local else x.new_empty((layout.num_local, *x.shape[1:]))
        layout.transport.all_to_all_v(got, sent, route.recv_counts, route.send_counts).wait()
        out = torch.empty_like(got)
        out[recv_rows] = got
        return out


# With the types that torch does not give to ``apply``.
_apply_shard: Callable[..., torch.Tensor] = _Shard.apply
_apply_gather: Callable[..., torch.Tensor] = _Gather.apply
_apply_sum_rows: Callable[..., torch.Tensor] = _SumRows.apply
_apply_roll: Callable[..., torch.Tensor] = _Roll.apply


def shard(
    x: torch.Tensor,
    layout: TokenLayout,
    pad_value: float = 0.0,
    dim: int = 0,
    is_padded: bool = False,
    is_partial_grad: bool = False,
) -> torch.Tensor:
    """This rank's rows of a global tensor that is the same on all ranks; any dtype, any other dims.

    ``x`` has ``total_tokens`` rows along ``dim`` and is padded at its end with ``pad_value``, or it comes padded
    (``is_padded``). The backward pass gathers, so that each rank gets the whole global gradient; with
    ``is_partial_grad`` each gets its own rows of it, zero elsewhere, and nothing is sent.
    """
    plan = layout.plan
    num_rows = plan.padded_tokens if is_padded else plan.total_tokens
    layout.check_rows(x, dim, num_rows, "shard (dispatch)", is_global=True)
    pad_value = _pad_of(x.dtype, pad_value)
    rows = x.movedim(dim, 0)
    if plan.pad_size and not is_padded:
        rows = torch.cat([rows, rows.new_full((plan.pad_size, *rows.shape[1:]), pad_value)])
    if is_partial_grad:
        return rows.index_select(0, layout.index("local", rows.device)).movedim(0, dim)
    return _apply_shard(rows, layout).movedim(0, dim)


def _pad_of(dtype: torch.dtype, pad_value: float) -> float:
    """``pad_value``, if ``dtype`` has it."""
    pad_value = as_number(pad_value, "pad_value")
    if dtype.is_floating_point or dtype.is_complex:
        return pad_value
    given = f"pad_value is {pad_value} and the tensor has dtype {dtype}"
    if pad_value % 1 != 0:
        raise ContractError(f"{given}; give an integer.")
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not low <= pad_value <= high:
        raise ContractError(f"{given}, which holds {low} to {high}; give one of these, or x.long().")
    return pad_value


def place(x: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
    """Local rows at their places in the global tensor without pads, zero elsewhere; the gradient of ``shard`` with
    ``is_partial_grad``."""
    layout.check_rows(x, 0, layout.num_local, "place")
    rows = x.new_zeros((layout.plan.padded_tokens, *x.shape[1:])).index_copy(0, layout.index("local", x.device), x)
    return rows.narrow(0, 0, layout.plan.total_tokens).clone()


def gather(
    x: torch.Tensor,
    layout: TokenLayout,
    is_partial_grad: bool = False,
    dim: int = 0,
    keep_pad: bool = False,
) -> torch.Tensor:
    """The global tensor in natural order, from every rank's rows; pad rows are dropped unless ``keep_pad``.

    Backward: the global gradient is taken to be the same on all ranks and this rank keeps its rows. With
    ``is_partial_grad`` it differs per rank and is summed over ranks, in rank order and in its own dtype.
    """
    layout.check_rows_of_all(x, dim, layout.num_local, "gather (undispatch)")
    rows = _apply_gather(x.movedim(dim, 0), layout, is_partial_grad)
    if layout.plan.pad_size and not keep_pad:
        rows = rows.narrow(0, 0, layout.plan.total_tokens)
    return rows.movedim(0, dim)


def sum_shards(x: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
    """This rank's rows of the sum over ranks of global tensors without pads; the gradient of ``gather`` with
    ``is_partial_grad``."""
    layout.check_rows_of_all(x, 0, layout.plan.total_tokens, "sum_shards", is_global=True)
    rows = torch.cat([x, x.new_zeros((layout.plan.pad_size, *x.shape[1:]))]) if layout.plan.pad_size else x
    return _sum_rows(rows, layout)


def roll(x: torch.Tensor, layout: TokenLayout, shift: int, dim: int = 0) -> torch.Tensor:
    """``torch.roll(padded global, shift, dim)`` on shards: row t becomes row ``t - shift`` of the padded sequence.

    Pad rows take part, so up to ``|shift|`` real tokens at the wrap-around get pad values. Documents do not matter:
    the last token of one gets the first of the next. ``labels`` of ``documents`` stops at their ends.
    """
    with layout.telling(x, "roll"):
        layout.check_rows(x, dim, layout.num_local, "roll")
        shift = as_int(shift, "shift")
    return _apply_roll(x.movedim(dim, 0), layout, shift).movedim(0, dim)


def positions(layout: TokenLayout, device: torch.device | str) -> torch.Tensor:
    """Global position of every local row, int64; pad rows get the last real position."""
    return layout.index("local", torch.device(device)).clamp(max=layout.plan.total_tokens - 1)
