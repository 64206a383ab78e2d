# SPDX-License-Identifier: Apache-2.0
"""Gather, scatter and all-to-all with rank-dependent sizes, along any dim, and their autograd pairs.

``split_sizes`` lists the size of dim ``dim`` on every rank; None means equal sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from magi_attention.comm.collectives.work import GeneralWork
from magi_attention.comm.transport.base import Transport
from magi_attention.comm.transport.torch import as_transport
from magi_attention.common.scalars import as_int
from magi_attention.errors import ContractError

Group = dist.ProcessGroup | Transport | None


def all2all_v(
    input: torch.Tensor,
    output: torch.Tensor,
    input_split_size_list: list[int],
    output_split_size_list: list[int],
    group: Group,
    async_op: bool = False,
) -> GeneralWork:
    """Sends ``input_split_size_list[r]`` consecutive rows (dim 0) of ``input`` to each rank r, and fills
    ``output`` with ``output_split_size_list[r]`` rows from each r. Any dtype; the same trailing dims on all
    ranks. ``ContractError`` if the sizes do not cover the tensors."""
    transport = as_transport(group)
    with transport.guard("all2all_v"):
        work = transport.all_to_all_v(output, input, output_split_size_list, input_split_size_list, async_op)
    return GeneralWork(work)


def all_gather_v(
    x_local: torch.Tensor, group: Group, dim: int = 0, split_sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """The parts of all ranks joined along ``dim``, in rank order, on every rank."""
    transport = as_transport(group)
    with transport.guard("all_gather_v"), torch.no_grad():
        sizes = _gather_sizes(x_local, transport, dim, split_sizes)
        return transport.all_gather_v(x_local.movedim(dim, 0), sizes).movedim(0, dim).contiguous()


def scatter_v(
    x_global: torch.Tensor, group: Group, dim: int = 0, split_sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """This rank's part of a tensor that every rank holds whole; a contiguous copy. Does not communicate."""
    transport = as_transport(group)
    with transport.guard("scatter_v"):
        sizes = _scatter_sizes(x_global, transport, dim, split_sizes)
        return x_global.narrow(dim, sum(sizes[: transport.rank]), sizes[transport.rank]).contiguous()


def reduce_scatter_v(
    x_partial: torch.Tensor, group: Group, dim: int = 0, split_sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """This rank's part of the sum of the tensors of all ranks, added in rank order."""
    transport = as_transport(group)
    with transport.guard("reduce_scatter_v"), torch.no_grad():
        sizes = _scatter_sizes(x_partial, transport, dim, split_sizes)
        return transport.reduce_scatter_v(x_partial.movedim(dim, 0), sizes).movedim(0, dim).contiguous()


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, dim, split_sizes, is_partial):
        ctx.args = (group, dim, split_sizes)
        ctx.is_partial = is_partial
        return all_gather_v(x, group, dim, split_sizes)

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():  # the gradient may be differentiated
            return (_ReduceScatter if ctx.is_partial else _Scatter).apply(grad, *ctx.args), None, None, None, None
        backward = reduce_scatter_v if ctx.is_partial else scatter_v
        return backward(grad, *ctx.args), None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, dim, split_sizes):
        ctx.args = (group, dim, split_sizes)
        return reduce_scatter_v(x, *ctx.args)

    @staticmethod
    def backward(ctx, grad):
        return _AllGather.apply(grad, *ctx.args, True), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, dim, split_sizes):
        transport = as_transport(group)
        ctx.args = (group, dim, _scatter_sizes(x, transport, dim, split_sizes))
        return scatter_v(x, *ctx.args)

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            return _AllGather.apply(grad, *ctx.args, False), None, None, None
        return all_gather_v(grad, *ctx.args), None, None, None


def all_gather_fwd_scatter_bwd(
    input: torch.Tensor, group: Group, dim: int = 0, split_sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """``all_gather_v`` whose gradient is this rank's part of the incoming one. For gradients that are whole
    and equal on all ranks (a loss that every rank computes over everything)."""
    return _AllGather.apply(input, group, dim, split_sizes, False)


def all_gather_fwd_reduce_scatter_bwd(
    input: torch.Tensor, group: Group, dim: int = 0, split_sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """``all_gather_v`` whose gradient is this rank's part of the sum over ranks. For gradients that are
    partial on each rank (each computes its own share of the loss)."""
    return _AllGather.apply(input, group, dim, split_sizes, True)


def scatter_fwd_all_gather_bwd(
    input: torch.Tensor, group: Group, dim: int = 0, split_sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """``scatter_v`` whose gradient is gathered from all ranks, so that it is whole on each."""
    return _Scatter.apply(input, group, dim, split_sizes)


def _check_sizes(sizes: Sequence[int], transport: Transport) -> list[int]:
    sizes = [as_int(n, "A split size") for n in sizes]
    if len(sizes) != transport.size or any(n < 0 for n in sizes):
        raise ContractError(f"split_sizes {sizes} must be {transport.size} numbers >= 0, one per rank of the group.")
    return sizes


def _gather_sizes(x: torch.Tensor, transport: Transport, dim: int, split_sizes: Sequence[int] | None) -> list[int]:
    if split_sizes is None:
        return [x.shape[dim]] * transport.size
    sizes = _check_sizes(split_sizes, transport)
    if sizes[transport.rank] != x.shape[dim]:
        raise ContractError(
            f"split_sizes gives rank {transport.rank} size {sizes[transport.rank]}, but dim {dim} of its "
            f"tensor has {x.shape[dim]}; pass the sizes of all ranks in rank order."
        )
    return sizes


def _scatter_sizes(x: torch.Tensor, transport: Transport, dim: int, split_sizes: Sequence[int] | None) -> list[int]:
    total = x.shape[dim]
    if split_sizes is None:
        if total % transport.size:
            raise ContractError(
                f"Dim {dim} of size {total} cannot be split evenly over {transport.size} ranks; pass split_sizes."
            )
        return [total // transport.size] * transport.size
    sizes = _check_sizes(split_sizes, transport)
    if sum(sizes) != total:
        raise ContractError(f"split_sizes {sizes} add up to {sum(sizes)}, but dim {dim} has size {total}.")
    return sizes
