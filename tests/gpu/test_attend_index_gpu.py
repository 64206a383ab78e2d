# SPDX-License-Identifier: Apache-2.0
"""Index attention over ranks on GPU tensors, ranks being threads: as on one rank, and the same bits again."""

from __future__ import annotations

import pytest
import torch

from magi_attention.api import Mask, attend_index, index_attn_func, make_plan
from magi_attention.comm.transport.fake import FakeWorld

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def with_v(tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """q, k and v, of which the last may be none."""
    return [*tensors, None][:3]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("heads, dims", [((16, 1), (64, 64)), ((16, 4), (64, 64)), ((64, 1), (576, 512))], ids=str)
def test_as_on_one_rank(heads, dims, dtype):
    """With head dims 576 and 512 the values are columns of the keys, and travel with them."""
    total, world, seed = 1000, 4, 17
    is_latent = dims[0] != dims[1]
    width = {"head_dim_v": dims[1]} if is_latent else {}
    print(f"seed {seed}")
    gen = torch.Generator(DEVICE).manual_seed(seed)
    shapes = [(total, h, d) for h, d in zip((heads[0], heads[1], heads[1], heads[0]), (dims[0], *dims, dims[1]))]
    *tensors, dout = (torch.randn(s, generator=gen, device=DEVICE).to(dtype) for s in shapes)
    indices = torch.randint(-50, total, (total, heads[1], 96), generator=gen, device=DEVICE, dtype=torch.int32)
    if is_latent:
        tensors.pop()
    leaves = [x.float().requires_grad_() for x in tensors]
    out, meta = index_attn_func(*with_v(leaves), indices, **width)
    want = [out.detach(), meta.lse, *torch.autograd.grad(out, leaves, dout.float())]
    plan = make_plan(Mask.causal(total), world)

    def rank(transport):
        # Ranks wait for each other in their backwards, which one thread would make for all of them.
        with torch.autograd.set_multithreading_enabled(False):
            return results(transport)

    def results(transport):
        runs = []
        for _ in range(2):
            local = [plan.shard(x, transport).requires_grad_() for x in tensors]
            lists = plan.shard(indices, transport, -1)
            out, meta = attend_index(*with_v(local), lists, plan, transport, deterministic=True, **width)
            runs.append([out.detach(), meta.lse, *torch.autograd.grad(out, local, plan.shard(dout, transport))])
        assert all(torch.equal(*pair) for pair in zip(*runs))
        return [plan.gather(x, transport) for x in runs[0]]

    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    for got in FakeWorld(world).run(rank):
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want):
            off = (a.float() - b).abs().max() / b.abs().max()
            assert off < tolerance, (name, off)
