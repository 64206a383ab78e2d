# SPDX-License-Identifier: Apache-2.0
"""Gradient checkpointing of transformers with ``keep_attention``: the same bits, and attention runs forward once."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch.profiler import profile

from magi_attention.api import keep_attention
from magi_attention.integrations.packing import PackingCollator
from magi_attention.kernels.instruments import FORWARD_RANGE
from magi_attention.testing.spawn import run_processes

pytest.importorskip("transformers", reason="needs transformers; ci/integrations installs it")
LAYERS = 3


def steps(rank: int, world: int, seed: int) -> list[tuple[list[torch.Tensor], int]]:
    """By options of checkpoints: the loss and the gradients, and how often attention ran forward."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from magi_attention.integrations.transformers import register, windows_of

    register()
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="magi",
    )  # fmt: skip
    draw, found = random.Random(seed), []
    documents = [{"input_ids": draw.choices(range(64), k=draw.randint(2, 60))} for _ in range(6)]
    for more in ({}, {"context_fn": keep_attention}):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **more})
        batch = PackingCollator(world, rank, windows_of(config))(documents)
        plans = batch.pop("magi_plans").in_group(dist.group.WORLD)
        with profile() as seen:
            loss = model(**batch, magi_plans=plans, use_cache=False).loss
            loss.backward()
        ran = sum(event.name == FORWARD_RANGE for event in seen.events())
        found.append(([loss.detach(), *(p.grad for p in model.parameters())], ran))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_layers_of_transformers_keep_attention(world):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    for (wanted, twice), (found, once) in run_processes(world, steps, seed):
        assert (twice, once) == (2 * LAYERS, LAYERS)
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
