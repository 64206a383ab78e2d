# SPDX-License-Identifier: Apache-2.0
"""Tiny models of transformers, by name here or in ``architectures``, made from their configs with one seed; and
documents of random tokens."""

from __future__ import annotations

import torch
from architectures import make_config
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GptOssConfig, LlamaConfig, Qwen3Config

VOCABULARY, WINDOW = 64, 24
_SAME = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "head_dim": 8,
}  # fmt: skip
_HALF = ["sliding_attention", "full_attention"]
CONFIGS = {
    "llama": lambda: LlamaConfig(**_SAME),
    "qwen3": lambda: Qwen3Config(**_SAME),
    "gemma3": lambda: Gemma3TextConfig(**_SAME, sliding_window=WINDOW, layer_types=_HALF, query_pre_attn_scalar=8),
    "gpt_oss": lambda: GptOssConfig(
        **_SAME, sliding_window=WINDOW, layer_types=_HALF, num_local_experts=4, num_experts_per_tok=2
    ),
}


def make_model(name: str, attention: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    config = CONFIGS[name]() if name in CONFIGS else make_config(name)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    if name == "gpt_oss":  # its sinks begin as whatever memory held
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def models(name: str) -> list[torch.nn.Module]:
    """With "magi" and with "eager", of the same random weights."""
    torch.manual_seed(0)
    ours, theirs = (
        AutoModelForCausalLM.from_config(make_config(name), attn_implementation=kind).train()
        for kind in ("magi", "eager")
    )
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    theirs.load_state_dict(ours.state_dict())
    return [ours, theirs]


def make_documents(count: int, seed: int = 0, longest: int = 60) -> list[dict[str, list[int]]]:
    """Documents with a pattern that can be learned: each token follows from the one before, but for some noise."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for _ in range(count):
        length = int(torch.randint(1, longest, (1,), generator=generator))
        start, noise = torch.randint(0, VOCABULARY, (2, length), generator=generator)
        tokens = (start[0] + 7 * torch.arange(length) + (noise == 0)) % VOCABULARY
        documents.append({"input_ids": tokens.tolist()})
    return documents
