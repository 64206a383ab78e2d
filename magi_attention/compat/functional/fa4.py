# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-4 entry points: forward and backward over an attention argument, and an autograd form.

They prefer the backend "fa4". Where it cannot run, the first backend that can takes the call, after one
log line. ``attn_arg`` is any object with ``q_ranges``, ``k_ranges`` and ``attn_type_map``; tile sizes and
areas that it may carry are hints that no backend needs.
"""

from __future__ import annotations

import torch

from magi_attention.common.scalars import as_float
from magi_attention.compat.functional.backend_call import AttnArg, BackendCalls
from magi_attention.kernels.ffa.custom_ops import call_flex_fwd
from magi_attention.kernels.registry import default_registry
from magi_attention.kernels.types import as_scale

_CALLS = BackendCalls(lambda problem: default_registry().select(problem, "fa4")[0])

fa4_bwd = _CALLS.bwd


def fa4_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    attn_arg: AttnArg,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink_layout: str = "sh",
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out (Tq, Hq, Dv) in q's dtype, lse (Tq, Hq))``; no autograd. Scale defaults to ``D ** -0.5``."""
    out, meta = _CALLS.fwd(q, k, v, sink, attn_arg, softmax_scale, softcap, sink_layout)
    return out, meta.lse


def ffa_fa4_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_ranges: torch.Tensor,
    k_ranges: torch.Tensor,
    attn_type_map: torch.Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    reuse_attn_arg: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)`` with gradients for q, k, v; shapes as in ``flex_flash_attn_func``.

    ``reuse_attn_arg`` is a hint without effect: equal masks share their prepared form by value, so a call
    never takes the mask of an earlier one by mistake.
    """
    from magi_attention.functional.flex_flash_attn import check_call

    out, lse, _ = call_flex_fwd(
        q, k, v, q_ranges, k_ranges, attn_type_map, None, "sh",
        None if softmax_scale is None else as_scale(softmax_scale), as_float(softcap, "softcap"), bool(deterministic),
        0, False, "fa4", check_call,
    )  # fmt: skip
    return out, lse


is_fa4_installed = True  # the functions above can be called everywhere


class FA4AttnFunc:
    """``apply`` takes the arguments of the published autograd function in its order: ``ffa_fa4_func``."""

    @staticmethod
    def apply(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_ranges: torch.Tensor,
        k_ranges: torch.Tensor,
        attn_type_map: torch.Tensor | None,
        softmax_scale: float | None,
        softcap: float,
        reuse_attn_arg: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(out, lse)`` with gradients for q, k, v."""
        return ffa_fa4_func(
            q, k, v, q_ranges, k_ranges, attn_type_map,
            softmax_scale=softmax_scale, softcap=softcap, reuse_attn_arg=reuse_attn_arg,
        )  # fmt: skip
