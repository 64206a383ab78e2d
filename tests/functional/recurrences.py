# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers, token by token, as their papers define them. State S is ``(H, K, V)``, and out = S^T q.

| layer | recurrence | source |
|---|---|---|
| mamba2 | S = a S + k v^T, a number a | Dao and Gu 2024, arXiv:2405.21060 (q, k are its C, B) |
| gla | S = Diag(a) S + k v^T | Yang et al. 2023, arXiv:2312.06635 |
| gated_delta | S = a (I - b k k^T) S + b k v^T, a number a | Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464 |
| kda | S = (I - b k k^T) Diag(a) S + b k v^T | Kimi Linear 2025, arXiv:2510.26692 |
"""

from __future__ import annotations

from typing import NamedTuple

import torch

LAYERS = ("mamba2", "gla", "gated_delta", "kda")


class Inputs(NamedTuple):
    """``q, k (T, H, K)``, ``v (T, H, V)``, ``log_decay (T, H)`` or ``(T, H, K)``, ``beta (T, H)``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor


def random_inputs(layer: str, total: int, seed: int, heads: int = 2, key: int = 3, width: int = 4) -> Inputs:
    """float64; keys of norm one, as these layers have them."""
    torch.manual_seed(seed)
    q, k = (torch.randn(total, heads, key, dtype=torch.float64) for _ in range(2))
    decay = torch.rand(total, heads, *[key] * (layer in ("gla", "kda")), dtype=torch.float64)
    return Inputs(
        q, k / k.norm(dim=-1, keepdim=True), torch.randn(total, heads, width, dtype=torch.float64),
        -decay, torch.rand(total, heads, dtype=torch.float64),
    )  # fmt: skip


def run(layer: str, x: Inputs, initial: torch.Tensor, cu_seqlens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """out ``(T, H, V)`` and final states ``(S, H, K, V)``."""
    out, final = [], []
    for start, end, state in zip(cu_seqlens[:-1], cu_seqlens[1:], initial):
        for t in range(start, end):
            q, k, v, log_decay, beta = (tensor[t] for tensor in x)
            state = log_decay.exp().reshape(*log_decay.shape, *[1] * (3 - log_decay.dim())) * state
            if layer in ("gated_delta", "kda"):
                v = beta[:, None] * (v - (k[:, :, None] * state).sum(1))
            state = state + k[:, :, None] * v[:, None]
            out.append((q[:, :, None] * state).sum(1))
        final.append(state)
    return torch.stack(out) if out else x.v[:0], torch.stack(final)
