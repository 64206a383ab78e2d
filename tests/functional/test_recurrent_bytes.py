# SPDX-License-Identifier: Apache-2.0
"""The bytes that ``plan.explain`` says of a recurrent layer, beside those that gloo is given."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from magi_attention.api import DispatchConfig, DistAttnConfig, Mask, Plan, RecurrentShape, make_plan, run_recurrent
from magi_attention.integrations.recurrent_kernels import run_mamba2
from magi_attention.meta.recurrent.ways import WAYS
from magi_attention.testing.spawn import run_processes

HEADS, KEY_HEADS, KEY, WIDTH, DTYPE = 8, 4, 16, 8, torch.bfloat16
MASKS = {
    "documents": Mask.varlen([0, 301, 307, 1000, 1003, 1536], causal=True),
    "one": Mask.causal(1536),
    "short": Mask.varlen(list(range(0, 1537, 32)), causal=True),
}

LAYERS = ("gated_delta", "kda", "rwkv7", "gla", "mamba2")


def plan_of(mask: str, world: int) -> Plan:
    return make_plan(MASKS[mask], world, DistAttnConfig(DispatchConfig(max_fragments=4)))


def kernel(value, initial_state, cu_seqlens, *inputs):
    """Shapes and graph of a recurrent layer."""
    rest = sum(x.float().sum() for x in inputs)
    return value + (initial_state.sum() + rest).to(value.dtype), initial_state + rest + value.float().sum()


def scan(x, dt, A, B, C, chunk_size, initial_states, seq_idx, return_final_states, **_):
    """The same for ``mamba_chunk_scan_combined``."""
    rest = sum(y.float().sum() for y in (dt, A, B, C))
    return x + (initial_states.sum() + rest).to(x.dtype), initial_states + rest + x.float().sum()


def run(layer: str, plan: Plan, rows: int, way: str) -> torch.Tensor:
    def drawn(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
        return torch.zeros(rows, *shape, dtype=dtype, requires_grad=True)

    q, k, value, number = drawn(KEY_HEADS, KEY), drawn(KEY_HEADS, KEY), drawn(HEADS, WIDTH), drawn(HEADS)
    if layer == "mamba2":
        return run_mamba2(scan, value, number, -torch.ones(HEADS), k, q, 16, plan, dt_softplus=True, way=way)
    decay = drawn(HEADS, *[KEY] * (layer in ("kda", "rwkv7", "gla")), dtype=torch.float32)
    if layer == "gla":
        return run_recurrent(kernel, value, KEY, plan, inputs=(q, k, decay), log_decay=decay, way=way)
    others = (number,) if layer != "rwkv7" else (drawn(KEY_HEADS, KEY), drawn(KEY_HEADS, KEY))
    return run_recurrent(kernel, value, KEY, plan, inputs=(q, k, decay, *others), way=way)


def sent_by_gloo(rank: int, world: int) -> dict[tuple[str, str, str], list[list[int]]]:
    """For each mask, layer and way what comes from other ranks in each exchange: of a forward, of a backward."""
    got: list[int] = []
    exchange = dist.ProcessGroup.alltoall_base

    def counted(group, output, given, output_splits, *rest):
        rows = sum(output_splits) - output_splits[rank]
        got.append(rows * output.shape[1:].numel() * output.element_size())
        return exchange(group, output, given, output_splits, *rest)

    dist.ProcessGroup.alltoall_base = counted
    found = {}
    for mask in MASKS:
        plan = plan_of(mask, world)
        for layer in LAYERS:
            for way in ("auto", *WAYS):
                got.clear()
                out = run(layer, plan, plan.shard_sizes[rank], way)
                forward = list(got)
                got.clear()
                out.sum().backward()
                found[mask, layer, way] = [forward, list(got)]
    return found


@pytest.mark.parametrize("world", [2, 4, pytest.param(8, marks=pytest.mark.nightly)])
def test_bytes_are_those_that_explain_says(world: int) -> None:
    ranks = run_processes(world, sent_by_gloo)
    for mask, layer, way in ranks[0]:
        shape = RecurrentShape(HEADS, KEY, WIDTH, layer, KEY_HEADS)
        numbers = plan_of(mask, world).explain(recurrent=shape)["recurrent"]
        said = numbers[numbers["way"] if way == "auto" else way]
        for direction, wanted in enumerate((said, said["backward"])):
            moved = np.array([of_rank[mask, layer, way][direction] for of_rank in ranks], dtype=np.int64)
            busiest = int(moved.max(axis=0, initial=0).sum())
            found = {"exchanges": moved.shape[1], "busiest_bytes": busiest, "bytes": int(moved.sum())}
            assert found == {name: wanted[name] for name in found}, (mask, layer, way, direction)
        assert f'"{numbers["way"]}"' in numbers["why"]
