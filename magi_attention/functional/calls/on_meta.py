# SPDX-License-Identifier: Apache-2.0
"""Calls with tensors on the meta device: shapes and dtypes alone, as torch's functions give them there."""

from __future__ import annotations

import torch

from magi_attention.common.forward_meta import AttnForwardMeta


def are_on_meta(q: object, k: object, v: object) -> bool:
    """False where something is no tensor, which the checks of a call name."""
    return getattr(q, "is_meta", False) and getattr(k, "is_meta", False) and getattr(v, "is_meta", False)


def attention_on_meta(
    q: torch.Tensor, v: torch.Tensor, return_max_logits: bool
) -> tuple[torch.Tensor, AttnForwardMeta]:
    """What attention returns for such q and v."""
    accumulated = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = q.new_empty(q.shape[:2], dtype=accumulated)
    out = q.new_empty((*q.shape[:2], v.shape[2]), requires_grad=torch.is_grad_enabled() and q.requires_grad)
    return out, AttnForwardMeta(lse=lse, max_logits=lse.new_empty(q.shape[1]) if return_max_logits else None)


__all__ = ["are_on_meta", "attention_on_meta"]
