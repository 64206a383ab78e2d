# SPDX-License-Identifier: Apache-2.0
"""torchtitan 0.3.0: context parallelism of packed documents, for the models that it trains.

    # my_configs.py; then: torchrun ... -m torchtitan.train --module my_configs --config llama3_8b_magi \\
    #                                   --parallelism.context_parallel_degree 8
    from torchtitan.models.llama3.config_registry import llama3_8b
    from magi_attention.integrations.torchtitan import use_magi

    def llama3_8b_magi():
        return use_magi(llama3_8b())

``use_magi`` puts ``MagiAttention`` into each layer, and plans into gated delta nets. It makes the trainer and its
validator give each rank the tokens of one plan instead of torchtitan's equal parts. Nothing of torchtitan is patched.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import spmd_types as spmd
import torch
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.validate import Validator
from torchtitan.config import ParallelismConfig
from torchtitan.config.override import derive
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.distributed.full_dtensor import parallelize_inputs
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.gpt_oss.model import Attention as GptOssAttention
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import LocalMapConfig, ShardingConfig
from torchtitan.trainer import Trainer

from magi_attention.api import AttentionCheck, DispatchConfig, DistAttnConfig
from magi_attention.api.compiled.ops import compiled_attn
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.functional.calls.attention_check import note_call
from magi_attention.integrations.packing import LayerPlans, layer_plans
from magi_attention.integrations.shared.recurrent_layers import MOST_FRAGMENTS

_MASKS_OF_HYBRID = ("quadratic_attention", "deltanet")  # by these names a hybrid model takes them
Batch = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]


class MagiAttention(Module):
    """The ``inner_attention`` of a layer. It has no parameters, so checkpoints are those of other attentions."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        window_size: tuple[int, int] = (-1, 0)
        """As of VarlenAttention: (n, 0) for n tokens before a token, (-1, 0) for all before it in its document."""

        @property
        def window(self) -> int | None:
            """Tokens that a token sees, itself included; None for no limit."""
            return None if self.window_size[0] < 0 else self.window_size[0] + 1

    _sharding_config: ShardingConfig | None

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.window, self.window_size = config.window, config.window_size

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """Keys and values stay where they are: torchtitan would gather all of them over ``cp`` here."""
        if (sharding := self._sharding_config) is not None and (inputs := sharding.in_src_shardings) is not None:
            self._sharding_config = dataclasses.replace(
                sharding, in_dst_shardings=inputs, local_map=LocalMapConfig(in_grad_placements=tuple(inputs.values()))
            )
        super().parallelize(parallel_dims)

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: LayerPlans,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable | None = None,
    ) -> torch.Tensor:
        """q (1, L, Hq, D), k (1, L, Hk, D), v (1, L, Hk, Dv) of this rank's L tokens; gives (1, L, Hq, Dv).
        ``attention_masks`` comes with the batch; ``out_transform`` is how gpt-oss hands over its sinks."""
        if not isinstance(attention_masks, LayerPlans):
            raise ContractError(
                f"attention_masks is {type(attention_masks).__name__}, no plan of the batch; train by the config that "
                "use_magi returns, whose trainer makes one."
            )
        sink = None if out_transform is None else _sink_of(out_transform)
        with spmd.no_typecheck():
            # attend as one op, which selective checkpointing can keep; it must not keep tensors from inside.
            plan = attention_masks.of(self.window)
            note_call(plan._mark)
            facts = plan._facts(attention_masks.group)
            out, _ = compiled_attn(q_BLNH[0], k_BLNH[0], v_BLNH[0], sink, facts, scale, 0.0, False)
            return out[None]


def _sink_of(transform: Callable) -> torch.Tensor:
    """(1, Hq) float32: gpt-oss rescales the output by its sinks, which is what a sink in the softmax does."""
    owner = getattr(transform, "__self__", None)
    if not isinstance(owner, GptOssAttention):
        raise UnsupportedError(f"out_transform is {transform!r}; only that of gpt-oss, its sinks, is known.")
    sinks = owner.sinks
    if isinstance(sinks, DTensor):
        sinks = sinks.to_local(grad_placements=sinks.placements)
    return sinks[None].float()


