# SPDX-License-Identifier: Apache-2.0
"""Group casts and reduces over logical nodes, by NVSHMEM and GIN, beside what they must give; each rank has a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

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


@pytest.mark.gpu
@pytest.mark.parametrize("by", ["nvshmem", "gin"])
@pytest.mark.parametrize("world, node_size", [(2, 1), (4, 2)])
def test_rows_and_sums_over_logical_nodes(world, node_size, by):
    if torch.cuda.device_count() < world:
        pytest.skip(f"Needs {world} GPUs.")
    results = run_processes(world, exchange, node_size, by, timeout_s=240.0, backend="cpu:gloo,cuda:nccl")
    if isinstance(results[0], str):
        pytest.skip(results[0])
    assert results == [True] * world
