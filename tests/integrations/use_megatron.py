# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's GPTModel and HybridModel with our core_attention, over tensor- and context-parallel ranks; started as
``train_tiny.py``. It gives losses and gradients of cases, which one process gives too."""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.utils import get_batch_on_this_cp_rank
from train_tiny import leave

from magi_attention.integrations.megatron import CoreAttention, use_magi

TOKENS, VOCABULARY = 64, 64
BOUNDS = [0, 24, 32, 64]  # each a multiple of twice the ranks
CASES = {
    "causal": {},
    "window": {"window_size": (7, 0), "window_attn_skip_freq": 2},
    "sink": {"softmax_type": "learnable"},
    "off-by-one": {"softmax_type": "off-by-one"},
    "hybrid": {"is_hybrid_model": True, "window_size": (7, 0), "window_attn_skip_freq": 3},  # layer 3 sees all
}


class DenseAttention(MegatronModule):
    """Attention of one process by a dense mask, with the parameters of ours."""

    def __init__(self, config, **options) -> None:
        super().__init__(config=config)
        ours = CoreAttention(config, **options)
        self.softmax_offset, self.window = ours.softmax_offset, ours.window

    def forward(self, query, key, value, mask, /, *, attn_mask_type, attention_bias=None, packed_seq_params=None):
        q, k, v = (x.reshape(TOKENS, -1, 8).transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(2, 0) for x in (k, v))
        at = torch.arange(TOKENS)
        seen = at[:, None] >= at
        if self.window is not None:
            seen &= at[:, None] - at <= self.window[0]
        if packed_seq_params is not None:
            document = torch.bucketize(at, torch.tensor(BOUNDS[1:-1]), right=True)
            seen &= document[:, None] == document
        scores = (q @ k.mT * 8**-0.5).masked_fill(~seen, float("-inf"))
        if self.softmax_offset is not None:
            sink = self.softmax_offset[:, None, None].expand(-1, TOKENS, 1)
            scores = torch.cat([scores, sink], -1)
        out = torch.softmax(scores, -1)[..., :TOKENS] @ v
        return out.transpose(0, 1).reshape(*query.shape[:-2], -1)


def stack_spec(**layers) -> ModuleSpec:
    """HybridModel's stack of attention and MLP layers, without Transformer Engine, which its own spec needs."""
    own = get_gpt_layer_local_spec().submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=own.input_layernorm, self_attention=own.self_attention, self_attn_bda=own.self_attn_bda
    )
    mlp = TransformerLayerSubmodules(pre_mlp_layernorm=own.pre_mlp_layernorm, mlp=own.mlp, mlp_bda=own.mlp_bda)
    parts = HybridStackSubmodules(
        attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(MLPLayer, submodules=mlp),
        **layers,
    )
    return ModuleSpec(HybridStack, params={"post_layer_norm": False}, submodules=parts)


def make_model(tp: int, cp: int, is_dense: bool = False, **options) -> GPTModel | HybridModel:
    torch.manual_seed(0)
    is_hybrid = options.get("is_hybrid_model", False)
    config = TransformerConfig(
        num_layers=4 if is_hybrid else 2, hidden_size=32, num_attention_heads=4, num_query_groups=2,
        use_cpu_initialization=True, attention_dropout=0.0, hidden_dropout=0.0, bias_dropout_fusion=False,
        masked_softmax_fusion=False, tensor_model_parallel_size=tp, context_parallel_size=cp,
        log_max_attention_logit=True, **options,
    )  # fmt: skip
    spec = use_magi(stack_spec() if is_hybrid else get_gpt_layer_local_spec())
    if is_dense:
        layer = spec.submodules.attention_layer if is_hybrid else spec
        layer.submodules.self_attention.submodules.core_attention = DenseAttention
    sizes = (config, spec, VOCABULARY, TOKENS)
    if is_hybrid:
        model = HybridModel(*sizes, hybrid_layer_pattern="*-*-", position_embedding_type="learned_absolute")
    else:
        model = GPTModel(*sizes, position_embedding_type="learned_absolute")
    fill(model, tp, parallel_state.get_tensor_model_parallel_rank())
    return model


def fill(model: MegatronModule, tp: int, rank: int) -> None:
    """Weights that depend on their names only, whatever share of them a tensor-parallel rank has."""
    for name, parameter in model.named_parameters():
        is_split = getattr(parameter, "tensor_model_parallel", False) or name.endswith("softmax_offset")
        dim, shape = max(getattr(parameter, "partition_dim", 0), 0), list(parameter.shape)
        shape[dim] *= tp if is_split else 1
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        whole = 0.1 * whole + float("norm" in name and name.endswith("weight"))
        parameter.data.copy_(whole.chunk(tp, dim)[rank] if is_split else whole)


def whole_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(0, VOCABULARY, (2, 1, TOKENS), generator=generator)
    return {"tokens": tokens, "labels": labels, "position_ids": torch.arange(TOKENS)[None]}


def local_rows(bounds: list[int], cp: int, rank: int) -> torch.Tensor:
    """Megatron's layout of documents: chunks ``rank`` and ``2 cp - 1 - rank`` of each."""
    rows = []
    for a, b in zip(bounds, bounds[1:]):
        parts = torch.arange(a, b).chunk(2 * cp) if cp > 1 else [torch.arange(a, b)]
        rows += [parts[rank], parts[-1 - rank]] if cp > 1 else parts
    return torch.cat(rows)


def run(model: MegatronModule, cp: int, packed: bool) -> dict:
    """The summed loss, a checksum of each gradient over all ranks, and the greatest logits of the last layer."""
    group, batch = parallel_state.get_context_parallel_group(), whole_batch()
    params = None
    if packed:
        rows = local_rows(BOUNDS, cp, group.rank())
        batch = {name: x[:, rows] for name, x in batch.items()}
        cu = torch.tensor(BOUNDS, dtype=torch.int32)
        params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)
    elif cp > 1:
        batch = get_batch_on_this_cp_rank({**batch, "cu_seqlens": None}, is_hybrid_cp=False, cp_group=group)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=params)
    losses.sum().backward()
    total = losses.detach().sum()
    dist.all_reduce(total, group=group)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
    norms = {n: float(p.grad.double().square().sum()) for n, p in model.named_parameters()}
    core = [x for x in model.modules() if isinstance(x, (CoreAttention, DenseAttention))][-1]
    result = {"loss": float(total), "norms": norms}
    if isinstance(core, CoreAttention):
        top = core.current_max_attn_logits.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        result["top"] = top.tolist()
    return result


def main(out: str, settings: dict) -> None:
    dist.init_process_group("gloo")
    tp, cp = settings["tp"], settings["cp"]
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
    result = {"processes": dist.get_world_size()}
    for name, options in CASES.items():
        for packed in (False, True):
            result[f"{name}{', packed' if packed else ''}"] = run(
                make_model(tp, cp, settings.get("dense", False), **options), cp, packed
            )
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
    leave()