class MagiSelectiveAC(SelectiveAC):
    """torchtitan's policy, which keeps the result of attention: to compute it anew, rows would travel again."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return super().get_save_ops() | {torch.ops.magi_attention.dist_attn_fwd.default}


class MagiTrainer(Trainer):
    """torchtitan's trainer, with a plan for each batch."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def __init__(self, config: Config) -> None:
        _check(config)
        if type(config.activation_checkpoint) is SelectiveAC.Config:
            config.activation_checkpoint = derive(config.activation_checkpoint, MagiSelectiveAC.Config)
        super().__init__(config)
        self._attention_check = AttentionCheck(torch.nn.ModuleList(self.model_parts))
        self._batch_plans: list[Any] = []

    def forward_backward_step(self, **batch: Any) -> torch.Tensor:
        """torchtitan's, with the check that all attention went by the plans of the batch."""
        with self._attention_check() as self._batch_plans:
            return super().forward_backward_step(**batch)

    def post_dataloading_process(self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor) -> Batch:
        self.ntokens_seen += labels.numel() // self.parallel_dims.cp
        batch = _local_batch(self.parallel_dims, self.config.parallelism, self.model_config, input_dict, labels)
        self._batch_plans += _plans_of(batch).all()
        if self.parallel_dims.spmd_backend == "spmd_types":
            return annotate_input_spmd_types(self.parallel_dims, *batch)
        return batch


