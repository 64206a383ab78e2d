# SPDX-License-Identifier: Apache-2.0
"""Group casts and reduces over logical nodes, by NVSHMEM, beside what they must give; each rank has a GPU."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from magi_attention.comm.collectives.wire import RowPack
from magi_attention.comm.nvshmem.exchange import NodeExchange, symmetric_memory
from magi_attention.common.two_level.nodes import Nodes
from magi_attention.common.two_level.transfers import plan_transfers
from magi_attention.errors import UnsupportedError
from magi_attention.native.nvshmem import Nvshmem
from magi_attention.testing.spawn import run_processes

SHAPES = [(8, 128), (8, 128)]
EPOCHS = 3


def whole_numbers(seed: int, count: int) -> list[torch.Tensor]:
    """Small integers: their sums are exact in 16 bits, whatever the order."""
    gen = torch.Generator().manual_seed(seed)
    return [torch.randint(-8, 9, (count, *shape), generator=gen).to(torch.bfloat16) for shape in SHAPES]


def exchange(rank: int, world: int, node_size: int) -> bool:
    sys.path.insert(0, str(Path(__file__).parents[1] / "comm"))
    from comm_oracle import cast_rows, contributions, random_plan

    torch.cuda.set_device(rank)
    library = Nvshmem()
    library.join(dist.distributed_c10d._get_default_store(), rank, world)
    nodes, pack = Nodes.of_sizes((node_size,), range(world)), RowPack.of(whole_numbers(0, 0), [torch.bfloat16] * 2)
    for seed in range(4):
        cast = random_plan(seed, world, max_splits=12, max_size=200)
        made = NodeExchange(
            library, plan_transfers(cast.specs, nodes, 64), rank, pack, pack, partial(symmetric_memory, library),
            lambda: torch.cuda.current_stream().cuda_stream, timeout_ms=60_000,
        )  # fmt: skip
        for epoch in range(EPOCHS):
            numbers = [1000 * seed + 100 * epoch + r for r in range(world)]
            xs = [whole_numbers(n, s.input_rows) for n, s in zip(numbers, cast.specs)]
            ys = [whole_numbers(n + 50, s.output_rows) for n, s in zip(numbers, cast.specs)]
            base = [torch.zeros(x.shape, device="cuda") for x in xs[rank]]
            outputs = made.cast([x.cuda() for x in xs[rank]])
            made.reduce([y.cuda() for y in ys[rank]], base)
            torch.cuda.synchronize()
            made.check()
            for k in range(len(SHAPES)):
                want = cast_rows(cast, [x[k].float().numpy() for x in xs], rank)
                np.testing.assert_array_equal(outputs[k].float().cpu().numpy(), want, f"seed {seed}")
                terms = contributions(cast, [y[k].float().numpy() for y in ys], rank)
                for row, parts in enumerate(terms):
                    np.testing.assert_array_equal(base[k][row].cpu().numpy(), sum(parts, np.zeros(SHAPES[k])))
        library.free(made.memory.data_ptr())
    library.leave()
    return True


@pytest.mark.gpu
@pytest.mark.parametrize("world, node_size", [(2, 1), (4, 2)])
def test_rows_and_sums_over_logical_nodes(world, node_size):
    if torch.cuda.device_count() < world:
        pytest.skip(f"Needs {world} GPUs.")
    try:
        Nvshmem()
    except UnsupportedError as error:
        pytest.skip(str(error))
    assert run_processes(world, exchange, node_size, timeout_s=240.0) == [True] * world
