# SPDX-License-Identifier: Apache-2.0
"""torchtitan's Qwen3.5 without a GPU: functions with the names of flash-linear-attention's, token by token, and a tiny
model. Import it before torchtitan's model."""

from __future__ import annotations

import sys
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from recurrent_stand_ins import chunk_gated_delta_rule as by_tokens


class Unused(torch.autograd.Function):
    """Stands for a function that torchtitan registers."""


def chunk_gated_delta_rule(*tensors, cu_seqlens=None, cu_seqlens_cpu=None, **named):
    return by_tokens(*tensors, cu_seqlens=None if cu_seqlens is None else cu_seqlens.long(), **named)


def causal_conv1d(x, weight, bias, activation, backend, cu_seqlens, cu_seqlens_cpu):
    """Each document alone."""
    assert activation == "silu" and bias is None and len(x) == 1
    parts = []
    for document in x[0].tensor_split(cu_seqlens_cpu[1:-1].long()):
        padded = F.pad(document.T[None], (weight.shape[1] - 1, 0))
        parts.append(F.conv1d(padded, weight[:, None], groups=len(weight))[0].T)
    return F.silu(torch.cat(parts))[None], None


def install_stand_ins() -> None:
    named: tuple[tuple[str, str, Any], ...] = (
        ("fla.modules.conv.triton.ops", "CausalConv1dFunction", type("A", (Unused,), {})),
        ("fla.modules.conv.causal_conv1d", "causal_conv1d", causal_conv1d),
        ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", chunk_gated_delta_rule),
        ("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule", chunk_gated_delta_rule),
        ("fla.ops.gated_delta_rule.chunk", "ChunkGatedDeltaRuleFunction", type("B", (Unused,), {})),
        ("fla.ops.gated_delta_rule.fused_recurrent", "FusedRecurrentFunction", type("C", (Unused,), {})),
    )
    for module, name, function in named:
        for folder in (*accumulate(module.split(".")[:-1], lambda a, b: f"{a}.{b}"), module):
            sys.modules.setdefault(folder, ModuleType(folder))
        setattr(sys.modules[module], name, function)


def make_small(model: Any, vocabulary: int) -> None:
    """Two layers of gated delta nets and one of attention of the debug model, with few tokens known."""
    model.layers = [model.layers[i] for i in (0, 1, 3)]
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = vocabulary
    model.vision_encoder.num_layers = 1


def masks_of(positions: torch.Tensor) -> dict[str, Any]:
    """What torchtitan's own gated delta nets take, and positions for the dense mask."""
    from torchtitan.models.common.attention import create_varlen_metadata_for_document

    begins = positions.clone()
    begins[:, 0] = 0  # what a row begins with is a document, though the row before may have had a part of it
    documents = create_varlen_metadata_for_document(begins, include_host_offsets=True)
    return {"quadratic_attention": positions, "deltanet": documents}
