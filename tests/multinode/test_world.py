# SPDX-License-Identifier: Apache-2.0
"""Runs on every rank of a launch: `magi test --suite multinode`, or torchrun with magi_attention.testing.rank_pytest.

By default two nodes of two ranks over gloo; with GPUs over NCCL.
"""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from magi_attention.api import DistAttnConfig, Mask, OverlapConfig, attend, make_plan

pytestmark = [
    pytest.mark.multinode,
    pytest.mark.skipif(
        "TORCHELASTIC_RUN_ID" not in os.environ, reason="no ranks here; `magi test --suite multinode` makes them"
    ),
]


@pytest.fixture(scope="module")
def device():
    """This rank's device, with a process group over all ranks."""
    found = torch.device("cpu")
    if torch.cuda.is_available():
        found = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(found)
    dist.init_process_group("nccl" if found.type == "cuda" else "gloo", timeout=timedelta(seconds=120))
    yield found
    dist.barrier()
    dist.destroy_process_group()


def test_all_ranks_are_there(device):
    """Ranks count up node by node, and no node runs by itself."""
    rank, world = dist.get_rank(), dist.get_world_size()
    nodes, per_node = int(os.environ["GROUP_WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    node, local_rank = int(os.environ["GROUP_RANK"]), int(os.environ["LOCAL_RANK"])
    assert world == nodes * per_node and rank == node * per_node + local_rank
    seen = [None] * world
    dist.all_gather_object(seen, (rank, int(os.environ["GROUP_RANK"]), os.getpid()))
    assert [entry[0] for entry in seen] == list(range(world))
    assert {entry[1] for entry in seen} == set(range(nodes)) and len(set(seen)) == world


MASKS = {
    "varlen causal": lambda: Mask.varlen([0, 137, 600, 1000], causal=True),
    "sliding window": lambda: Mask.varlen([0, 1000], window=(100, 0), global_prefix=8),
    "prefix": lambda: Mask.prefix_lm([0, 400, 1000], 50),
}


@pytest.mark.parametrize("degree", [0, 2])
@pytest.mark.parametrize("name", MASKS)
def test_attention_equals_one_process(device, name, degree, monkeypatch):
    """Out and gradients of attention over all ranks against the dense computation, in float64."""
    monkeypatch.setenv("MAGI_ATTENTION_KERNEL_BACKEND", "sdpa_ol")
    mask = MASKS[name]()
    config = DistAttnConfig(overlap_config=OverlapConfig(degree=degree))
    plan = make_plan(mask, dist.get_world_size(), config=config, num_heads_q=4, num_heads_kv=2, head_dim=16)
    torch.manual_seed(0)
    shapes = ((1000, 4, 16), (1000, 2, 16), (1000, 2, 16))
    full = [torch.randn(shape, dtype=torch.float64).to(device).requires_grad_() for shape in shapes]
    out_local, _ = attend(*(plan.shard(x) for x in full), plan)
    out = plan.gather(out_local)
    (out**2).sum().backward()

    q, k, v = (x.detach().transpose(0, 1).requires_grad_() for x in full)
    dense = torch.from_numpy(mask.to_dense()).to(device)
    reference = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=dense, enable_gqa=True
    )[0]
    (reference**2).sum().backward()
    torch.testing.assert_close(out, reference.transpose(0, 1), atol=1e-9, rtol=1e-9)
    for mine, theirs in zip(full, (q, k, v)):
        torch.testing.assert_close(mine.grad, theirs.grad.transpose(0, 1), atol=1e-9, rtol=1e-9)
