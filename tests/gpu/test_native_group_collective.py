# SPDX-License-Identifier: Apache-2.0
"""Group cast and group reduce straight over NVLink, on 2 and 4 GPUs, against all-to-all-v over NCCL bit for bit; where
there is one GPU, on that, against all-to-all-v over gloo."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from places import IS_SHARED, NEEDS_A_GPU, places

from magi_attention.comm.collectives.group import group_cast, group_reduce
from magi_attention.comm.collectives.layout import A2AVLayout
from magi_attention.comm.symm.buffers import why_no_symm_buffers
from magi_attention.comm.transport.process_groups import attached
from magi_attention.comm.transport.torch import as_transport
from magi_attention.common.group_spec import GroupSpec
from magi_attention.testing.spawn import run_processes

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "comm"))
from comm_oracle import random_plan  # noqa: E402

pytestmark = [pytest.mark.gpu, NEEDS_A_GPU]
PLANS = {2: 100, 3: 100, 4: 500}
NO_LISTS: tuple = ([], [], [], [])


def draw(seed: int, rows: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    gen = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(rows, *shape, generator=gen, device="cuda").to(dtype)


def both_ways(t, plan, seed: int, native: bool) -> list[torch.Tensor]:
    """One cast of K, V and lse and two reduces, by the seed in other dtypes and modes."""
    spec = plan.specs[t.rank]
    dtype = (torch.bfloat16, torch.float16)[seed % 2]
    is_async, acc = bool(seed // 2 % 2), bool(seed // 4 % 2)
    layout = A2AVLayout.from_spec(spec)
    options = dict(native=native, layout=layout, async_op=is_async)
    k, v = (draw(seed + 100 * t.rank + i, spec.input_rows, 2, 64, dtype=dtype) for i in range(2))
    if seed % 3 == 0:  # rows further apart
        k = draw(seed + 100 * t.rank, spec.input_rows, 4, 64, dtype=dtype)[:, 2:]
    lse = draw(seed + 7 * t.rank, spec.input_rows, 4, dtype=torch.float32)
    outs = [torch.full((spec.output_rows, *x.shape[1:]), torch.nan, dtype=x.dtype, device="cuda") for x in (k, v, lse)]
    cast = group_cast([k, v, lse], outs, *NO_LISTS, t, **options)
    dk, dv = (draw(seed + 50 + t.rank + i, spec.output_rows, 2, 64, dtype=torch.float32) for i in range(2))
    sums = [draw(seed + 60 + i, spec.input_rows, 2, 64, dtype=torch.float32) for i in range(2)]
    total = draw(seed + 70, spec.input_rows, 2, 64, dtype=dtype)
    # Two at once, and rows that a rank keeps are exact in the dtype of the wire, which is the same on all ranks.
    first = group_reduce(dk.to(dtype), total, *NO_LISTS, t, acc_reduce=acc, **options)
    is_any_kept = any(A2AVLayout.from_spec(s).has_local_rows for s in plan.specs)
    wire = None if is_any_kept else torch.bfloat16
    second = group_reduce([dk, dv], sums, *NO_LISTS, t, acc_reduce=acc, comm_dtype=wire, **options)
    for work in (cast, first, second):
        work.wait_post_process()
    return [*outs, total, *sums]


def check_average(t, plan, seed: int) -> bool:
    spec, results = plan.specs[t.rank], []
    for native in (False, True):
        out = draw(seed, spec.input_rows, 64, dtype=torch.float32)
        part = draw(seed + t.rank, spec.output_rows, 64, dtype=torch.float32)
        group_reduce(part, out, *plan.reduce_lists(t.rank), t, reduce_op="avg", native=native).wait_post_process()
        results.append(out)
    return bool(torch.allclose(*results, rtol=1e-6, atol=1e-6))


def check_plans(t, count: int) -> list[str]:
    faults = []
    for seed in range(count):
        size = 2500 if seed % 50 == 0 else 60
        plan = random_plan(seed, t.size, max_splits=6, max_size=size)
        wanted, got = (both_ways(t, plan, seed, native) for native in (False, True))
        faults += [f"seed {seed}, result {i}" for i, (a, b) in enumerate(zip(got, wanted)) if not torch.equal(a, b)]
        if seed % 25 == 0 and not check_average(t, plan, seed):
            faults.append(f"seed {seed}, average")
    return faults


def everyone_layout(t, rows: int) -> A2AVLayout:
    """Each rank casts all its rows to all others."""
    others = [r for r in range(t.size) if r != t.rank]
    return A2AVLayout.from_spec(GroupSpec.make(t.rank, t.size, [rows], [others], [rows] * len(others), others))


def check_graph(t) -> list[str]:
    """A captured cast and reduce, replayed with other rows."""
    layout, faults = everyone_layout(t, 300), []
    x = draw(t.rank, 300, 2, 64, dtype=torch.bfloat16)
    y, back = x.new_empty(layout.output_rows, 2, 64), torch.zeros_like(x)

    def step(native: bool) -> None:
        options = dict(layout=layout, native=native)
        group_cast(x, y, *NO_LISTS, t, **options).wait_post_process()
        group_reduce(y, back, *NO_LISTS, t, acc_reduce=False, **options).wait_post_process()

    for _ in range(2):
        step(True)
    torch.cuda.synchronize()
    t.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step(True)
    for seed in range(10):
        x.copy_(draw(1000 * seed + t.rank, 300, 2, 64, dtype=torch.bfloat16))
        y.fill_(torch.nan), back.fill_(torch.nan)
        graph.replay()
        got = y.clone(), back.clone()
        step(True)  # between replays, so counters of the buffers must agree
        faults += [f"eager after replay {seed}"] if not torch.equal(y, got[0]) else []
        step(False)
        faults += [f"replay {seed}"] if not (torch.equal(y, got[0]) and torch.equal(back, got[1])) else []
    return faults


def milliseconds(t, step, count: int) -> float:
    """A call, the slowest rank's mean over ``count``."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    t.barrier()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        step()
    end.record()
    torch.cuda.synchronize()
    return max(t.all_gather_object(begin.elapsed_time(end) / count))


