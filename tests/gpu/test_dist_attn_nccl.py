# SPDX-License-Identifier: Apache-2.0
"""The whole pipeline over NCCL, on as many GPUs as there are (2 or 4)."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from magi_attention import api
from magi_attention.testing.spawn import run_processes

GPUS = torch.cuda.device_count()
TOTAL = 1111
CU = [0, 100, 101, 640, 1111]


def pipeline(rank: int, world: int) -> dict[str, float]:
    os.environ["MAGI_ATTENTION_SANITY_CHECK"] = "1"
    os.environ["MAGI_ATTENTION_NATIVE_GRPCOLL"] = "0"  # over NCCL
    gen = torch.Generator().manual_seed(0)
    tensors = [torch.randn(TOTAL, h, 32, generator=gen, dtype=torch.float64).cuda() for h in (4, 2, 2)]
    leaves = [x.clone().requires_grad_() for x in tensors]
    out, meta = api.attend(*leaves, api.make_plan(api.Mask.varlen(CU, causal=True), 1))
    out.square().sum().backward()
    wanted = [out.detach(), meta.lse, *(x.grad for x in leaves)]
    errors = {}
    cu = torch.tensor(CU, dtype=torch.int32, device="cuda")
    for name, degree, hide_tail in (("blocking", 0, "0"), ("one", 1, "0"), ("three", 3, "0"), ("tail", 3, "1")):
        os.environ["MAGI_ATTENTION_BWD_HIDE_TAIL_REDUCE"] = hide_tail
        config = api.DistAttnConfig(overlap_config=api.OverlapConfig(degree=degree, min_chunk_size=64))
        key = api.magi_attn_varlen_key(cu, cu, 4, 2, 32, 0, dist.group.WORLD, causal=True, dist_attn_config=config)
        local = [api.dispatch(x, key).requires_grad_() for x in tensors]
        out, meta = api.calc_attn(*local, key)
        out.square().sum().backward()
        got = [api.undispatch(x.detach(), key) for x in (out, meta.lse, *(x.grad for x in local))]
        errors[name] = max(float((a - b).abs().max()) for a, b in zip(got, wanted))
        assert api.get_position_ids(key).is_cuda
        labels = api.undispatch(api.roll(api.dispatch(torch.arange(TOTAL).cuda(), key), -1, 0, key), key)
        assert labels[:-1].tolist() == list(range(1, TOTAL))
    return errors


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, found {GPUS}")
def test_pipeline_over_nccl() -> None:
    for errors in run_processes(min(GPUS, 4), pipeline, timeout_s=180, backend="nccl"):
        print(errors)
        assert max(errors.values()) < 1e-8
