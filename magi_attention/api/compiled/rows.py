# SPDX-License-Identifier: Apache-2.0
"""Dispatch, undispatch, roll, labels and position ids as custom ops, for models that are compiled around them; see
``handles`` for what they name. Functions named ``compiled_...`` are traced, for keys and for plans alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from magi_attention.api.compiled.handles import CompiledFacts, held_by, layout_of
from magi_attention.common.scalars import as_int, as_number
from magi_attention.functional.tokens import documents
from magi_attention.functional.tokens import layout as token_layout

_WHERE = "SymInt handle, str group"


def _op(schema: str) -> Callable[[Callable[..., torch.Tensor]], Any]:
    """The custom op of the same name as the function that follows; it changes no argument."""

    def define(function: Callable[..., torch.Tensor]) -> Any:
        name = f"magi_attention::{function.__name__}"
        return torch.library.custom_op(name, function, mutates_args=(), schema=schema)

    return define


@_op(f"(Tensor x, {_WHERE}, SymInt local_rows, Scalar pad_value, bool is_partial_grad) -> Tensor")
def shard_rows(x, handle, group, local_rows, pad_value, is_partial_grad):
    """This rank's rows, (local_rows, ...), of the global tensor without pads."""
    return token_layout.shard(x, layout_of(handle, group, local_rows), pad_value)


@shard_rows.register_fake
def _(x, handle, group, local_rows, pad_value, is_partial_grad):
    return x.new_empty((local_rows, *x.shape[1:]))


@_op(f"(Tensor x, {_WHERE}, SymInt total_rows) -> Tensor")
def place_rows(x, handle, group, total_rows):
    """This rank's rows at their places in the global tensor without pads, (total_rows, ...), and zero elsewhere."""
    return token_layout.place(x, layout_of(handle, group))


@place_rows.register_fake
def _(x, handle, group, total_rows):
    return x.new_empty((total_rows, *x.shape[1:]))


@_op(f"(Tensor x, {_WHERE}, SymInt total_rows, bool is_partial_grad) -> Tensor")
def gather_rows(x, handle, group, total_rows, is_partial_grad):
    """The global tensor without pads, (total_rows, ...), from every rank's rows."""
    return token_layout.gather(x, layout_of(handle, group)).contiguous()


@gather_rows.register_fake
def _(x, handle, group, total_rows, is_partial_grad):
    return x.new_empty((total_rows, *x.shape[1:]))


@_op(f"(Tensor x, {_WHERE}, SymInt local_rows) -> Tensor")
def sum_rows(x, handle, group, local_rows):
    """This rank's rows of the sum of all ranks' global tensors, without pads."""
    return token_layout.sum_shards(x, layout_of(handle, group, local_rows))


@sum_rows.register_fake
def _(x, handle, group, local_rows):
    return x.new_empty((local_rows, *x.shape[1:]))


@_op(f"(Tensor x, {_WHERE}, int shift, int dim) -> Tensor")
def roll_rows(x, handle, group, shift, dim):
    """This rank's rows of the padded global tensor, rolled."""
    return token_layout.roll(x, layout_of(handle, group), shift, dim).contiguous()


@roll_rows.register_fake
def _(x, handle, group, shift, dim):
    return x.new_empty(x.shape)


@_op(f"(Tensor tokens, Tensor? cu_seqlens, {_WHERE}, int depth, int ignore_index, int dim) -> Tensor")
def document_labels(tokens, cu_seqlens, handle, group, depth, ignore_index, dim):
    """As of ``functional.tokens.documents.labels``."""
    layout = layout_of(handle, group)
    return documents.labels(tokens, layout, depth, ignore_index, dim, cu_seqlens).contiguous()


@document_labels.register_fake
def _(tokens, cu_seqlens, handle, group, depth, ignore_index, dim):
    return tokens.new_empty(tokens.shape)


@_op(f"(Tensor? cu_seqlens, {_WHERE}, SymInt? of_rank, SymInt local_rows, bool per_document, Device device) -> Tensor")
def position_ids(cu_seqlens, handle, group, of_rank, local_rows, per_document, device):
    """(local_rows,) int64, as of ``layout.positions`` and ``documents.document_positions``; of another rank, too."""
    if of_rank is not None:
        return held_by(handle).positions(of_rank, device, per_document, cu_seqlens)
    layout = layout_of(handle, group, local_rows)
    if per_document:
        return documents.document_positions(layout, device, cu_seqlens)
    return token_layout.positions(layout, device)


