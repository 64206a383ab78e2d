# SPDX-License-Identifier: Apache-2.0
"""A small Llama-style language model over bytes. Attention is a function that is handed in.

Works on one rank's share of a packed sequence, so everything but attention is per token: tokens (T,) and
positions (T,), the position inside the token's document, which rotary embedding needs because the tokens of a
rank are not contiguous. T tokens of this rank, Hq query heads, Hk key/value heads, D head dim, C model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# (q (T, Hq, D), k (T, Hk, D), v (T, Hk, D)) -> (T, Hq, D)
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ModelConfig:
    width: int = 256
    num_layers: int = 3
    num_heads_q: int = 8
    num_heads_kv: int = 2
    head_dim: int = 32
    hidden: int = 704
    vocabulary: int = 256
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    has_qk_norm: bool = False  # of each head of q and k, as in Qwen3


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotary_tables(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 (T, 1, D/2), of the angle position * base**(-2i/D)."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions.to(torch.float32)[:, None] * base**-exponents
    return angles.cos()[:, None], angles.sin()[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x[i], x[i + D/2]) of (T, H, D)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = config
        self.heads = (c.num_heads_q, c.num_heads_kv, c.num_heads_kv)
        self.head_dim = c.head_dim
        self.attention_norm = RMSNorm(c.width, c.norm_eps)
        self.qkv = nn.Linear(c.width, sum(self.heads) * c.head_dim, bias=False)
        self.has_qk_norm = c.has_qk_norm
        if c.has_qk_norm:
            self.q_norm, self.k_norm = RMSNorm(c.head_dim, c.norm_eps), RMSNorm(c.head_dim, c.norm_eps)
        self.out = nn.Linear(c.num_heads_q * c.head_dim, c.width, bias=False)
        self.mlp_norm = RMSNorm(c.width, c.norm_eps)
        self.gate_up = nn.Linear(c.width, 2 * c.hidden, bias=False)
        self.down = nn.Linear(c.hidden, c.width, bias=False)

    def attend(self, x_TC: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        qkv = self.qkv(self.attention_norm(x_TC)).unflatten(-1, (-1, self.head_dim))
        q_THD, k_THD, v_THD = qkv.split(self.heads, dim=1)
        if self.has_qk_norm:
            q_THD, k_THD = self.q_norm(q_THD), self.k_norm(k_THD)
        out_THD = attention(rotate(q_THD, cos, sin), rotate(k_THD, cos, sin), v_THD)
        return x_TC + self.out(out_THD.flatten(1))

    def forward(self, x_TC: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        x_TC = self.attend(x_TC, cos, sin, attention)
        gate, up = self.gate_up(self.mlp_norm(x_TC)).chunk(2, dim=-1)
        return x_TC + self.down(F.silu(gate) * up)


def local_rows(parameter: Tensor) -> tuple[Tensor, int]:
    """The rows that are here, and the number of the first one. FSDP2 shards the rows as ``torch.chunk`` does."""
    if not isinstance(parameter, DTensor):
        return parameter, 0
    mesh, count = parameter.device_mesh, parameter.shape[0]
    return parameter.to_local(), min(mesh.get_local_rank() * -(-count // mesh.size()), count)


class Llama(nn.Module):
    """Random weights by ``seed``; with None, weights that are not set yet."""

    def __init__(self, config: ModelConfig, seed: int | None = 0) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if seed is not None:
            self.draw_weights(seed)

    @torch.no_grad()
    def draw_weights(self, seed: int) -> None:
        """The same for any sharding. One parameter at a time is whole, in host memory."""
        # An explicit generator: every rank and the replay begin with the same weights, whatever ran before.
        generator = torch.Generator().manual_seed(seed)
        residual_scale = (2 * self.config.num_layers) ** -0.5
        for name, weight in self.named_parameters():
            drawn = torch.ones(weight.shape)
            if weight.ndim > 1:
                scale = residual_scale if name.endswith(("out.weight", "down.weight")) else 1.0
                drawn.normal_(std=0.02 * scale, generator=generator)
            local, first = local_rows(weight)
            local.copy_(drawn[first : first + len(local)])

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attention: Attention) -> Tensor:
        """Logits (T, vocabulary)."""
        cos, sin = rotary_tables(positions_T, self.config.head_dim, self.config.rope_base)
        x_TC = self.embedding(tokens_T)
        for block in self.blocks:
            x_TC = block(x_TC, cos, sin, attention)
        return self.head(self.norm(x_TC))

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())
