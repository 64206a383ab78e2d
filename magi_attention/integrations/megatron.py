# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core: a ``core_attention`` for its layer specs, over Megatron's own context-parallel layout.

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from magi_attention.integrations.megatron import use_magi

    spec = use_magi(get_gpt_layer_local_spec())

Each rank keeps the tokens that Megatron gives it: chunks ``r`` and ``2 cp - 1 - r`` of a sequence, or of each document
of a packed one. So data, rotary embeddings and loss stay as they are, and only needed rows of k and v travel.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint

from magi_attention.api import Plan, attend
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.integrations.zigzag import zigzag_plan

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


def use_magi(spec: ModuleSpec) -> ModuleSpec:
    """A copy of a layer's or a block's spec whose self-attention is ours; cross-attention stays as it is."""
    made = copy.deepcopy(spec)
    layers = getattr(made.submodules, "layer_specs", None) or [made]
    for layer in layers:
        layer.submodules.self_attention.submodules.core_attention = CoreAttention
    return made


class CoreAttention(MegatronModule):
    """``CoreAttentionInterface`` of Megatron-Core. ``current_max_attn_logits`` (heads,) is what qk-clip reads.

    Causal, full, and windows by layer (``window_size``, ``window_attn_skip_freq``); packed documents (``thd``); sinks
    (``softmax_type``). What is not here is refused when the model is built.
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
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise UnsupportedError(f"attention_dropout is {dropout}; set it to 0 (--attention-dropout 0).")
        if attention_type != "self":
            raise UnsupportedError(f"attention_type is {attention_type!r}; keep another core_attention for it.")
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
        ``attention_mask`` of a causal layer is not looked at, as it says nothing new."""
        if attention_bias is not None:
            raise UnsupportedError("attention_bias is given; use rotary or absolute positions.")
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        _check_mask(kind, attention_mask)
        is_causal = kind in _CAUSAL
        if packed_seq_params is not None:
            group = self.cp_group if packed_seq_params.cp_group is None else packed_seq_params.cp_group
            plan = self._plan(_bounds_of(packed_seq_params), query, group, is_causal)
            return self._attend(query, key, value, plan, group)
        cp_size = 1 if self.cp_group is None else self.cp_group.size()
        plan = self._plan((0, query.shape[0] * cp_size), query[:, 0], self.cp_group, is_causal)
        rows = [self._attend(query[:, b], key[:, b], value[:, b], plan, self.cp_group) for b in range(query.shape[1])]
        return torch.stack(rows, dim=1)

    def _plan(self, bounds: tuple[int, ...], q_THD: torch.Tensor, group: Any, is_causal: bool) -> Plan:
        cp_size = 1 if group is None else group.size()
        if bounds[-1] != q_THD.shape[0] * cp_size:
            raise ContractError(
                f"Documents end at {bounds[-1]}, and {cp_size} ranks hold {q_THD.shape[0]} tokens each; pad each "
                f"document to a multiple of {2 * cp_size} and give cu_seqlens_q_padded."
            )
        return zigzag_plan(bounds, cp_size, is_causal, self.window)

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


def _bounds_of(packed: PackedSeqParams) -> tuple[int, ...]:
    """Where documents begin and end in the whole sequence, padding included; read from the GPU once per batch."""
    found = getattr(packed, "_magi_bounds", None)
    if found is None:
        cu = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        found = packed._magi_bounds = tuple(cu.tolist())
    return found


__all__ = ["CoreAttention", "use_magi"]
