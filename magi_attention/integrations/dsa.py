# SPDX-License-Identifier: Apache-2.0
"""DeepSeek Sparse Attention over ranks: MLA, its indexer, and both stages of training (DeepSeek V3.2, GLM-5).

Parameters have the names of transformers' ``DeepseekV32Attention`` and ``GlmMoeDsaAttention``, so their state dicts
load as they are. This module needs torch alone.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import nn

from magi_attention.api import (
    IndexExchange,
    Plan,
    attend,
    attend_index,
    indexer_kl,
    indexer_topk,
    prepare_index_exchange,
)
from magi_attention.errors import ContractError

Rotary = tuple[torch.Tensor, torch.Tensor]  # cos and sin, (T, qk_rope_head_dim) each
_STAGES = ("dense", "sparse")


@dataclass(frozen=True)
class DsaConfig:
    """Sizes of a layer, by the names of transformers' configurations.

    ``softmax_scale`` is by default that of the query's head dim. ``is_index_rope_interleaved``: does the indexer rotate
    pairs (0, 1), (2, 3), ... as attention does (GLM-5), or column i with column i + half (DeepSeek V3.2)?
    ``rms_norm_eps`` is that of the latents' norms. In transformers these have 1e-6, whatever the model's is.
    """

    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    is_index_rope_interleaved: bool
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    softmax_scale: float | None = None

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        return self.qk_head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @classmethod
    def from_transformers(cls, config: Any, softmax_scale: float | None = None) -> DsaConfig:
        """The sizes of a ``DeepseekV32Config`` or ``GlmMoeDsaConfig``. A model with YaRN scales its softmax: give the
        ``scaling`` of its attention."""
        known = {"deepseek_v32": False, "glm_moe_dsa": True}
        if config.model_type not in known:
            raise ContractError(f"model_type is {config.model_type!r}; give a configuration of {' or '.join(known)}.")
        own = {
            "is_index_rope_interleaved": known[config.model_type], "softmax_scale": softmax_scale, "rms_norm_eps": 1e-6
        }  # fmt: skip
        return cls(**{f.name: getattr(config, f.name) for f in fields(cls) if f.name not in own}, **own)


DEEPSEEK_V32 = DsaConfig(
    hidden_size=7168, num_attention_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
    qk_rope_head_dim=64, v_head_dim=128, index_n_heads=64, index_head_dim=128, index_topk=2048,
    is_index_rope_interleaved=False,
)  # fmt: skip
GLM_5 = DsaConfig(
    hidden_size=6144, num_attention_heads=64, q_lora_rank=2048, kv_lora_rank=512, qk_nope_head_dim=192,
    qk_rope_head_dim=64, v_head_dim=256, index_n_heads=32, index_head_dim=128, index_topk=2048,
    is_index_rope_interleaved=True,
)  # fmt: skip


class DsaOutput(NamedTuple):
    """``out`` (T, hidden_size). ``divergence`` (T,) of the indexer from attention, to be added up over tokens, layers
    and ranks; None where it was not asked for. ``indices`` int32 (T, index_topk), positions of keys, and their
    ``exchange``; None in the dense stage."""

    out: torch.Tensor
    divergence: torch.Tensor | None
    indices: torch.Tensor | None
    exchange: IndexExchange | None


class DsaIndexer(nn.Module):
    """Projects tokens to the queries, keys and weights of ``indexer_topk``. Nothing behind it gets a gradient."""

    def __init__(self, config: DsaConfig) -> None:
        super().__init__()
        self.config = config
        heads, dim = config.index_n_heads, config.index_head_dim
        self.wq_b = nn.Linear(config.q_lora_rank, heads * dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, dim, bias=False)
        self.k_norm = nn.LayerNorm(dim, eps=1e-6)
        self.weights_proj = nn.Linear(config.hidden_size, heads, bias=False)

    def forward(
        self, hidden_states: torch.Tensor, q_resid: torch.Tensor, position_embeddings: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q_index (T, index_n_heads, index_head_dim), k_index (T, index_head_dim), weights (T, index_n_heads)."""
        hidden_states, q_resid = hidden_states.detach(), q_resid.detach()
        heads, dim = self.config.index_n_heads, self.config.index_head_dim
        q_index = self._rotate(self.wq_b(q_resid).unflatten(1, (heads, dim)), position_embeddings)
        k_index = self._rotate(self.k_norm(self.wk(hidden_states))[:, None], position_embeddings)[:, 0]
        weights = self.weights_proj(hidden_states)
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32)) * (heads * dim) ** -0.5
        return q_index, k_index.to(q_index.dtype), weights

    def _rotate(self, x: torch.Tensor, position_embeddings: Rotary) -> torch.Tensor:
        rotary = self.config.qk_rope_head_dim
        turned = rotate(x[..., :rotary], position_embeddings, self.config.is_index_rope_interleaved)
        return torch.cat((turned, x[..., rotary:]), -1)


