# SPDX-License-Identifier: Apache-2.0
"""A HybridModel of gated delta nets, Mamba layers and attention over context-parallel ranks; started as
``train_tiny.py``.

It gives the loss and all gradients of packed documents, or of each document alone through Megatron's own layers.

flash-linear-attention and mamba_ssm need a GPU, so functions with their names and arguments stand in their place.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from recurrent_stand_ins import (
    RMSNorm,
    chunk_gated_delta_rule,
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
)

BOUNDS = [0, 24, 36, 60]  # each a multiple of twice the ranks
PATTERN = "GM*GM-"


def causal_conv1d(x, weight, bias, activation, initial_state, output_final_state, cu_seqlens):
    """The convolution of one document."""
    assert activation == "silu" and initial_state is None and not output_final_state and cu_seqlens is None
    padded = F.pad(x.mT, (weight.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], bias, groups=len(weight)).mT), None


def l2norm(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def install_stand_ins() -> None:
    for name, function in (
        ("fla.modules.convolution", causal_conv1d),
        ("fla.modules.l2norm", l2norm),
        ("fla.ops.gated_delta_rule", chunk_gated_delta_rule),
        ("mamba_ssm.ops.triton.layernorm_gated", RMSNorm),
        ("mamba_ssm.ops.triton.ssd_combined", mamba_chunk_scan_combined),
        ("mamba_ssm.ops.triton.ssd_combined", mamba_split_conv1d_scan_combined),
    ):
        for folder in (*accumulate(name.split(".")[:-1], lambda a, b: f"{a}.{b}"), name):
            sys.modules.setdefault(folder, ModuleType(folder))
        setattr(sys.modules[name], function.__name__, function)
    torch.cuda.current_device = lambda: "cpu"  # where Megatron puts parameters of these layers


os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Megatron compiles parts of it
install_stand_ins()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.hybrid.hybrid_model import HybridModel  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.ssm import mamba_mixer  # noqa: E402
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules  # noqa: E402
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules  # noqa: E402
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules  # noqa: E402
from train_tiny import leave  # noqa: E402
from use_megatron import VOCABULARY, fill, local_rows, stack_spec  # noqa: E402

from magi_attention.integrations.megatron import use_magi  # noqa: E402
from magi_attention.integrations.megatron_gated_delta import PlannedGatedDeltaNet  # noqa: E402
from magi_attention.integrations.megatron_mamba import PlannedMambaMixer  # noqa: E402
from magi_attention.integrations.validate import validate  # noqa: E402

# which draws weights on a GPU, with a state of its own
mamba_mixer.get_cuda_rng_tracker = lambda: SimpleNamespace(fork=nullcontext)


def make_model(tp: int, cp: int, is_own: bool, is_deterministic: bool) -> HybridModel:
    """``is_own``: with Megatron's recurrent layers. Three of their heads are on a tensor-parallel rank, so that they do
    not divide by two context-parallel ones."""
    config = TransformerConfig(
        num_layers=len(PATTERN), hidden_size=24, num_attention_heads=4, num_query_groups=2, use_cpu_initialization=True,
        perform_initialization=False, attention_dropout=0.0, hidden_dropout=0.0, bias_dropout_fusion=False,
        masked_softmax_fusion=False, context_parallel_size=cp, is_hybrid_model=True, linear_conv_kernel_dim=4,
        activation_func=F.silu, linear_key_head_dim=4, linear_value_head_dim=8, linear_num_key_heads=3 * tp,
        linear_num_value_heads=3 * tp, deterministic_mode=is_deterministic, add_bias_linear=False,
        mamba_num_heads=3 * tp, mamba_head_dim=8, mamba_state_dim=4, mamba_num_groups=tp,
        mamba_training_ssm_states_dtype=torch.float32, tensor_model_parallel_size=tp,
    )  # fmt: skip
    own = get_gpt_layer_local_spec().submodules
    parts = GatedDeltaNetSubmodules(ColumnParallelLinear, own.input_layernorm, RowParallelLinear)
    gdn = TransformerLayerSubmodules(
        input_layernorm=own.input_layernorm, self_attention=ModuleSpec(GatedDeltaNet, submodules=parts),
        self_attn_bda=own.self_attn_bda,
    )  # fmt: skip
    mixer = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear))
    mamba = MambaLayerSubmodules(norm=own.input_layernorm, mixer=mixer, mamba_bda=own.self_attn_bda)
    given = stack_spec(
        gdn_layer=ModuleSpec(TransformerLayer, submodules=gdn), mamba_layer=ModuleSpec(MambaLayer, submodules=mamba)
    )
    spec = use_magi(given)
    if is_own:
        spec.submodules.gdn_layer = given.submodules.gdn_layer
        spec.submodules.mamba_layer = given.submodules.mamba_layer
    model = HybridModel(
        config, spec, VOCABULARY, BOUNDS[-1], hybrid_layer_pattern=PATTERN, position_embedding_type="learned_absolute"
    )
    kinds = {type(layer) for layer in model.modules() if isinstance(layer, (GatedDeltaNet, MambaMixer))}
    assert kinds == ({GatedDeltaNet, MambaMixer} if is_own else {PlannedGatedDeltaNet, PlannedMambaMixer})
    fill(model, tp, parallel_state.get_tensor_model_parallel_rank())
    return model


def main(out: str, settings: dict) -> None:
    dist.init_process_group("gloo")
    tp = settings.get("tp", 1)
    cp = dist.get_world_size() // tp
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
    model = make_model(tp, cp, settings["own"], settings["deterministic"])
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(0, VOCABULARY, (2, 1, BOUNDS[-1]), generator=generator)
    positions = torch.arange(BOUNDS[-1])[None]
    total = torch.zeros(())
    if settings["own"]:
        for a, b in zip(BOUNDS, BOUNDS[1:]):
            total = total + model(tokens[:, a:b], positions[:, a:b], None, labels=labels[:, a:b]).sum()
    else:
        rows = local_rows(BOUNDS, cp, parallel_state.get_context_parallel_rank())
        cu = torch.tensor(BOUNDS, dtype=torch.int32)
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)
        given = (x[:, rows] for x in (tokens, positions))
        total = model(*given, None, labels=labels[:, rows], packed_seq_params=packed).sum()
    total.backward()
    loss, grads = total.detach(), {}
    dist.all_reduce(loss)
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad)
        grads[name] = parameter.grad.flatten().tolist()
    if dist.get_rank() == 0:
        found = [str(finding) for finding in validate(model)]
        Path(out).write_text(json.dumps({"processes": tp * cp, "loss": float(loss), "grads": grads, "found": found}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
    leave()
