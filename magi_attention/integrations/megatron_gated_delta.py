# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's gated delta net over the ranks of a plan, with its parameters and flash-linear-attention's kernel."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.ssm.gated_delta_net import GatedDeltaNet

from magi_attention.api import Plan, causal_conv1d, run_recurrent
from magi_attention.errors import UnsupportedError
from magi_attention.integrations.recurrent_kernels import delta_rule_by_segments, fla_kernel
from magi_attention.integrations.shared.megatron_plans import mix_rows
from magi_attention.integrations.shared.recurrent_layers import mark


@mark
class PlannedGatedDeltaNet(GatedDeltaNet):
    """Each document alone, over Megatron's layout of tokens. States, tokens or heads travel, whichever is fewest bytes.
    Heads need not divide by the context-parallel ranks."""

    def _setup_variant_attrs(self) -> None:
        group = self.pg_collection.cp
        self.cp_group, self.cp_size = group if group.size() > 1 else None, 1  # a rank keeps all of its heads
        if "gdn_norm_out" in (self.config.recompute_modules or ()):
            raise UnsupportedError("recompute_modules has gdn_norm_out; leave it out, or keep Megatron's own spec.")
        super()._setup_variant_attrs()

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        sequence_len_offset: int | None = None,
        *,
        inference_params: Any = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states (S, B, hidden), or (T, 1, hidden) with packed documents; so is out, beside its bias or None."""
        if inference_context is not None or inference_params is not None:
            raise UnsupportedError("A gated delta net has no state for inference here; keep Megatron's own spec.")
        projected, _ = self.in_proj(hidden_states)
        return self.out_proj(mix_rows(self._mix, projected, packed_seq_params, self.cp_group))

    def _mix(self, projected: torch.Tensor, plan: Plan, group: Any) -> torch.Tensor:
        """``(T, features of in_proj)`` to ``(T, H V)`` of this rank's tokens."""
        tokens = len(projected)
        qkv, gate, beta, alpha = projected.split(self.feat_dim_split, dim=-1)
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        qkv = self.act_fn(causal_conv1d(qkv, weight, plan, group, bias=bias))
        gate = gate.reshape(1, tokens, -1, self.value_head_dim)
        query, key, value, gate, beta, alpha = self._prepare_input_for_gated_delta_rule(
            qkv[None], gate, 1, tokens, beta[None], alpha[None]
        )
        g, beta = self._compute_g_and_beta(self.A_log, self.dt_bias, alpha, beta)
        # the one of Megatron's deterministic mode takes no packed documents
        adapter = delta_rule_by_segments if self.config.deterministic_mode else fla_kernel
        out = run_recurrent(
            adapter(self.gated_delta_rule), value[0], self.key_head_dim, plan, group,
            inputs=(query[0], key[0], g[0], beta[0]),
        )  # fmt: skip
        return self._apply_gated_norm(out, gate).reshape(tokens, -1)


__all__ = ["PlannedGatedDeltaNet"]
