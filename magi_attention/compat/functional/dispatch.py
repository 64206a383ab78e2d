# SPDX-License-Identifier: Apache-2.0
"""Dispatch, undispatch and roll by a ``DispatchMeta`` and a process group, with the published signatures.

Local tensors have this rank's chunks along ``seq_dim`` in the order of ``meta.partitions``, global ones all
``meta.total_seqlen`` rows, pad rows included. Every function is differentiable and collective over ``group``.
"""

from __future__ import annotations

from copy import copy
from functools import lru_cache
from types import SimpleNamespace

import torch

from magi_attention.api.keys.dispatch_meta import DispatchMeta
from magi_attention.comm.collectives.gather import Group
from magi_attention.comm.transport.torch import as_transport
from magi_attention.common.enum import AttnType
from magi_attention.common.slices import SliceTable
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.functional.tokens import layout as token_layout
from magi_attention.functional.tokens.layout import TokenLayout
from magi_attention.meta.planner import plan_for_partitions

__all__ = ["dispatch_func", "roll_func", "roll_p2p", "roll_simple_func", "roll_simple_p2p", "undispatch_func"]

_KEPT_LAYOUTS = 64


@lru_cache(_KEPT_LAYOUTS)
def _layout(
    partitions: tuple[tuple[int, ...], ...], total: int, chunk_size: int, is_uneven: bool, rank: int
) -> TokenLayout:
    """Where the chunks of a partition are; of no group, because what is kept would keep groups alive.

    The mask plays no part in that, so the plan is one of no slices.
    """
    no_slices = SliceTable.from_ranges([], [], [])
    plan = plan_for_partitions(no_slices, total, 0, chunk_size, partitions, uneven_shard=is_uneven)
    return TokenLayout(plan, SimpleNamespace(rank=rank, size=plan.cp_size))  # type: ignore[arg-type]


def _layout_of(meta: DispatchMeta, group: Group) -> TokenLayout:
    if meta.attn_type is not AttnType.SELF_ATTN:
        raise UnsupportedError(f"Only self-attention is dispatched, not {meta.attn_type}; give a self-attention meta.")
    transport = as_transport(group)
    if (transport.rank, transport.size) != (meta.cp_rank, meta.cp_size):
        raise ContractError(
            f"The meta is that of rank {meta.cp_rank} of {meta.cp_size} and this process is rank {transport.rank} of "
            f"{transport.size} of the group; make the meta with the rank and size of the group."
        )
    partitions = tuple(map(tuple, meta.partitions))
    if any(list(part) != sorted(part) for part in partitions):
        raise UnsupportedError("A rank holds its chunks in ascending order; sort each list of meta.partitions.")
    is_uneven = meta.chunk_actual_sizes is not None
    layout = copy(_layout(partitions, meta.total_seqlen, meta.chunk_size, is_uneven, meta.cp_rank))
    layout.transport = transport
    return layout


def dispatch_func(x_global: torch.Tensor, group: Group, meta: DispatchMeta, seq_dim: int = 0) -> torch.Tensor:
    """This rank's rows of a global tensor that is the same on all ranks; the gradient is the whole one, gathered."""
    return token_layout.shard(x_global, _layout_of(meta, group), dim=seq_dim, is_padded=True)


def undispatch_func(
    x_local: torch.Tensor, meta: DispatchMeta, group: Group, seq_dim: int = 0, is_partial_grad: bool = False
) -> torch.Tensor:
    """The global tensor in natural order. Its gradient is taken to be the same on all ranks, or is summed over them
    with ``is_partial_grad``."""
    return token_layout.gather(x_local, _layout_of(meta, group), is_partial_grad, dim=seq_dim, keep_pad=True)


def roll_func(x_local: torch.Tensor, shift: int, meta: DispatchMeta, group: Group, seq_dim: int = 0) -> torch.Tensor:
    """``torch.roll(x_global, shift, seq_dim)`` on shards; any ``shift``."""
    return token_layout.roll(x_local, _layout_of(meta, group), shift, seq_dim)


def _select_local_chunks(x: torch.Tensor, meta: DispatchMeta, rank: int, seq_dim: int) -> torch.Tensor:
    """Rows of ``rank``; of no group. Published tests take their expectations from it."""
    chunks = x.split(meta.chunk_actual_sizes or meta.chunk_size, dim=seq_dim)
    return torch.cat([chunks[c] for c in meta.partitions[rank]], dim=seq_dim)


# further published names
roll_simple_func = roll_p2p = roll_simple_p2p = roll_func
