# SPDX-License-Identifier: Apache-2.0
"""The published names of ``functional.flex_flash_attn`` besides the function itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from magi_attention.compat.extension import start_event, stop_event
from magi_attention.env import general
from magi_attention.errors import UnsupportedError
from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.kernels.rows.merge import merge_ranges

__all__ = ["FlexFlashAttnFunc", "maybe_contiguous", "maybe_profile_ffa_ctx", "merge_ranges", "profile_mode"]

profile_mode = general.is_profile_mode_enable()  # at import, as there


def maybe_contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    """``x`` with its last dimension contiguous, as FlashAttention's helper of that name."""
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


@contextmanager
def maybe_profile_ffa_ctx(event_name: str) -> Iterator[None]:
    """In profile mode, the time within is the interval ``event_name`` of ``magi_attn_ext``."""
    if profile_mode:
        start_event(event_name)
    yield
    if profile_mode:
        stop_event(event_name)


class FlexFlashAttnFunc:
    """``apply`` takes the arguments of the published autograd function in its order.

    The function here is a custom op; ``forward`` and ``backward`` of a ``torch.autograd.Function`` do not exist.
    """

    @staticmethod
    def apply(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        sink_layout: str,
        q_ranges: torch.Tensor,
        k_ranges: torch.Tensor,
        attn_type_map: torch.Tensor | None,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        deterministic: bool = False,
        sm_margin: int = 0,
        disable_fwd_atomic_reduction: bool = False,
        disable_bwd_dkv_atomic_reduction: bool = False,
        ref_block_size: tuple[int, int] | None = None,
        max_seqlen_q: int | None = None,
        auto_range_merge: bool = False,
        swap_ab: bool = False,
        pack_gqa: bool = False,
        cat_gqa: bool = False,
        sparse_load: bool = False,
        index_attn: bool = False,
        swap_bwd_qk_loop: bool = False,
        return_max_logits: bool = False,
        index_attn_indices_2d: torch.Tensor | None = None,
        index_attn_max_topk: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """``(out, lse, max_logits or None)``; see ``flex_flash_attn_func``."""
        if index_attn or index_attn_indices_2d is not None:
            raise UnsupportedError(
                "Index attention goes by flex_flash_attn_func(..., index_attn_indices=...); call it."
            )
        out, meta = flex_flash_attn_func(
            q, k, v, q_ranges, k_ranges, attn_type_map, sink=sink, sink_layout=sink_layout,
            softmax_scale=softmax_scale, softcap=softcap, deterministic=deterministic, sm_margin=sm_margin,
            disable_fwd_atomic_reduction=disable_fwd_atomic_reduction,
            disable_bwd_dkv_atomic_reduction=disable_bwd_dkv_atomic_reduction, ref_block_size=ref_block_size,
            max_seqlen_q=max_seqlen_q, auto_range_merge=auto_range_merge, swap_ab=swap_ab, pack_gqa=pack_gqa,
            cat_gqa=cat_gqa, sparse_load=sparse_load, swap_bwd_qk_loop=swap_bwd_qk_loop,
            return_max_logits=return_max_logits,
        )  # fmt: skip
        return out, meta.lse, meta.max_logits