@position_ids.register_fake
def _(cu_seqlens, handle, group, of_rank, local_rows, per_document, device):
    return torch.empty(local_rows, dtype=torch.int64, device=device)


# ---- gradients --------------------------------------------------------------------------------------


def _save_rows(ctx, inputs, output) -> None:
    x, *ctx.where = inputs[:3]
    ctx.rows, ctx.option = x.shape[0], inputs[4]


def _save_shard(ctx, inputs, output) -> None:
    x, *ctx.where = inputs[:3]
    ctx.rows, ctx.is_partial_grad = x.shape[0], inputs[5]


def _grad_of_shard(ctx, grad):
    if ctx.is_partial_grad:
        return place_rows(grad, *ctx.where, ctx.rows), *[None] * 5
    return gather_rows(grad, *ctx.where, ctx.rows, False), *[None] * 5


def _grad_of_place(ctx, grad):
    return shard_rows(grad, *ctx.where, ctx.rows, 0.0, True), *[None] * 3


def _grad_of_gather(ctx, grad):
    is_partial_grad = ctx.option
    if is_partial_grad:
        return sum_rows(grad, *ctx.where, ctx.rows), *[None] * 4
    return shard_rows(grad, *ctx.where, ctx.rows, 0.0, False), *[None] * 4


def _save_sum(ctx, inputs, output) -> None:
    x, *ctx.where = inputs[:3]
    ctx.rows = x.shape[0]


def _grad_of_sum(ctx, grad):
    return gather_rows(grad, *ctx.where, ctx.rows, True), *[None] * 3


def _save_roll(ctx, inputs, output) -> None:
    ctx.options = inputs[1:]


def _grad_of_roll(ctx, grad):
    handle, group, shift, dim = ctx.options
    return roll_rows(grad, handle, group, -shift, dim), *[None] * 4


shard_rows.register_autograd(_grad_of_shard, setup_context=_save_shard)
place_rows.register_autograd(_grad_of_place, setup_context=_save_sum)
gather_rows.register_autograd(_grad_of_gather, setup_context=_save_rows)
sum_rows.register_autograd(_grad_of_sum, setup_context=_save_sum)
roll_rows.register_autograd(_grad_of_roll, setup_context=_save_roll)


# ---- while a model is traced ------------------------------------------------------------------------


def compiled_shard(
    x: torch.Tensor, facts: CompiledFacts, pad_value: float, dim: int = 0, is_partial_grad: bool = False
) -> torch.Tensor:
    where = (facts.handle, facts.group, facts.local_rows)
    rows = shard_rows(x.movedim(dim, 0), *where, as_number(pad_value, "pad_value"), bool(is_partial_grad))
    return rows.movedim(0, dim)


def compiled_gather(
    x: torch.Tensor, facts: CompiledFacts, total_rows: int, is_partial_grad: bool, dim: int = 0
) -> torch.Tensor:
    rows = gather_rows(x.movedim(dim, 0), facts.handle, facts.group, total_rows, bool(is_partial_grad))
    return rows.movedim(0, dim)


def compiled_roll(x: torch.Tensor, facts: CompiledFacts, shift: int, dim: int) -> torch.Tensor:
    return roll_rows(x, facts.handle, facts.group, as_int(shift, "shift"), dim)


def compiled_labels(
    tokens: torch.Tensor, facts: CompiledFacts, depth: int, ignore_index: int, dim: int, cu_seqlens: Any
) -> torch.Tensor:
    cu, depth = _as_tensor(cu_seqlens), as_int(depth, "depth")
    return document_labels(tokens, cu, facts.handle, facts.group, depth, as_int(ignore_index, "ignore_index"), dim)


def compiled_positions(
    facts: CompiledFacts,
    device: torch.device,
    per_document: bool = False,
    cu_seqlens: Any = None,
    of_rank: int | None = None,
) -> torch.Tensor:
    where = (facts.handle, facts.group, of_rank, facts.local_rows)
    return position_ids(_as_tensor(cu_seqlens), *where, per_document, device)


def _as_tensor(cu_seqlens: Any) -> torch.Tensor | None:
    return None if cu_seqlens is None else torch.as_tensor(cu_seqlens)
