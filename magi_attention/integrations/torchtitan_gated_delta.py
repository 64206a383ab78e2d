# SPDX-License-Identifier: Apache-2.0
"""torchtitan's Qwen3.5: its gated delta nets over the ranks of a plan, with their parameters and
flash-linear-attention's kernel. Its module imports that package, so nothing else here imports this one early."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torchtitan.config import ParallelismConfig
from torchtitan.config.override import derive
from torchtitan.models.qwen3_5 import model as qwen
from torchtitan.models.qwen3_5 import parallelize_qwen3_5
from torchtitan.trainer import Trainer

from magi_attention.api import causal_conv1d, run_recurrent
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.integrations.packing import LayerPlans
from magi_attention.integrations.recurrent_kernels import fla_kernel
from magi_attention.integrations.shared.recurrent_layers import mark


@mark
class PlannedGatedDeltaNet(qwen.GatedDeltaNet):
    """Each document alone. States, tokens or heads travel, whichever is fewest bytes. The convolution is torch's."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(qwen.GatedDeltaNet.Config):
        pass

    def forward(self, x_BLD: torch.Tensor, attention_masks: Any = None) -> torch.Tensor:
        """x (1, L, D) of this rank's L tokens; so is what it gives. ``attention_masks`` are the plans of the batch."""
        if not isinstance(attention_masks, LayerPlans):
            raise ContractError(
                f"attention_masks is {type(attention_masks).__name__}, no plan of the batch; train by the config that "
                "use_magi returns, whose trainer makes one."
            )
        plan, group, x = attention_masks.full, attention_masks.group, x_BLD[0]
        mixed = torch.cat([self.in_proj_q(x), self.in_proj_k(x), self.in_proj_v(x)], dim=-1)
        filters = torch.cat([self.conv_q.weight, self.conv_k.weight, self.conv_v.weight]).squeeze(1)
        mixed = F.silu(causal_conv1d(mixed, filters, plan, group))
        of_keys, of_values = len(self.conv_q.weight), len(self.conv_v.weight)
        q, k, v = mixed.split([of_keys, of_keys, of_values], dim=-1)
        q, k = (part.unflatten(-1, (-1, self.key_head_dim)) for part in (q, k))
        v, z = (part.unflatten(-1, (-1, self.value_head_dim)) for part in (v, self.in_proj_z(x)))
        g = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        beta = self.in_proj_b(x).sigmoid()
        out = run_recurrent(_kernel, v, self.key_head_dim, plan, group, inputs=(q, k, g, beta))
        return self.out_proj(self.norm(out, z).flatten(1)[None])


def _kernel(
    value: torch.Tensor, initial_state: torch.Tensor, cu_seqlens: torch.Tensor, *inputs: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The chunked one of torchtitan's ``GatedDeltaKernel``, which copies the heads of keys before it."""
    q, k, *rest = inputs
    q, k = (x.repeat_interleave(value.shape[1] // x.shape[1], dim=1) for x in (q, k))
    kernel = fla_kernel(qwen._fla_chunk_gated_delta_rule, use_qk_l2norm_in_kernel=True)
    return kernel(value, initial_state, cu_seqlens, q, k, *rest)


def planned(given: Any, index: int) -> PlannedGatedDeltaNet.Config:
    """The config of layer ``index``'s gated delta net as that of ours."""
    if type(given) is not qwen.GatedDeltaNet.Config or given.kernel.backend != "fla_chunked":
        raise UnsupportedError(
            f"The mixer of layer {index} is {type(given).__qualname__}; give torchtitan's gated delta net with the "
            "backend fla_chunked."
        )
    return derive(given, PlannedGatedDeltaNet.Config)


class _WithoutCp:
    """The parallel dimensions of a training whose model does not ask about ``cp``: our layers know it by their plans.
    Parameters are sharded over its ranks, too, as everywhere in torchtitan."""

    cp_enabled = False

    def __init__(self, dims: Any) -> None:
        self._dims = dims

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dims, name)


def parallelize(model: torch.nn.Module, *, parallel_dims: Any, parallelism: ParallelismConfig, **options: Any) -> Any:
    """torchtitan's, which refuses context parallelism because its own gated delta nets have none."""
    return parallelize_qwen3_5(model, parallel_dims=_WithoutCp(parallel_dims), parallelism=parallelism, **options)


def check(config: Trainer.Config) -> None:
    """``UnsupportedError`` for what its layers were not made for, or cannot do."""
    parallelism, compiled = config.parallelism, config.compile
    if parallelism.spmd_backend != "partial_dtensor":
        raise UnsupportedError(
            f"parallelism.spmd_backend is {parallelism.spmd_backend!r}, whose layouts of gated delta nets have no cp; "
            "set it to 'partial_dtensor' for Qwen 3.5."
        )
    for name in ("tensor_parallel_degree", "expert_parallel_degree", "pipeline_parallel_degree"):
        if (degree := getattr(parallelism, name)) > 1:
            raise UnsupportedError(
                f"parallelism.{name} is {degree}; set it to 1, as gated delta nets by plans share tokens alone."
            )
    if compiled.enable and "model" in compiled.components:
        raise UnsupportedError(
            "compile.components has 'model', and a layer whose states pass is no whole graph; leave 'model' out."
        )


__all__ = ["PlannedGatedDeltaNet", "check", "parallelize", "planned"]
