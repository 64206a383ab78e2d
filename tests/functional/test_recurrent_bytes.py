# SPDX-License-Identifier: Apache-2.0
"""The bytes that ``plan.explain`` says of a recurrent layer, beside those that come from other ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from magi_attention.api import DispatchConfig, DistAttnConfig, Mask, Plan, RecurrentShape, make_plan, run_recurrent
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.integrations.recurrent_kernels import run_mamba2
from magi_attention.meta.recurrent.ways import WAYS
from magi_attention.testing.random_plans import random_plan

MASKS = {
    "documents": Mask.varlen([0, 301, 307, 1000, 1003, 1536], causal=True),
    "one": Mask.causal(1536),
    "short": Mask.varlen(list(range(0, 1537, 32)), causal=True),
}
LAYERS = ("gated_delta", "kda", "rwkv7", "gla", "mamba2")


def kernel(value, initial_state, cu_seqlens, *inputs):
    """Shapes and graph of a recurrent layer."""
    rest = sum(x.float().sum() for x in inputs)
    return value + (initial_state.sum() + rest).to(value.dtype), initial_state + rest + value.float().sum()


def scan(x, dt, A, B, C, chunk_size, initial_states, seq_idx, return_final_states, **_):
    """The same for ``mamba_chunk_scan_combined``."""
    rest = sum(y.float().sum() for y in (dt, A, B, C))
    return x + (initial_states.sum() + rest).to(x.dtype), initial_states + rest + x.float().sum()


def run(shape: RecurrentShape, plan: Plan, t, way: str) -> torch.Tensor:
    layer, heads, key, dtype = shape.layer, shape.heads, shape.key_dim, (torch.bfloat16, torch.float32)
    of_keys = (shape.key_heads or heads, key)

    def drawn(*sizes: int, dtype: torch.dtype = dtype[shape.element_bytes == 4]) -> torch.Tensor:
        return torch.zeros(plan.shard_sizes[t.rank], *sizes, dtype=dtype, requires_grad=True)

    q, k, value, number = drawn(*of_keys), drawn(*of_keys), drawn(heads, shape.value_dim), drawn(heads)
    if layer == "mamba2":
        return run_mamba2(scan, value, number, -torch.ones(heads), k, q, 16, plan, t, dt_softplus=True, way=way)
    decay = drawn(heads, *[key] * (layer in ("kda", "rwkv7", "gla")), dtype=torch.float32)
    if layer == "gla":
        return run_recurrent(kernel, value, key, plan, t, inputs=(q, k, decay), log_decay=decay, way=way)
    others = (number,) if layer != "rwkv7" else (drawn(*of_keys), drawn(*of_keys))
    return run_recurrent(kernel, value, key, plan, t, inputs=(q, k, decay, *others), way=way)


def received(plan: Plan, way: str, shape: RecurrentShape) -> list[dict[str, int]]:
    """What comes from other ranks in a forward and in a backward, counted at the transport."""

    def rank(t) -> list[list[int]]:
        got, exchange = [], t.all_to_all_v

        def counted(output, given, output_splits, *rest, **options):
            rows = sum(output_splits) - output_splits[t.rank]
            got.append(rows * output.shape[1:].numel() * output.element_size())
            return exchange(output, given, output_splits, *rest, **options)

        t.all_to_all_v = counted
        out = run(shape, plan, t, way)
        forward = len(got)
        out.sum().backward()
        return [got[:forward], got[forward:]]

    of_ranks, found = FakeWorld(plan.cp_size).run(rank), []
    for exchanges in zip(*of_ranks):
        moved = np.array(exchanges, dtype=np.int64)
        busiest = int(moved.max(axis=0, initial=0).sum())
        found.append({"exchanges": moved.shape[1], "busiest_bytes": busiest, "bytes": int(moved.sum())})
    return found


def check(plan: Plan, shape: RecurrentShape) -> None:
    numbers, names = plan.explain(recurrent=shape)["recurrent"], ("exchanges", "busiest_bytes", "bytes")
    for way in ("auto", *WAYS):
        said = numbers[numbers["way"] if way == "auto" else way]
        wanted = [{name: of[name] for name in names} for of in (said, said["backward"])]
        assert received(plan, way, shape) == wanted, (way, shape)
    assert f'"{numbers["way"]}"' in numbers["why"]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_bytes_are_those_that_explain_says(world: int, mask: str, layer: str) -> None:
    plan = make_plan(MASKS[mask], world, DistAttnConfig(DispatchConfig(max_fragments=4)))
    check(plan, RecurrentShape(8, 16, 8, layer, 4))


@pytest.mark.parametrize("seed", range(16))
def test_bytes_of_random_plans(seed: int) -> None:
    print("seed", seed)
    rng = np.random.default_rng(500 + seed)
    plan = random_plan(rng)
    heads, key, width = plan.cp_size * int(rng.integers(1, 4)), int(rng.integers(1, 5)), int(rng.integers(1, 5))
    shape = RecurrentShape(heads, key, width, element_bytes=(2, 4)[seed % 2])
    for layer in LAYERS:
        check(plan, replace(shape, layer=layer))
