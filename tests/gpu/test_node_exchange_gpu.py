# SPDX-License-Identifier: Apache-2.0
"""Attention, group casts and group reduces over logical nodes, by NVSHMEM and GIN; each rank has a GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from magi_attention.api import Mask, attend, make_plan
from magi_attention.comm.collectives.reduce import reduce_arrived
from magi_attention.comm.exchange.choice import exchange_group
from magi_attention.comm.exchange.node_exchange import NodeExchange
from magi_attention.comm.transport.torch import as_transport
from magi_attention.common.two_level.nodes import Nodes
from magi_attention.common.two_level.transfers import plan_transfers
from magi_attention.errors import UnsupportedError
from magi_attention.testing.spawn import run_processes

SHAPES = [(8, 128), (8, 128)]
EPOCHS = 3


def whole_numbers(seed: int, count: int) -> list[torch.Tensor]:
    """Small integers: their sums are exact in 16 bits, whatever the order."""
    gen = torch.Generator().manual_seed(seed)
    return [torch.randint(-8, 9, (count, *shape), generator=gen).to(torch.bfloat16) for shape in SHAPES]


def exchange(rank: int, world: int, node_size: int, by: str) -> bool | str:
    sys.path.insert(0, str(Path(__file__).parents[1] / "comm"))
    from comm_oracle import cast_rows, contributions, random_plan

    torch.cuda.set_device(rank)
    whole, nodes = dist.new_group(), Nodes.of_sizes((node_size,), range(world))
    try:
        group = exchange_group(as_transport(whole, timeout_s=60), nodes, torch.device("cuda", rank), by)
    except UnsupportedError as error:
        return str(error)
    for seed in range(4):
        cast = random_plan(seed, world, max_splits=12, max_size=200)
        made = NodeExchange(group, plan_transfers(cast.specs, nodes, 64))
        for epoch in range(EPOCHS):
            numbers = [1000 * seed + 100 * epoch + r for r in range(world)]
            xs = [whole_numbers(n, s.input_rows) for n, s in zip(numbers, cast.specs)]
            ys = [whole_numbers(n + 50, s.output_rows) for n, s in zip(numbers, cast.specs)]
            base = [torch.zeros(x.shape, device="cuda") for x in xs[rank]]
            mine = [x.cuda() for x in xs[rank]]
            work, finish = made.start_cast(mine, is_beside=bool(epoch % 2))
            work.wait()
            outputs = finish()
            work, arrived = made.start_reduce([y.cuda() for y in ys[rank]], [torch.bfloat16] * 2)
            work.wait()
            reduce_arrived(arrived(), base, None, "sum", acc_reduce=True)
            torch.cuda.synchronize()
            group.check("the test")
            for k in range(len(SHAPES)):
                want = cast_rows(cast, [x[k].float().numpy() for x in xs], rank)
                np.testing.assert_array_equal(outputs[k].float().cpu().numpy(), want, f"seed {seed}")
                terms = contributions(cast, [y[k].float().numpy() for y in ys], rank)
                for row, parts in enumerate(terms):
                    np.testing.assert_array_equal(base[k][row].cpu().numpy(), sum(parts, np.zeros(SHAPES[k])))
    assert group.held_bytes == group.arena.num_bytes
    dist.destroy_process_group(whole)
    assert group.held_bytes == 0
    return True


def attend_over_nodes(rank: int, world: int, node_size: int, by: str, device: str = "cuda") -> bool | str:
    """Attention and its gradients, twice each way: by all-to-all-v, then by ``by``."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    group, total = dist.new_group(), 512 * world
    cu_seqlens = [0, total // 3, total // 3 + 100, total]
    gen = torch.Generator().manual_seed(0)
    tensors = [torch.randn(total, h, 64, generator=gen).to(torch.bfloat16).to(device) for h in (8, 2, 2, 8)]
    os.environ["MAGI_ATTENTION_NODE_SIZE"] = str(node_size)
    os.environ["MAGI_ATTENTION_NATIVE_GRPCOLL"] = "0"  # in stages
    for name in ("HIERARCHICAL_COMM", "DETERMINISTIC_MODE"):
        os.environ[f"MAGI_ATTENTION_{name}"] = "1"
    results = []
    for wish in ("all_to_all", "all_to_all", by, by):
        os.environ["MAGI_ATTENTION_NODE_TRANSPORT"] = wish
        plan = make_plan(Mask.varlen(cu_seqlens, causal=True), world, num_heads_q=8, num_heads_kv=2, head_dim=64)
        q, k, v, dout = (plan.shard(x, group).detach().requires_grad_() for x in tensors)
        try:
            out, _ = attend(q, k, v, plan, group)
        except UnsupportedError as error:
            return str(error)
        out.backward(dout.detach())
        results.append([out.detach(), q.grad, k.grad, v.grad])
    direct, _, once, again = results
    assert all(torch.equal(a, b) for a, b in zip(once, again)), "the same bits again"
    for i, (a, b) in enumerate(zip(direct, once)):
        if i < 2:
            assert torch.equal(a, b), "casts move bits"
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    dist.destroy_process_group(group)
    return True


RANKS = pytest.mark.parametrize("world, node_size", [(2, 1), (4, 2)])


def run(main, world, *args):
    if torch.cuda.device_count() < world:
        pytest.skip(f"Needs {world} GPUs.")
    results = run_processes(world, main, *args, timeout_s=240.0, backend="cpu:gloo,cuda:nccl")
    if isinstance(results[0], str):
        pytest.skip(results[0])
    assert results == [True] * world


@pytest.mark.gpu
@pytest.mark.parametrize("by", ["nvshmem", "gin"])
@RANKS
def test_attention_over_logical_nodes(world, node_size, by):
    run(attend_over_nodes, world, node_size, by)


@pytest.mark.gpu
@pytest.mark.parametrize("by", ["nvshmem", "gin"])
@RANKS
def test_rows_and_sums_over_logical_nodes(world, node_size, by):
    run(exchange, world, node_size, by)
