# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's Mamba-2 mixer over the ranks of a plan, with its parameters and the chunked scan of mamba_ssm."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.inference.utils import InferenceMode
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from magi_attention.api import Plan, causal_conv1d
from magi_attention.errors import UnsupportedError
from magi_attention.integrations.recurrent_kernels import run_mamba2
from magi_attention.integrations.shared.megatron_plans import mix_rows
from magi_attention.integrations.shared.recurrent_layers import mark


class _OneRank:
    """The context-parallel group that Megatron's constructor sees, so that a rank keeps all of its heads."""

    def size(self) -> int:
        return 1


@mark
class PlannedMambaMixer(MambaMixer):
    """Each document alone, over Megatron's layout of tokens. States, tokens or heads travel, whichever is fewest bytes.
    Heads need not divide by the context-parallel ranks, and packed documents need no ``seq_idx``."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaMixerSubmodules,
        *args: Any,
        pg_collection: Any,
        **options: Any,
    ) -> None:
        inner = copy.copy(pg_collection)
        inner.cp = _OneRank()
        super().__init__(config, submodules, *args, pg_collection=inner, **options)
        self.pg_collection = pg_collection
        self.cp_group = pg_collection.cp if pg_collection.cp.size() > 1 else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
        packed_seq_params: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states (S, B, hidden), or (T, 1, hidden) with packed documents; so is out, beside its bias or None.
        On one rank inference is Megatron's own."""
        if InferenceMode.is_active() or inference_context is not None or inference_params is not None:
            if self.cp_group is not None:
                raise UnsupportedError("A Mamba layer has no state for inference over ranks; set its cp to 1.")
            return super().forward(
                hidden_states, inference_context, inference_params=inference_params, packed_seq_params=packed_seq_params
            )
        projected, _ = self.in_proj(hidden_states)
        out = mix_rows(self._mix, projected, packed_seq_params, self.cp_group)
        return self.out_proj(self.norm(out) if self.rmsnorm else out)

    def _mix(self, projected: torch.Tensor, plan: Plan, group: Any) -> torch.Tensor:
        """``(T, features of in_proj)`` to ``(T, H P)`` of this rank's tokens."""
        inner, states = self.d_inner_local_tp, self.ngroups_local_tp * self.d_state
        z, xBC, dt = projected.split([inner, inner + 2 * states, self.nheads_local_tp], dim=-1)
        weight = self.conv1d_weight.squeeze(1)
        xBC = self.act(causal_conv1d(xBC, weight, plan, group, bias=self.conv1d_bias))
        x, B, C = xBC.split([inner, states, states], dim=-1)
        D = self.D.float().view(-1, self.headdim) if self.D_has_hdim else self.D
        # newer releases of mamba_ssm take it, and Megatron gives it to these
        more = {"state_dtype": self.mamba_training_ssm_states_dtype} if mamba_mixer.MAMBA_HAS_STATE_DTYPE else {}
        out = run_mamba2(
            mamba_mixer.mamba_chunk_scan_combined, x.unflatten(-1, (-1, self.headdim)), dt,
            -self.A_log.float().exp(), B.unflatten(-1, (-1, self.d_state)), C.unflatten(-1, (-1, self.d_state)),
            self.chunk_size, plan, group, D=D, dt_bias=self.dt_bias.float(), dt_softplus=True, **more,
        )  # fmt: skip
        return (out.flatten(1).float() * F.silu(z.float())).to(z.dtype)


__all__ = ["PlannedMambaMixer"]
