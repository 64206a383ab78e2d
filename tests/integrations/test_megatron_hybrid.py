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
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules  # noqa: E402
from megatron.core.ssm.mamba_mixer import MambaMixer  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from use_megatron import stack_spec  # noqa: E402

from magi_attention.errors import ContractError, UnsupportedError  # noqa: E402
from magi_attention.integrations.megatron import CoreAttention, use_magi  # noqa: E402
from magi_attention.integrations.megatron_gated_delta import PlannedGatedDeltaNet  # noqa: E402
from magi_attention.integrations.megatron_mamba import PlannedMambaMixer  # noqa: E402
from magi_attention.integrations.validate import validate  # noqa: E402
from magi_attention.testing.spawn import run_processes  # noqa: E402


def core_of(layer: ModuleSpec) -> object:
    return layer.submodules.self_attention.submodules.core_attention


def test_each_attention_layer_is_ours_and_the_given_spec_is_as_before():
    made = use_magi(hybrid_stack_spec).submodules
    assert all(core_of(layer) is CoreAttention for layer in (made.attention_layer, made.mla_layer, made.dsa_layer))
    own = hybrid_stack_spec.submodules
    assert CoreAttention not in (core_of(own.attention_layer), core_of(own.mla_layer), core_of(own.dsa_layer))
    assert made.mlp_layer == own.mlp_layer and made.moe_layer == own.moe_layer
    mambas = [parts.mamba_layer.submodules.mixer for parts in (made, own)]
    assert [mixer.module for mixer in mambas] == [PlannedMambaMixer, MambaMixer]
    assert mambas[0].submodules is mambas[1].submodules and made.mamba_layer.module is own.mamba_layer.module
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


class Twice(MegatronModule):
    """A mixer of one's own, for which nobody knows what it does with tokens."""

    def __init__(self, config, submodules=None, **options) -> None:
        super().__init__(config=config)

    def forward(self, hidden_states, **options):
        return 2 * hidden_states, None


def run_a_mixer_of_ones_own(rank: int, world: int) -> list[str]:
    """What HybridModel with it in a Mamba layer, and ``validate``, say."""
    parallel_state.initialize_model_parallel(context_parallel_size=world)
    config = TransformerConfig(
        num_layers=3, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True, attention_dropout=0.0,
        hidden_dropout=0.0, bias_dropout_fusion=False, context_parallel_size=world, is_hybrid_model=True,
    )  # fmt: skip
    bda = get_gpt_layer_local_spec().submodules.self_attn_bda
    layer = ModuleSpec(MambaLayer, submodules=MambaLayerSubmodules(mixer=ModuleSpec(Twice), mamba_bda=bda))
    spec = use_magi(stack_spec(mamba_layer=layer))
    assert use_magi(stack_spec(mamba_layer=layer)).submodules.mamba_layer.module is spec.submodules.mamba_layer.module
    try:
        model = HybridModel(config, spec, 16, 12, "M*-", position_embedding_type="learned_absolute")
    except UnsupportedError as error:
        return [str(error)]
    tokens, cu = torch.arange(12)[None], torch.tensor([0, 4, 12], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)
    assert model(tokens, tokens, None, packed_seq_params=packed).isfinite().all()
    return [str(finding) for finding in validate(model)]


@pytest.mark.nightly
def test_other_mixers_are_named_and_stay_for_one_rank():
    ((said,),) = run_processes(1, run_a_mixer_of_ones_own)
    assert "Twice mixes neighbouring tokens" in said and "first at decoder.layers.0.mixer" in said
    assert said.endswith("Train one document at a time, without packing.")
    for (said,) in run_processes(2, run_a_mixer_of_ones_own):
        assert "Twice is no mixer of tokens that is known here" in said and "over 2 context-parallel ranks" in said
