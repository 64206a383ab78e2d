# SPDX-License-Identifier: Apache-2.0
"""Dispatch, undispatch, roll, labels and position ids as custom ops, for models that are compiled around them; see
``compiled``, which names managers by numbers."""

from __future__ import annotations

import torch

from magi_attention.api.compiled import manager_of
from magi_attention.functional import documents
from magi_attention.functional import layout as token_layout
from magi_attention.functional.layout import TokenLayout


def _layout(handle: int) -> TokenLayout:
    return manager_of(handle).layout


@torch.library.custom_op(
    "magi_attention::shard_rows", mutates_args=(),
    schema="(Tensor x, SymInt handle, SymInt local_rows, float pad_value) -> Tensor",
)  # fmt: skip
def shard_rows(x, handle, local_rows, pad_value):
    """This rank's rows, (local_rows, ...), of the global tensor without pads."""
    return token_layout.shard(x, _layout(handle), pad_value)


@shard_rows.register_fake
def _(x, handle, local_rows, pad_value):
    return x.new_empty((local_rows, *x.shape[1:]))


@torch.library.custom_op(
    "magi_attention::gather_rows", mutates_args=(),
    schema="(Tensor x, SymInt handle, SymInt total_rows, bool is_partial_grad) -> Tensor",
)  # fmt: skip
def gather_rows(x, handle, total_rows, is_partial_grad):
    """The global tensor without pads, (total_rows, ...), from every rank's rows."""
    return token_layout.gather(x, _layout(handle)).contiguous()


@gather_rows.register_fake
def _(x, handle, total_rows, is_partial_grad):
    return x.new_empty((total_rows, *x.shape[1:]))


@torch.library.custom_op(
    "magi_attention::sum_rows", mutates_args=(), schema="(Tensor x, SymInt handle, SymInt local_rows) -> Tensor"
)
def sum_rows(x, handle, local_rows):
    """This rank's rows of the sum of all ranks' global tensors, without pads."""
    return token_layout.sum_shards(x, _layout(handle))


@sum_rows.register_fake
def _(x, handle, local_rows):
    return x.new_empty((local_rows, *x.shape[1:]))


@torch.library.custom_op(
    "magi_attention::roll_rows", mutates_args=(),
    schema="(Tensor x, SymInt handle, int shift, int dim, bool simple) -> Tensor",
)  # fmt: skip
def roll_rows(x, handle, shift, dim, simple):
    """This rank's rows of the padded global tensor, rolled."""
    return token_layout.roll(x, _layout(handle), shift, dim, simple).contiguous()


@roll_rows.register_fake
def _(x, handle, shift, dim, simple):
    return x.new_empty(x.shape)


@torch.library.custom_op(
    "magi_attention::position_ids", mutates_args=(),
    schema="(SymInt handle, SymInt local_rows, Device device) -> Tensor",
)  # fmt: skip
def position_ids(handle, local_rows, device):
    """(local_rows,) int64, as of ``layout.positions``."""
    return token_layout.positions(_layout(handle), device)


@position_ids.register_fake
def _(handle, local_rows, device):
    return torch.empty(local_rows, dtype=torch.int64, device=device)


@torch.library.custom_op(
    "magi_attention::document_labels", mutates_args=(),
    schema="(Tensor tokens, Tensor? cu_seqlens, SymInt handle, int depth, int ignore_index, int dim) -> Tensor",
)  # fmt: skip
def document_labels(tokens, cu_seqlens, handle, depth, ignore_index, dim):
    """As of ``functional.documents.labels``."""
    return documents.labels(tokens, _layout(handle), depth, ignore_index, dim, cu_seqlens).contiguous()


@document_labels.register_fake
def _(tokens, cu_seqlens, handle, depth, ignore_index, dim):
    return tokens.new_empty(tokens.shape)


@torch.library.custom_op(
    "magi_attention::document_position_ids", mutates_args=(),
    schema="(Tensor? cu_seqlens, SymInt handle, SymInt local_rows, Device device) -> Tensor",
)  # fmt: skip
def document_position_ids(cu_seqlens, handle, local_rows, device):
    """(local_rows,) int64, as of ``functional.documents.document_positions``."""
    return documents.document_positions(_layout(handle), device, cu_seqlens)


@document_position_ids.register_fake
def _(cu_seqlens, handle, local_rows, device):
    return torch.empty(local_rows, dtype=torch.int64, device=device)


def _save_shard(ctx, inputs, output) -> None:
    ctx.options = (inputs[1], inputs[0].shape[0])


def _save_gather(ctx, inputs, output) -> None:
    ctx.options = (inputs[1], inputs[0].shape[0])
    ctx.is_partial_grad = inputs[3]


def _save_roll(ctx, inputs, output) -> None:
    ctx.options = inputs[1:]


def _grad_of_shard(ctx, grad):
    handle, total_rows = ctx.options
    return gather_rows(grad, handle, total_rows, False), None, None, None


def _grad_of_gather(ctx, grad):
    handle, local_rows = ctx.options
    mine = sum_rows(grad, handle, local_rows) if ctx.is_partial_grad else shard_rows(grad, handle, local_rows, 0.0)
    return mine, None, None, None


def _grad_of_roll(ctx, grad):
    handle, shift, dim, simple = ctx.options
    return roll_rows(grad, handle, -shift, dim, simple), None, None, None, None


shard_rows.register_autograd(_grad_of_shard, setup_context=_save_shard)
gather_rows.register_autograd(_grad_of_gather, setup_context=_save_gather)
roll_rows.register_autograd(_grad_of_roll, setup_context=_save_roll)

__all__ = [
    "document_labels",
    "document_position_ids",
    "gather_rows",
    "position_ids",
    "roll_rows",
    "shard_rows",
    "sum_rows",
]
