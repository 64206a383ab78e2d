# SPDX-License-Identifier: Apache-2.0
"""The stack of Megatron-Core's HybridModel: which of its layers become ours, and which stay for one rank alone."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core; ci/integrations installs it")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec  # noqa: E402
from megatron.core.models.hybrid.hybrid_model import HybridModel  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.ssm.gated_delta_net import GatedDeltaNet  # noqa: E402
from megatron.core.ssm.mamba_layer import MambaLayerSubmodules  # noqa: E402
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from use_megatron import stack_spec  # noqa: E402

from magi_attention.errors import ContractError, UnsupportedError  # noqa: E402
from magi_attention.integrations.megatron import CoreAttention, use_magi  # noqa: E402
from magi_attention.integrations.megatron_gated_delta import PlannedGatedDeltaNet  # noqa: E402
from magi_attention.testing.spawn import run_processes  # noqa: E402


def core_of(layer: ModuleSpec) -> object:
    return layer.submodules.self_attention.submodules.core_attention


def test_each_attention_layer_is_ours_and_the_given_spec_is_as_before():
    made = use_magi(hybrid_stack_spec).submodules
    assert all(core_of(layer) is CoreAttention for layer in (made.attention_layer, made.mla_layer, made.dsa_layer))
    own = hybrid_stack_spec.submodules
    assert CoreAttention not in (core_of(own.attention_layer), core_of(own.mla_layer), core_of(own.dsa_layer))
    assert made.mlp_layer == own.mlp_layer and made.moe_layer == own.moe_layer
    assert issubclass(made.mamba_layer.module, own.mamba_layer.module)
    assert use_magi(hybrid_stack_spec).submodules.mamba_layer.module is made.mamba_layer.module
    mixers = [parts.gdn_layer.submodules.self_attention for parts in (made, own)]
    assert [mixer.module for mixer in mixers] == [PlannedGatedDeltaNet, GatedDeltaNet]
    assert mixers[0].submodules is mixers[1].submodules and made.gdn_layer.module is own.gdn_layer.module


def test_blocks_of_gpt_models():
    parts = TransformerBlockSubmodules(layer_specs=[get_gpt_layer_local_spec(), get_gpt_layer_local_spec()])
    made = use_magi(ModuleSpec(TransformerBlock, submodules=parts))
    assert [core_of(layer) for layer in made.submodules.layer_specs] == [CoreAttention, CoreAttention]


def test_specs_without_attention_are_refused():
    with pytest.raises(ContractError, match="The spec of MLPLayer has no self-attention"):
        use_magi(hybrid_stack_spec.submodules.mlp_layer)


def test_other_mixers_are_refused_over_ranks():
    spec = use_magi(hybrid_stack_spec).submodules.mamba_layer
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, context_parallel_size=2)
    with pytest.raises(UnsupportedError, match="MambaMixer was not tried over 2 context-parallel ranks"):
        spec.module(config=config, submodules=spec.submodules)


class Twice(MegatronModule):
    """Stands for a Mamba layer, whose kernels need a GPU."""

    def __init__(self, config, submodules, **options) -> None:
        super().__init__(config=config)
        self.layer_number = options["layer_number"]

    def forward(self, hidden_states, **options):
        return 2 * hidden_states


def run_a_mamba_pattern(rank: int, world: int) -> list[str]:
    """What HybridModel with a layer in the place of Mamba's says."""
    parallel_state.initialize_model_parallel(context_parallel_size=world)
    config = TransformerConfig(
        num_layers=3, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True, attention_dropout=0.0,
        hidden_dropout=0.0, bias_dropout_fusion=False, context_parallel_size=world, is_hybrid_model=True,
    )  # fmt: skip
    mixer = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules())
    spec = use_magi(stack_spec(mamba_layer=ModuleSpec(Twice, submodules=MambaLayerSubmodules(mixer=mixer))))
    said = []
    try:
        model = HybridModel(config, spec, 16, 12, "M*-", position_embedding_type="learned_absolute")
    except UnsupportedError as error:
        return [str(error)]
    tokens, cu = torch.arange(12)[None], torch.tensor([0, 4, 12], dtype=torch.int32)
    for total in (12, None):
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, total_tokens=total)
        try:
            out = model(tokens, tokens, None, packed_seq_params=packed)
            said.append(f"{tuple(out.shape)}, {out.isfinite().all()}")
        except ContractError as error:
            said.append(str(error))
    return said


@pytest.mark.nightly
def test_mamba_layers_stay_for_one_rank():
    (one,) = run_processes(1, run_a_mamba_pattern)
    assert one[0] == "(1, 12, 16), True" and "give total_tokens to PackedSeqParams" in one[1]
    for said in run_processes(2, run_a_mamba_pattern):
        assert len(said) == 1 and "MambaMixer was not tried over 2" in said[0]
