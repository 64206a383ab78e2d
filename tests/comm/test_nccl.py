# SPDX-License-Identifier: Apache-2.0
"""The layer on real GPUs: one process per GPU."""

import pytest
import torch
import torch.distributed as dist
from comm_oracle import random_plan
from test_fake_world import collectives

from magi_attention.comm.collectives.group import group_cast, group_reduce
from magi_attention.comm.collectives.hierarchical import HierarchicalLayout
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.comm.transport.torch import as_transport
from magi_attention.common.two_level.nodes import Nodes
from magi_attention.common.two_level.phases import two_level_cast
from magi_attention.testing.spawn import run_processes

NUM_GPUS = min(torch.cuda.device_count(), 4) // 2 * 2


def whole_numbers(seed, *shape):
    """Small integers as bf16: their sums are exact, whatever the order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(torch.bfloat16)


def cast_and_reduce(t, plan, seed, device, layout=None, **options):
    spec = plan.specs[t.rank]
    x = whole_numbers(seed + t.rank, spec.input_rows, 4, 64).to(device)
    y = torch.full((spec.output_rows, 4, 64), torch.nan, dtype=torch.bfloat16, device=device)
    back = torch.zeros(spec.input_rows, 4, 64, device=device)
    cast = group_cast(x, y, *plan.lists(t.rank), t, async_op=True, layout=layout, **options)
    cast.wait_post_process()
    y2 = y * 2
    options = dict(options, layout=layout, comm_dtype=torch.bfloat16, async_op=True)
    reduce = group_reduce(y2, back, *plan.reduce_lists(t.rank), t, **options)
    reduce.wait_post_process()
    return y.cpu(), back.cpu()


def nccl_main(rank, size):
    world = as_transport(None)
    assert collectives(world, "cuda") == rank
    half = size // 2
    nodes = [dist.new_group([0, 1][:size] if n == 0 else [2, 3]) for n in range(max(half, 1))]
    mesh = dict(intra_group=nodes[rank // 2])
    for seed in range(8):
        plan = random_plan(seed, size, max_splits=12, max_size=3000)
        want = FakeWorld(size).run(cast_and_reduce, plan, seed, "cpu")[rank]
        layout = HierarchicalLayout(two_level_cast(plan.specs, Nodes.of_sizes((2,), range(size)), rank))
        for options in ({}, dict(mesh, layout=layout)):
            got = cast_and_reduce(world, plan, seed, "cuda", **options)
            for a, b in zip(got, want):
                assert torch.equal(a, b), (seed, options.keys())
    return rank


@pytest.mark.gpu
@pytest.mark.skipif(NUM_GPUS < 2, reason="needs at least two GPUs")
def test_nccl():
    assert run_processes(NUM_GPUS, nccl_main, backend="nccl") == list(range(NUM_GPUS))


def gloo_on_gpu_main(rank, size):
    torch.cuda.set_device(0)
    return collectives(as_transport(None), "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gloo_carries_gpu_tensors_through_host_memory():
    assert run_processes(2, gloo_on_gpu_main) == [0, 1]
