# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core: a ``core_attention`` for its layer specs, over Megatron's own context-parallel layout.

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from magi_attention.integrations.megatron import use_magi

    spec = use_magi(get_gpt_layer_local_spec())

``use_magi`` takes the spec of a layer or a block of ``GPTModel``, or of the stack of ``HybridModel``. Each rank keeps
the tokens that Megatron gives it: chunks ``r`` and ``2 cp - 1 - r`` of a sequence, or of each document of a packed one.
So data, rotary embeddings and loss stay as they are, and only needed rows of k and v travel.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, get_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint

from magi_attention.api import Plan, attend
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.integrations.megatron_gated_delta import PlannedGatedDeltaNet
from magi_attention.integrations.megatron_mamba import PlannedMambaMixer
from magi_attention.integrations.shared.megatron_plans import plan_of_batch
from magi_attention.integrations.shared.recurrent_layers import mark

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
_PLANNED = {GatedDeltaNet: PlannedGatedDeltaNet, MambaMixer: PlannedMambaMixer}
_STACK = ("attention_layer", "mla_layer", "dsa_layer", "gdn_layer", "mamba_layer")


def use_magi(spec: ModuleSpec) -> ModuleSpec:
    """A copy of a spec whose self-attention is ours: of a layer, a block, or the stack of ``HybridModel``.

    Gated delta nets and Mamba mixers compute by the plans of attention, too. Cross-attention stays as it is, and so do
    other mixers of tokens, for one context-parallel rank: with more the model is refused by ``UnsupportedError`` when
    it is built, and ``validate`` names them. ``ContractError`` if the spec has no self-attention.
    """
    parts = copy.copy(spec.submodules)
    names = [name for name in _STACK if isinstance(getattr(parts, name, None), ModuleSpec)]
    for name in names:
        setattr(parts, name, _with_ours(getattr(parts, name)))
    if getattr(parts, "layer_specs", None):
        parts.layer_specs = [_with_ours(layer) for layer in parts.layer_specs]
    layers = [getattr(parts, name) for name in names] or getattr(parts, "layer_specs", None)
    made = replace(spec, submodules=parts) if layers else _with_ours(spec)
    if not any(hasattr(_mixer_of(layer)[2], "core_attention") for layer in layers or [made]):
        raise ContractError(
            f"The spec of {get_module(spec).__name__} has no self-attention with a core_attention; give that of a "
            "TransformerLayer, a TransformerBlock or a HybridStack."
        )
    return made


def _mixer_of(layer: ModuleSpec) -> tuple[str, Any, Any]:
    """What mixes tokens in a layer: its field, its spec, None if nothing does, and the parts of that."""
    name = "self_attention" if hasattr(layer.submodules, "self_attention") else "mixer"
    mixer = getattr(layer.submodules, name, IdentityOp)
    return name, None if mixer is IdentityOp else mixer, getattr(mixer, "submodules", None)


def _with_ours(layer: ModuleSpec) -> ModuleSpec:
    # The specs of Megatron hold what deepcopy does not take, so only what changes is copied.
    name, mixer, parts = _mixer_of(layer)
    if hasattr(parts, "core_attention"):
        ours = replace(mixer, submodules=replace(parts, core_attention=CoreAttention))
        return replace(layer, submodules=replace(layer.submodules, **{name: ours}))
    if mixer is None:
        return layer
    planned = _PLANNED.get(get_module(mixer))
    if planned is not None:
        return replace(layer, submodules=replace(layer.submodules, **{name: replace(mixer, module=planned)}))
    return replace(layer, module=_on_one_rank(get_module(layer), name))


@lru_cache  # equal specs have one class
def _on_one_rank(kept: type, name: str) -> type:
    """A layer whose mixer of tokens, its part ``name``, is not known; it is refused over ranks."""

    class OnOneRank(kept):
        def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            mixer = getattr(self, name)
            mark(mixer, knows_plans=False)
            if config.context_parallel_size > 1:
                raise UnsupportedError(
                    f"{type(mixer).__name__} is no mixer of tokens that is known here, so it is not spread over "
                    f"{config.context_parallel_size} context-parallel ranks; set context_parallel_size to 1, or keep "
                    "Megatron's own spec."
                )

    OnOneRank.__name__ = OnOneRank.__qualname__ = kept.__name__
    return OnOneRank