class DsaAttention(nn.Module):
    """A layer of attention whose queries see the ``index_topk`` keys that its indexer scores highest.

    Without an indexer (``has_indexer=False``) it sees the keys that an earlier layer chose, as every few layers of
    GLM-5.2 do.
    """

    def __init__(self, config: DsaConfig, has_indexer: bool = True) -> None:
        super().__init__()
        self.config = c = config
        heads, latent = c.num_attention_heads, c.kv_lora_rank
        self.q_a_proj = nn.Linear(c.hidden_size, c.q_lora_rank, bias=c.attention_bias)
        self.q_a_layernorm = nn.RMSNorm(c.q_lora_rank, eps=c.rms_norm_eps)
        self.q_b_proj = nn.Linear(c.q_lora_rank, heads * c.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, latent + c.qk_rope_head_dim, bias=c.attention_bias)
        self.kv_a_layernorm = nn.RMSNorm(latent, eps=c.rms_norm_eps)
        self.kv_b_proj = nn.Linear(latent, heads * (c.qk_nope_head_dim + c.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * c.v_head_dim, c.hidden_size, bias=c.attention_bias)
        self.indexer = DsaIndexer(config) if has_indexer else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Rotary,
        plan: Plan,
        group: Any = None,
        *,
        stage: str = "sparse",
        shared: DsaOutput | None = None,
        needs_divergence: bool = True,
        max_rows: int | None = None,
    ) -> DsaOutput:
        """Collective over the group, forward and backward.

        Args:
            hidden_states: (T, hidden_size), this rank's tokens (``plan.shard``).
            position_embeddings: cos and sin of these tokens, (T, qk_rope_head_dim) each, as transformers has them: the
                second half repeats the first. Positions count from the first token of a document.
            plan: of a causal mask. Queries see keys of their own document, which are those of the mask.
            stage: "sparse", or "dense": attention to all keys, by which the indexer is warmed up.
            shared: what an earlier layer returned, for a layer without an indexer.
            needs_divergence: give False where the indexer is not trained, as in evaluation.
            max_rows: as of ``attend_index``.

        Raises:
            ContractError: an unknown stage, lists that are missing, and what ``attend_index`` refuses.
        """
        if stage not in _STAGES:
            raise ContractError(f"stage is {stage!r}; give one of {', '.join(_STAGES)}.")
        documents = _documents(plan)
        q_resid = self.q_a_layernorm(self.q_a_proj(hidden_states))
        q_nope, q_rot, latent = self._project(hidden_states, q_resid, position_embeddings)
        of_index = None if self.indexer is None else self.indexer(hidden_states, q_resid, position_embeddings)
        indices = exchange = None
        if stage == "dense":
            out, lse = self._attend_to_all(q_nope, q_rot, latent, plan, group)
            with torch.no_grad():  # the divergence alone reads it
                q = self._absorb(q_nope, q_rot)
        else:
            if of_index is not None:
                keys = plan.gather(of_index[1].detach(), group)
                at = plan.positions(group, hidden_states.device)
                topk = self.config.index_topk
                indices = indexer_topk(of_index[0], keys, of_index[2], topk, positions=at, cu_seqlens=documents)
                exchange = prepare_index_exchange(indices[:, None], plan, group, max_rows=max_rows)
            else:
                indices, exchange = _lists_of(shared)
            q = self._absorb(q_nope, q_rot)
            out, lse = self._attend_to_chosen(q, latent, exchange, plan, group)
        divergence = None
        if of_index is not None and needs_divergence:
            masks = {"cu_seqlens": documents} if stage == "dense" else {}
            scale = self.config.scale
            divergence = indexer_kl(
                *of_index, q, latent[:, None], lse, exchange, plan, group, softmax_scale=scale, **masks
            )  # fmt: skip
        return DsaOutput(self.o_proj(out.flatten(1)), divergence, indices, exchange)

    def _project(
        self, hidden_states: torch.Tensor, q_resid: torch.Tensor, position_embeddings: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries (T, heads, qk_nope_head_dim) and (T, heads, qk_rope_head_dim), and the latents of keys and values,
        (T, kv_lora_rank + qk_rope_head_dim)."""
        c = self.config
        q = self.q_b_proj(q_resid).unflatten(1, (c.num_attention_heads, c.qk_head_dim))
        q_nope, q_rot = q.split((c.qk_nope_head_dim, c.qk_rope_head_dim), -1)
        k_pass, k_rot = self.kv_a_proj_with_mqa(hidden_states).split((c.kv_lora_rank, c.qk_rope_head_dim), -1)
        k_rot = rotate(k_rot[:, None], position_embeddings, is_interleaved=True)[:, 0]
        latent = torch.cat((self.kv_a_layernorm(k_pass).to(k_rot.dtype), k_rot), -1)
        return q_nope, rotate(q_rot, position_embeddings, is_interleaved=True), latent

    def _up_projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        """From latents to keys (heads, qk_nope_head_dim, kv_lora_rank) and to values (heads, v_head_dim, ...)."""
        c = self.config
        both = self.kv_b_proj.weight.unflatten(0, (c.num_attention_heads, -1))
        to_keys, to_values = both.split((c.qk_nope_head_dim, c.v_head_dim), 1)
        return to_keys, to_values

    def _absorb(self, q_nope: torch.Tensor, q_rot: torch.Tensor) -> torch.Tensor:
        """Queries that meet latents in place of keys: (T, heads, kv_lora_rank + qk_rope_head_dim)."""
        q_latent = torch.einsum("thn,hnl->thl", q_nope, self._up_projections()[0])
        return torch.cat((q_latent, q_rot.to(q_latent.dtype)), -1)

    def _attend_to_chosen(
        self, q: torch.Tensor, latent: torch.Tensor, exchange: IndexExchange, plan: Plan, group: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width, scale = self.config.kv_lora_rank, self.config.scale
        out, meta = attend_index(
            q, latent[:, None], None, exchange, plan, group, head_dim_v=width, softmax_scale=scale
        )  # fmt: skip
        return torch.einsum("thl,hvl->thv", out, self._up_projections()[1]), meta.lse

    def _attend_to_all(
        self, q_nope: torch.Tensor, q_rot: torch.Tensor, latent: torch.Tensor, plan: Plan, group: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """With keys and values of each head, which dense attention computes less for than for latents."""
        c = self.config
        k_pass, k_rot = latent.split((c.kv_lora_rank, c.qk_rope_head_dim), -1)
        kv = self.kv_b_proj(k_pass).unflatten(1, (c.num_attention_heads, -1))
        k_nope, v = kv.split((c.qk_nope_head_dim, c.v_head_dim), -1)
        q = torch.cat((q_nope, q_rot), -1)
        k = torch.cat((k_nope, k_rot[:, None].expand(-1, c.num_attention_heads, -1)), -1)
        out, meta = attend(q, k, v, plan, group, softmax_scale=c.scale)
        return out, meta.lse


def rotate(x: torch.Tensor, position_embeddings: Rotary, is_interleaved: bool) -> torch.Tensor:
    """Rotary embedding of x (T, heads, dim). Of interleaved pairs the first members come first in what is returned, as
    both sides of a dot product have it."""
    cos, sin = (part[:, None, : x.shape[-1] // 2] for part in position_embeddings)
    a, b = (x[..., 0::2], x[..., 1::2]) if is_interleaved else x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def _documents(plan: Plan) -> tuple[int, ...]:
    """First tokens of the documents, and the number of tokens."""
    starts = plan.cu_seqlens
    pairs = 0 if starts is None else sum(n * (n + 1) // 2 for n in map(int.__sub__, starts[1:], starts[:-1]))
    if starts is None or pairs != sum(plan.areas):
        raise ContractError(
            "DSA is causal in each document, and the mask of this plan is not; make it of Mask.causal(total) or "
            "Mask.varlen(cu_seqlens, causal=True)."
        )
    return starts


def _lists_of(shared: DsaOutput | None) -> tuple[torch.Tensor, IndexExchange]:
    if shared is None or shared.indices is None or shared.exchange is None:
        raise ContractError("This layer has no indexer; give shared=, what an earlier layer returned in this stage.")
    return shared.indices, shared.exchange


__all__ = ["DEEPSEEK_V32", "GLM_5", "DsaAttention", "DsaConfig", "DsaIndexer", "DsaOutput"]
