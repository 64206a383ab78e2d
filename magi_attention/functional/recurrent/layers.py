# SPDX-License-Identifier: Apache-2.0
"""A kernel for packed documents, run over the fragments of all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from magi_attention.common.infer import CuSeqlens
from magi_attention.common.plan_cache import Kind, on_gpu
from magi_attention.errors import ContractError
from magi_attention.functional.recurrent.states import pass_states
from magi_attention.functional.tokens.layout import TokenLayout

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
_SEGMENTS: Kind[tuple[torch.device], tuple[torch.Tensor, ...]] = Kind("segments of fragments", on_gpu)


def segments(
    layout: TokenLayout, device: torch.device, cu_seqlens: CuSeqlens | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``Fragments.segments``, ``first_segments`` and ``last_segments`` of this rank as int64 tensors on ``device``."""

    def make() -> tuple[torch.Tensor, ...]:
        fragments, rank = layout.plan.fragments(cu_seqlens), layout.rank
        arrays = fragments.segments(rank), fragments.first_segments(rank), fragments.last_segments(rank)
        return tuple(torch.from_numpy(array).to(device) for array in arrays)

    if cu_seqlens is not None:
        bounds, first, last = make()
    else:
        bounds, first, last = layout.cache.get(_SEGMENTS, (device,), make)
    return bounds, first, last


def decay_of_fragments(
    log_decay: torch.Tensor, layout: TokenLayout, cu_seqlens: CuSeqlens | None = None
) -> torch.Tensor:
    """``(F, ...)``: the product of the decays in the last segment of each fragment; ``log_decay`` ``(T, ...)``."""
    layout.check_rows(log_decay, 0, layout.num_local, "decay_of_fragments")
    bounds, _, last = segments(layout, log_decay.device, cu_seqlens)
    sums = log_decay.double().cumsum(0)  # as differences of sums over all tokens are taken
    sums = torch.cat([torch.zeros_like(sums[:1]), sums])
    return (sums[bounds[last + 1]] - sums[bounds[last]]).exp().to(log_decay.dtype)


def run_recurrent(
    kernel: Kernel, value: torch.Tensor, key_dim: int, layout: TokenLayout, transition: torch.Tensor | None,
    state_dtype: torch.dtype, cu_seqlens: CuSeqlens | None,
) -> torch.Tensor:  # fmt: skip
    """See ``api.recurrent.run_recurrent``."""
    if value.dim() != 3 or value.shape[0] != layout.num_local:
        raise ContractError(
            f"value has shape {tuple(value.shape)}; give (T, H, V) with the {layout.num_local} tokens of this rank."
        )
    bounds, first, last = segments(layout, value.device, cu_seqlens)
    count, (_, heads, width) = len(bounds) - 1, value.shape
    zero = value.new_zeros((count, heads, key_dim, width), dtype=state_dtype)
    if not len(layout.plan.fragments(cu_seqlens).passes):
        return kernel(value, zero, bounds)[0]
    final = kernel(value, zero, bounds)[1].index_select(0, last)
    if transition is None:
        identity = torch.eye(key_dim, dtype=state_dtype, device=value.device).expand(count, heads, -1, -1)
        nothing = value.new_zeros((len(value), heads, key_dim))
        transition = kernel(nothing, identity.contiguous(), bounds)[1].index_select(0, last)
    came = pass_states(transition, final, layout, cu_seqlens)
    return kernel(value, zero.index_copy(0, first, came), bounds)[0]


__all__ = ["Kernel", "decay_of_fragments", "run_recurrent", "segments"]