class CoreAttention(MegatronModule):
    """``CoreAttentionInterface`` of Megatron-Core. ``current_max_attn_logits`` (heads,) is what qk-clip reads.

    Causal, full, and windows by layer (``window_size``, ``window_attn_skip_freq``); packed documents (``thd``), with or
    without pads; sinks (``softmax_type``). What is not here is refused when the model is built.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise UnsupportedError(f"attention_dropout is {dropout}; set it to 0 (--attention-dropout 0).")
        if attention_type != "self":
            raise UnsupportedError(f"attention_type is {attention_type!r}; keep another core_attention for it.")
        if k_channels is not None or v_channels is not None:
            raise UnsupportedError("Multi-latent attention gives k_channels; keep another core_attention for it.")
        self.attn_mask_type = attn_mask_type
        _check_mask(attn_mask_type, None)
        self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        is_local = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = tuple(config.window_size) if is_local else None
        tp_group = pg_collection.tp if pg_collection is not None else parallel_state.get_tensor_model_parallel_group()
        self.cp_group = None
        if config.context_parallel_size > 1:
            own = getattr(pg_collection, "cp", None)
            self.cp_group = parallel_state.get_context_parallel_group() if own is None else own
        self.heads = config.num_attention_heads // tp_group.size()
        self.tp_group = tp_group
        self.watches_logits = any(getattr(config, name, False) for name in ("qk_clip", "log_max_attention_logit"))
        self.current_max_attn_logits: torch.Tensor | None = None
        self._add_sink(config)

    def _add_sink(self, config: TransformerConfig) -> None:
        if config.softmax_type == "learnable":
            sink = torch.empty(self.heads, dtype=config.params_dtype)
            if not config.use_cpu_initialization:
                sink = sink.to(torch.cuda.current_device())
            self.softmax_offset = torch.nn.Parameter(sink)
            if config.perform_initialization:
                config.init_method(self.softmax_offset)
        else:
            zeros = torch.zeros(self.heads) if config.softmax_type == "off-by-one" else None
            self.register_buffer("softmax_offset", zeros, persistent=False)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        /,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """query (S, B, H, D) or, packed, (T, H, D); so key and value. Gives (S, B, H D) or (T, H D). The
        ``attention_mask`` of a causal layer is not looked at, as it says nothing new.

        In a packed sequence each document begins at its bound in ``cu_seqlens_q_padded``, if given, and has the length
        that ``cu_seqlens_q`` says. Nobody attends its pads, whose output and gradients are 0.
        ``ContractError``: cu_seqlens that decrease, end elsewhere than the sequence, or differ for keys.
        """
        if attention_bias is not None:
            raise UnsupportedError("attention_bias is given; use rotary or absolute positions.")
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        _check_mask(kind, attention_mask)
        is_causal = kind in _CAUSAL
        plan, group = plan_of_batch(packed_seq_params, query.shape[0], self.cp_group, is_causal, self.window)
        if packed_seq_params is not None:
            return self._attend(query, key, value, plan, group)
        rows = [self._attend(query[:, b], key[:, b], value[:, b], plan, group) for b in range(query.shape[1])]
        return torch.stack(rows, dim=1)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, group: Any) -> torch.Tensor:
        sink = None if self.softmax_offset is None else self.softmax_offset[None].float()
        out, meta = attend(
            q, k, v, plan, group, sink=sink, softmax_scale=self.softmax_scale, return_max_logits=self.watches_logits
        )
        if meta.max_logits is not None:
            known, new = self.current_max_attn_logits, meta.max_logits.detach()
            self.current_max_attn_logits = new if known is None else torch.maximum(known, new)
        return out.flatten(1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> Any:
        """The learnable sinks, by tensor-parallel rank."""
        is_learned = isinstance(self.softmax_offset, torch.nn.Parameter)
        state = self.state_dict(prefix="", keep_vars=True) if is_learned else {}
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {"softmax_offset": 0}, sharded_offsets, tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )  # fmt: skip


def _check_mask(kind: AttnMaskType, mask: torch.Tensor | None) -> None:
    """Padding and masks of one's own are in tensors, which are not read."""
    if kind not in (*_CAUSAL, AttnMaskType.padding, AttnMaskType.no_mask):
        raise UnsupportedError(f"{kind} is a mask of tensors; use causal, no_mask or packed sequences.")
    if mask is not None and kind is not AttnMaskType.causal:
        raise UnsupportedError(f"attention_mask is a tensor, and {kind} reads it; give documents by packed_seq_params.")


__all__ = ["CoreAttention", "use_magi"]
