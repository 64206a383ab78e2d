# SPDX-License-Identifier: Apache-2.0
"""Weights of Llama and Qwen3 from safetensors, under the names that Hugging Face gives them.

A rank reads the rows of its own shards alone, from files that are mapped into memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from model import Llama, ModelConfig, local_rows

# Parameters of a block, and whose rows they hold one behind the other.
_OF_BLOCK = {
    "attention_norm.weight": ("input_layernorm",),
    "qkv.weight": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm.weight": ("self_attn.q_norm",),
    "k_norm.weight": ("self_attn.k_norm",),
    "out.weight": ("self_attn.o_proj",),
    "mlp_norm.weight": ("post_attention_layernorm",),
    "gate_up.weight": ("mlp.gate_proj", "mlp.up_proj"),
    "down.weight": ("mlp.down_proj",),
}
_OTHERS = {"embedding.weight": "model.embed_tokens", "norm.weight": "model.norm", "head.weight": "lm_head"}


def read_config(folder: Path) -> ModelConfig:
    """What config.json says; ends with a sentence if the model is another one than model.py's."""
    path = folder / "config.json"
    if not path.exists():
        raise SystemExit(f"--weights {folder} has no config.json; give the folder of a Llama or Qwen3 model.")
    c = json.loads(path.read_text())
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    other = [
        (c.get("model_type") not in ("llama", "qwen3"), f"model_type is {c.get('model_type')!r}"),
        (rope.get("rope_type", rope.get("type", "default")) != "default", "its positions are scaled"),
        (c.get("attention_bias") or c.get("mlp_bias"), "its projections have biases"),
        (c.get("tie_word_embeddings"), "its head is its embedding"),
        (c.get("use_sliding_window"), "some of its layers have windows"),
    ]
    for is_other, reason in other:
        if is_other:
            raise SystemExit(f"--weights {folder}: {reason}, which model.py has not; give Llama-3-8B or Qwen3-8B.")
    heads = c["num_attention_heads"]
    return ModelConfig(
        width=c["hidden_size"], num_layers=c["num_hidden_layers"], num_heads_q=heads,
        num_heads_kv=c.get("num_key_value_heads", heads), head_dim=c.get("head_dim") or c["hidden_size"] // heads,
        hidden=c["intermediate_size"], vocabulary=c["vocab_size"],
        rope_base=rope.get("rope_theta", c.get("rope_theta", 10_000.0)), norm_eps=c["rms_norm_eps"],
        has_qk_norm=c["model_type"] == "qwen3",
    )  # fmt: skip


def load_weights(model: Llama, folder: Path) -> int:
    """Fills all parameters, sharded ones (``fully_shard``) or whole ones. Returns how many bytes were read."""
    read = 0
    with ExitStack() as stack, torch.no_grad():
        slices = _slices(folder, stack)
        for name, parameter in model.named_parameters():
            local, first = local_rows(parameter)
            end, at = first + len(local), 0
            for source in _sources(name):
                if source not in slices:
                    raise SystemExit(f"--weights {folder} has no {source}; are all of its files there?")
                shape = slices[source].get_shape()
                a, b = max(first - at, 0), min(end - at, shape[0])
                if a < b:
                    rows = slices[source][a:b]
                    local[at + a - first : at + b - first].copy_(rows)
                    read += rows.nbytes
                at += shape[0]
            if (at, *shape[1:]) != tuple(parameter.shape):
                raise SystemExit(
                    f"--weights {folder}: {name} has the shape {tuple(parameter.shape)} by config.json, and "
                    f"{(at, *shape[1:])} in the files; they are of two models."
                )
    return read


def _sources(name: str) -> Iterator[str]:
    if name in _OTHERS:
        yield f"{_OTHERS[name]}.weight"
        return
    _, number, rest = name.split(".", 2)
    for part in _OF_BLOCK[rest]:
        yield f"model.layers.{number}.{part}.weight"


def _slices(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """What gives rows of each tensor when it is indexed."""
    try:
        from safetensors import safe_open
    except ImportError:
        raise SystemExit("--weights needs safetensors: pip install safetensors.") from None
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise SystemExit(f"--weights {folder} holds no *.safetensors; give the folder of a Llama or Qwen3 model.")
    found = {}
    for path in files:
        file = stack.enter_context(safe_open(path, framework="pt"))
        found.update({name: file.get_slice(name) for name in file.keys()})
    return found


__all__ = ["load_weights", "read_config"]
