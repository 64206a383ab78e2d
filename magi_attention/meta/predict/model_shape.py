# SPDX-License-Identifier: Apache-2.0
"""Sizes of a decoder, dense or with experts, and how many parameters it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from magi_attention.common.scalars import as_int
from magi_attention.errors import ContractError, UnsupportedError


@dataclass(frozen=True)
class Experts:
    """In a block: ``count`` gated MLPs of width ``hidden`` behind a router, of which a token takes ``per_token``.

    ``shared_hidden``: width of the expert, or of all such experts together, that every token takes. ``dense_layers``:
    blocks that have the MLP of ``ModelShape.hidden`` in place of experts.
    """

    count: int
    per_token: int
    hidden: int
    shared_hidden: int = 0
    dense_layers: int = 0

    def __post_init__(self) -> None:
        for name, least in (("count", 1), ("per_token", 1), ("hidden", 1), ("shared_hidden", 0), ("dense_layers", 0)):
            object.__setattr__(self, name, as_int(getattr(self, name), name, at_least=least))
        if self.per_token > self.count:
            raise ContractError(f"per_token is {self.per_token}, and there are {self.count} experts; give fewer.")

    @classmethod
    def of_config(cls, found: Mapping[str, Any], num_layers: int) -> Experts | None:
        """From the keys of a transformers config; None for a dense one. ``KeyError`` for a size that is not there."""
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        count = next((found[name] for name in names if found.get(name)), None)
        if count is None:
            return None
        hidden = found.get("moe_intermediate_size") or found["intermediate_size"]
        shared = found.get("shared_expert_intermediate_size") or hidden * (found.get("n_shared_experts") or 0)
        step, dense = found.get("decoder_sparse_step") or 1, set(found.get("mlp_only_layers") or ())
        dense |= set(range(found.get("first_k_dense_replace") or 0))
        dense |= {i for i in range(num_layers) if (i + 1) % step}
        return cls(count, found["num_experts_per_tok"], hidden, shared, len(dense & set(range(num_layers))))


@dataclass(frozen=True)
class ModelShape:
    """A decoder: ``width`` of the residual stream, ``hidden`` of the gated MLP, ``vocabulary`` of the logits.

    ``has_tied_embeddings``: the head is the embedding. ``has_qk_norm``: RMSNorm of each head of q and k. ``experts``:
    in place of the MLP, None for a dense model.
    """

    width: int
    num_layers: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    hidden: int
    vocabulary: int
    has_tied_embeddings: bool = False
    has_qk_norm: bool = False
    experts: Experts | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            if f.type == "int":
                object.__setattr__(self, f.name, as_int(getattr(self, f.name), f.name, at_least=1))
        if self.num_heads_q % self.num_heads_kv:
            raise ContractError(
                f"num_heads_q is {self.num_heads_q}, no multiple of num_heads_kv {self.num_heads_kv}; give those of "
                "the model."
            )
        if self.experts is not None and self.experts.dense_layers >= self.num_layers:
            raise ContractError(
                f"dense_layers is {self.experts.dense_layers}, and the model has {self.num_layers} layers; give fewer, "
                "or no experts."
            )

    @classmethod
    def of_config(cls, config: Any) -> ModelShape:
        """From a transformers config, or a mapping such as its config.json, dense or with experts.

        Biases, and layers that predict further tokens, are not in it. ``UnsupportedError`` for latent attention.
        """
        found = config if isinstance(config, dict) else config.to_dict()
        if found.get("kv_lora_rank"):
            raise UnsupportedError(
                "The config has kv_lora_rank; memory is predicted for attention whose heads have keys of their own."
            )
        try:
            width, heads, layers = found["hidden_size"], found["num_attention_heads"], found["num_hidden_layers"]
            experts, kind = Experts.of_config(found, layers), str(found.get("model_type", ""))
            heads_kv, head_dim = found.get("num_key_value_heads") or heads, found.get("head_dim") or width // heads
            hidden = found["intermediate_size"] if experts is None else found.get("intermediate_size") or experts.hidden
            return cls(
                width, layers, heads, heads_kv, head_dim, hidden, found["vocab_size"],
                bool(found.get("tie_word_embeddings", False)),
                kind.startswith("qwen3") or bool(found.get("use_qk_norm", False)), experts,
            )  # fmt: skip
        except KeyError as error:
            raise ContractError(
                f"The config lacks {error}; give a ModelShape with the sizes of the model in its place."
            ) from error

    @property
    def _attention_parameters(self) -> int:
        """With the norms of a block."""
        projections = self.width * self.head_dim * 2 * (self.num_heads_q + self.num_heads_kv)
        return projections + 2 * self.width + (2 * self.head_dim if self.has_qk_norm else 0)

    @property
    def dense_block_parameters(self) -> int:
        return self._attention_parameters + 3 * self.width * self.hidden

    def block_parameters(self, expert_parallel: int = 1) -> int:
        """Those of the largest kind of block on one of ``expert_parallel`` ranks that share its experts."""
        x = self.experts
        if x is None:
            return self.dense_block_parameters
        of_experts = -(-x.count // expert_parallel) * x.hidden + x.shared_hidden
        return self._attention_parameters + self.width * x.count + 3 * self.width * of_experts

    @property
    def pairs_per_token(self) -> float:
        """Pairs of a query and a key that take as many operations as the matrices of a block do for one token."""
        x, used = self.experts, float(self.dense_block_parameters)
        if x is not None:
            of_token = x.per_token * x.hidden + x.shared_hidden
            sparse = self._attention_parameters + self.width * x.count + 3 * self.width * of_token
            used = (x.dense_layers * used + (self.num_layers - x.dense_layers) * sparse) / self.num_layers
        return 2 * used / (4 * self.num_heads_q * self.head_dim)

    @property
    def root_parameters(self) -> int:
        """Those outside the blocks: embedding, head and the last norm."""
        return (1 if self.has_tied_embeddings else 2) * self.vocabulary * self.width + self.width

    @property
    def num_parameters(self) -> int:
        dense = 0 if self.experts is None else self.experts.dense_layers
        of_blocks = dense * self.dense_block_parameters + (self.num_layers - dense) * self.block_parameters()
        return of_blocks + self.root_parameters
