# SPDX-License-Identifier: Apache-2.0
"""Ranks that hold different plans on GPUs are told: at the first use of a plan, and a bounded number of calls later."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

from magi_attention import api
from magi_attention.comm.transport import consistency
from magi_attention.comm.transport.torch import as_transport
from magi_attention.errors import PlanMismatchError
from magi_attention.functional.calls.first_use import ensure_plan
from magi_attention.testing.spawn import run_processes

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, found {GPUS}")]

# Two ranks send messages of the same sizes by either of these.
KNOWN = [0, 2, 64], [0, 2, 6, 35, 64]


def plan_of(cu, world: int) -> api.Plan:
    return api.make_plan(api.Mask.varlen(cu), world)


def attention(plan: api.Plan) -> torch.Tensor:
    x = plan.shard(torch.ones(64, 2, 64, dtype=torch.bfloat16, device="cuda")).requires_grad_()
    out = api.attend(x, x, x, plan)[0]
    out.sum().backward()
    return out


def main(rank: int, world: int, folder: str) -> None:
    os.environ["MAGI_ATTENTION_NATIVE_GRPCOLL"] = "0"  # rows go over NCCL
    plans = [plan_of(cu, world) for cu in KNOWN]
    with pytest.raises(PlanMismatchError) as first:
        attention(plan_of([0, 10 + rank, 64], world))
    for _ in range(40):
        for plan in plans:
            attention(plan)
    torch.cuda.synchronize()
    started, count = time.perf_counter(), 2_000
    transport, x = as_transport(), torch.empty(1, device="cuda")
    for _ in range(count):
        ensure_plan(plans[0], transport, x, "gather")
    microseconds = (time.perf_counter() - started) / count * 1e6
    calls = [0]
    with pytest.raises(PlanMismatchError) as later:
        while calls[0] < 8 * consistency._INTERVAL:
            attention(plans[rank])
            calls[0] += 1
    told = [str(first.value), calls[0], str(later.value), microseconds]
    (Path(folder) / str(rank)).write_text(json.dumps(told))
    os._exit(0)  # the last messages have found nobody, and the end of the group would wait for them


def test_over_nccl(tmp_path: Path) -> None:
    run_processes(2, main, str(tmp_path), timeout_s=180, backend="nccl")
    told = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    print(told)
    assert told[0][0] == told[1][0] and "different plans" in told[0][0]
    for _, calls, text, _ in told:
        # A forward and a backward each time; who has not found out is told at its own next interval.
        assert 2 * calls <= 2 * consistency._INTERVAL + 2, calls
        assert "called differently" in text and "rank" in text