class MagiValidator(Validator):
    """torchtitan's validator, with a plan for each batch."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        pass

    def validate(self, model_parts: list[torch.nn.Module], step: int) -> None:
        with AttentionCheck(torch.nn.ModuleList(model_parts))() as self._batch_plans:
            super().validate(model_parts, step)

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor, model_parts: list[torch.nn.Module]
    ) -> Batch:
        batch = _local_batch(self.parallel_dims, self.parallelism, model_parts[0].config, input_dict, labels)
        self._batch_plans += _plans_of(batch).all()
        return batch


def use_magi(config: Trainer.Config) -> MagiTrainer.Config:
    """The same training with our attention. What it cannot do is refused here or when the trainer is made.

    ``config`` is of torchtitan's own trainer, and its model a decoder built with ``attn_backend`` "varlen", or "flex"
    where the model has no windows. CUDA graphs are switched off, because a plan is not the same in each step.

    Raises:
        UnsupportedError: another trainer, validator or model; layers that mix tokens other than by attention or Qwen
            3.5's gated delta nets.
    """
    for name, given, known in (("trainer", config, Trainer), ("validator", config.validator, Validator)):
        if type(given) is not known.Config:
            raise UnsupportedError(f"The {name} is of {_name(given)}; give torchtitan's own, {_name(known)}.")
    spec = config.model_spec
    if spec is None or not isinstance(spec.model, Decoder.Config):
        raise UnsupportedError(f"The model is {_name(spec and spec.model)}; only decoders of torchtitan are supported.")
    model = copy.deepcopy(spec.model)
    for index, layer in enumerate(model.layers):
        if layer.attention is not None:
            layer.attention.inner_attention = _attention_of(model, index, layer.attention.inner_attention)
        elif getattr(layer, "delta_net", None) is not None:
            from magi_attention.integrations import torchtitan_gated_delta  # wants flash-linear-attention

            layer.delta_net = torchtitan_gated_delta.planned(layer.delta_net, index)
        else:
            raise UnsupportedError(f"Layer {index} has no attention; what it does with tokens is not known over ranks.")
    spec = dataclasses.replace(spec, model=model)
    if _has_gated_delta(model):
        spec = dataclasses.replace(spec, parallelize_fn=torchtitan_gated_delta.parallelize)
    return derive(
        config,
        MagiTrainer.Config,
        model_spec=spec,
        validator=derive(config.validator, MagiValidator.Config),
        training=dataclasses.replace(config.training, disable_cuda_graphs=True),
    )


def _has_gated_delta(model: Decoder.Config) -> bool:
    return any(getattr(layer, "delta_net", None) is not None for layer in model.layers)


def _attention_of(model: Decoder.Config, index: int, given: Module.Config) -> MagiAttention.Config:
    if isinstance(given, VarlenAttention.Config):
        if given.window_size[1] != 0:
            raise UnsupportedError(f"Layer {index} has window_size {given.window_size}; give a causal one, (n, 0).")
    elif not isinstance(given, FlexAttention.Config):
        raise UnsupportedError(f"The attention of layer {index} is {_name(given)}; build the model with varlen.")
    elif not _has_gated_delta(model) and type(model)._owner.get_attention_masks is not Decoder.get_attention_masks:
        raise UnsupportedError(f"{_name(model)} makes masks of its own for flex; build it with attn_backend='varlen'.")
    return derive(given, MagiAttention.Config)


def _check(config: MagiTrainer.Config) -> None:
    if config.model_spec is not None and _has_gated_delta(config.model_spec.model):
        from magi_attention.integrations import torchtitan_gated_delta

        torchtitan_gated_delta.check(config)
    elif (backend := config.parallelism.spmd_backend) == "partial_dtensor":
        raise UnsupportedError(f"parallelism.spmd_backend is {backend!r}; leave it at 'spmd_types'.")
    if not config.training.disable_cuda_graphs:
        raise UnsupportedError("A CUDA graph would keep the plan of one batch; set training.disable_cuda_graphs.")


def _local_batch(
    dims: ParallelDims,
    parallelism: ParallelismConfig,
    model: Decoder.Config,
    input_dict: dict[str, torch.Tensor],
    labels: torch.Tensor,
) -> Batch:
    """This rank's tokens, labels, positions and plans, of a batch (B, L) that all ranks of ``cp`` hold. Rows become one
    sequence (1, B L): each begins a document, as does each position 0."""
    is_hybrid = _has_gated_delta(model)
    known = {"input", "positions"} | ({"mrope_positions", "special_tokens"} if is_hybrid else set())
    if extra := sorted(name for name, given in input_dict.items() if name not in known and given is not None):
        raise UnsupportedError(f"The batch has {', '.join(extra)}; only input and positions are dispatched.")
    if (positions := input_dict.get("positions")) is None:
        raise ContractError("The batch has no positions, by which documents are known; use a dataloader that packs.")
    begins = positions == 0
    begins[:, 0] = True
    cu_seqlens = (*begins.flatten().nonzero().flatten().tolist(), positions.numel())
    attentions = [layer.attention.inner_attention for layer in model.layers if layer.attention is not None]
    windows = {attention.window for attention in attentions} - {None}
    group = dims.get_mesh("cp").get_group() if dims.cp_enabled else None
    plans = _plans(cu_seqlens, dims.cp, tuple(sorted(windows)), is_hybrid).in_group(group)
    if parallelism.enable_sequence_parallel and plans.full.shard_sizes[0] % dims.tp:
        raise ContractError(
            f"A rank has {plans.full.shard_sizes[0]} tokens, which {dims.tp} tensor-parallel ranks cannot share "
            f"equally; make local_batch_size * seq_len a multiple of 16 * {dims.cp} * {dims.tp}."
        )

    def local(x: torch.Tensor, pad: int = 0) -> torch.Tensor:
        return plans.full.shard(x.flatten(), group, pad)[None]

    kwargs = {"positions": local(positions), "attention_masks": plans}
    if is_hybrid:
        kwargs["attention_masks"] = dict.fromkeys(_MASKS_OF_HYBRID, plans)
        if (ids := input_dict.get("mrope_positions")) is not None:  # (B, L, 3)
            kwargs["mrope_positions"] = plans.full.shard(ids.flatten(0, 1), group)[None]
        kwargs["special_tokens"] = input_dict.get("special_tokens", dict.fromkeys(("image_id", "video_id"), -1))
    batch = local(input_dict["input"]), local(labels, IGNORE_INDEX), kwargs
    return parallelize_inputs(dims, *batch) if dims.spmd_backend == "full_dtensor" else batch


@lru_cache(maxsize=8)  # steps whose documents are those of a step before, and a validation set
def _plans(cu_seqlens: tuple[int, ...], cp_size: int, windows: tuple[int, ...], is_hybrid: bool) -> LayerPlans:
    few = DistAttnConfig(DispatchConfig(max_fragments=MOST_FRAGMENTS)) if is_hybrid else None
    return layer_plans(cu_seqlens, cp_size, windows, few)


def _plans_of(batch: Batch) -> LayerPlans:
    masks = batch[2]["attention_masks"]
    return masks[_MASKS_OF_HYBRID[0]] if isinstance(masks, dict) else masks


def _name(x: Any) -> str:
    return (x if isinstance(x, type) else type(x)).__qualname__


__all__ = ["MagiAttention", "MagiTrainer", "MagiValidator", "use_magi"]
