# SPDX-License-Identifier: Apache-2.0
"""TorchTransport on real gloo processes."""

import os
import re
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from comm_oracle import WORKED_EXAMPLE, cast_rows, contributions, random_plan
from test_fake_world import collectives

from magi_attention.comm.collectives.gather import all_gather_fwd_reduce_scatter_bwd, scatter_v
from magi_attention.comm.collectives.group import group_cast, group_reduce
from magi_attention.comm.transport.base import SingleTransport
from magi_attention.comm.transport.torch import TorchTransport, as_transport
from magi_attention.errors import ContractError, PeerFailureError, PlanMismatchError
from magi_attention.testing.spawn import run_processes
from magi_attention.testing.waiting import Flags


def check_worked_example(rank, group):
    x, splits, dst, out_splits, src, want = WORKED_EXAMPLE[rank]
    for dtype in (torch.int16, torch.int64, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.float64):
        out = torch.zeros(len(want), 3, dtype=dtype)
        data = torch.tensor(x).view(-1, 1).expand(-1, 3).to(dtype)
        work = group_cast(data, out, splits, out_splits, dst, src, group, async_op=True, check=True)
        assert work.wait_post_process() is out
        wanted = torch.tensor(want).view(-1, 1).expand(-1, 3).to(dtype)
        assert torch.equal(out.float(), wanted.float()), dtype


def check_random_plans(rank, size, group, mesh):
    for seed in range(6):
        plan = random_plan(seed, size)
        rng = np.random.default_rng(seed)
        xs = [rng.standard_normal((s.input_rows, 2)) for s in plan.specs]
        ys = [rng.standard_normal((s.output_rows, 2)) for s in plan.specs]
        for options in ({}, mesh):
            x, y = torch.tensor(xs[rank]), torch.tensor(ys[rank])
            out, back = torch.full_like(y, torch.nan), torch.full_like(x, torch.nan)
            cast = group_cast(x, out, *plan.lists(rank), group, async_op=True, **options)
            reduce = group_reduce(y, back, *plan.reduce_lists(rank), group, async_op=True, acc_reduce=False, **options)
            cast.wait_post_process(), reduce.wait_post_process()
            np.testing.assert_array_equal(out, cast_rows(plan, xs, rank))
            for i, terms in enumerate(contributions(plan, ys, rank)):
                np.testing.assert_allclose(back[i], sum(terms, np.zeros(2)), atol=1e-13)


def gloo_main(rank, size):
    world = as_transport(None)
    assert isinstance(world, TorchTransport) and world.ranks == (0, 1, 2, 3)
    assert collectives(world) == rank
    check_worked_example(rank, None)
    check_worked_example(rank, dist.group.WORLD)

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])], [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mesh = dict(intra_group=pairs[0][rank // 2], inter_group=pairs[1][rank % 2])
    check_random_plans(rank, size, world, mesh)

    without_0 = dist.new_group([1, 2, 3])
    alone = [dist.new_group([r]) for r in range(size)][rank]
    if rank:
        sub = as_transport(without_0)
        assert sub.ranks == (1, 2, 3) and sub.rank == rank - 1
        collectives(sub)
        whole = torch.arange(12.0).view(2, 6)
        part = scatter_v(whole, without_0, 1, [1, 2, 3]).requires_grad_()
        all_gather_fwd_reduce_scatter_bwd(part, without_0, 1, [1, 2, 3]).sum().backward()
        assert (part.grad == 3).all()
    else:
        with pytest.raises(ContractError, match=r"global rank 0\) is not a member of the group"):
            as_transport(without_0)
    single = as_transport(alone)
    assert isinstance(single, SingleTransport) and single.ranks == (rank,)
    x = torch.zeros(1 + (rank == 1))
    with pytest.raises(PlanMismatchError, match="Rank 1 sends 2 rows to rank 1, which expects 1"):
        group_cast(x, torch.zeros(1), [len(x)], [1], [[rank]], [rank], world, check=True)
    return world.all_reduce(torch.tensor([rank])), dist.get_rank()


def gloo_entry(rank, size):
    return gloo_main(rank, size)[1]


def test_gloo():
    assert run_processes(4, gloo_entry) == [0, 1, 2, 3]


def message_of(action):
    with pytest.raises(PeerFailureError) as info:
        action()
    return str(info.value)


def failing_in_a_subgroup(rank):
    """A sub-group tells group ranks from global ranks."""
    pairs = dist.new_group([0, 2]), dist.new_group([1, 3])
    if rank in (1, 3):
        pair = as_transport(pairs[1])
        if rank == 3:
            with pytest.raises(ValueError), pair.guard(""):
                raise ValueError("bad mask")
        else:
            text = message_of(pair.barrier)
            assert "rank 1 (global rank 3) failed: ValueError: bad mask" in text, text


def failing_main(rank, size, folder):
    """Each kind of failure once, each followed by work on a fresh group. Groups whose time must not run out have the
    usual ten minutes, so that a failure that is noticed by nothing else exceeds the deadline of the test."""
    flags = Flags(folder)
    group = as_transport(None)

    # all ranks make the same mistake: the same group goes on
    for _ in range(2):
        with pytest.raises(ContractError):
            group_cast(torch.zeros(1), None, [1], [1], [[0]], [0], None)
        collectives(group)

    # one rank fails while the others wait for it
    if rank == 2:
        with pytest.raises(MemoryError), group.guard("stage 1"):
            raise MemoryError("out of memory")
    else:
        text = message_of(group.barrier)
        assert "rank 2 failed: MemoryError in stage 1: out of memory" in text, text
    # rank 2 has left out a collective, so this group cannot be used again ...
    assert "different numbers of collectives" in message_of(group.barrier)
    # ... but a new one can
    fresh = dist.new_group()
    collectives(as_transport(fresh))

    # one rank does not come in time, and on a busy machine another may be late, too; it finds out when it needs the
    # others
    group = as_transport(dist.new_group(), timeout_s=2)
    others = [f"rank {r} gave up" for r in range(size) if r != 1]
    if rank == 1:
        flags.wait(*others)
        group.all_reduce(torch.zeros(1))
        text = message_of(lambda: group.all_reduce(torch.zeros(1)))
        assert re.search("failed: After 2 s in all_reduce, .*rank 1.* did not arrive", text), text
    else:
        text = message_of(lambda: group.all_reduce(torch.zeros(1)))
        flags.set(f"rank {rank} gave up")
        assert re.search("After 2 s in all_reduce, .*rank 1.* did not arrive", text), text
    collectives(as_transport(dist.new_group()))

    failing_in_a_subgroup(rank)

    # one rank is killed
    group = as_transport(dist.new_group())
    if rank == 3:
        time.sleep(0.3)  # so that mostly some already wait for it
        os._exit(0)
    text = message_of(lambda: group.all_gather_object(1))
    assert "connection to rank 3 was lost" in text, text
    text = message_of(group.barrier)
    assert "make a new one" in text and "connection to rank 3 was lost" in text, text
    collectives(as_transport(dist.new_group([0, 1, 2], use_local_synchronization=True)))
    return "survived"


def test_failures_and_recovery(tmp_path):
    assert run_processes(4, failing_main, str(tmp_path)) == ["survived"] * 3 + [None]