def replayed(step, count: int):
    """``count`` calls as one graph: what the GPU unpacks, without the host."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(count):
            step()
    return graph.replay


def step_of(t, layout, name: str, native: bool, kv, outs, sums) -> None:
    options = dict(layout=layout, native=native)
    if name == "cast":
        group_cast(kv, outs, *NO_LISTS, t, **options).wait_post_process()
    else:
        group_reduce(outs, sums, *NO_LISTS, t, acc_reduce=False, **options).wait_post_process()


def figures(t) -> list[str]:
    lines = []
    for rows in (8, 512, 4096, 16384):
        layout = everyone_layout(t, rows)
        kv = [draw(i, rows, 8, 128, dtype=torch.bfloat16) for i in range(2)]
        outs = [torch.zeros(layout.output_rows, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in kv]
        sums = [torch.zeros(rows, 8, 128, device="cuda") for _ in kv]
        received = 2 * layout.output_rows * 2048
        for name in ("cast", "reduce"):
            for native in (True, False):
                step = partial(step_of, t, layout, name, native, kv, outs, sums)
                text = f"{milliseconds(t, step, 20) * 1e3:.1f} us called"
                if native:
                    on_gpu = milliseconds(t, replayed(step, 20), 5) / 20
                    text += f", {on_gpu * 1e3:.1f} us in a graph = {received / on_gpu / 1e6:.1f} GB/s received"
                way = "native" if native else "a2av over NCCL"
                lines.append(f"{t.size} ranks, {name} of K and V, {rows} rows to each other rank, {way}: {text}")
    return lines


def main(rank: int, world: int) -> tuple[str | None, list[str], list[str], bool]:
    t = as_transport(None)
    reason = why_no_symm_buffers(t, by_wish=True)
    if reason is not None:
        return reason, [], [], False
    faults = check_plans(t, PLANS[world]) + check_graph(t)
    os.environ["MAGI_ATTENTION_NATIVE_GRPCOLL"] = "1"
    plan = random_plan(1, world, max_splits=6, max_size=20)
    spec = plan.specs[rank]
    out = torch.zeros(spec.output_rows, 8, device="cuda")
    group_cast(torch.ones(spec.input_rows, 8, device="cuda"), out, *plan.lists(rank), None).wait_post_process()
    faults += [] if bool((out == 1).all()) else ["cast by the environment"]
    is_used = any(isinstance(key, tuple) and key[0] == "buffers" for key in attached(dist.group.WORLD))
    return None, faults, [] if IS_SHARED else figures(t), is_used  # turns of milliseconds are no figures


@pytest.mark.parametrize("world, backend", places(2, 4, shared=(2, 3)))
def test_native_equals_all_to_all_v(world: int, backend: str) -> None:
    results = run_processes(world, main, timeout_s=90, backend=backend)
    if results[0][0] is not None:
        pytest.skip(results[0][0])
    print(*results[0][2], sep="\n")
    for rank, (_, faults, _, is_used) in enumerate(results):
        assert not faults, f"rank {rank}: {len(faults)} faults, {faults[:5]}"
        assert is_used
