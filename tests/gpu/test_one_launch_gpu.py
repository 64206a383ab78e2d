# SPDX-License-Identifier: Apache-2.0
"""Distributed attention in one launch per direction, fed over NVLink, on as many GPUs as there are.

Where there is one the ranks share it: the same kernels write into each other's memory, but take turns on the GPU.
"""

from __future__ import annotations

import os
import time
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from backward_oracle import largest_block_m
from places import NEEDS_A_GPU, places

from magi_attention import api
from magi_attention.common.ranges import AttnRanges
from magi_attention.common.slices import SliceTable, to_dense
from magi_attention.kernels.ffa import backward as ffa_backward
from magi_attention.kernels.ffa import schedule as schedule_module
from magi_attention.native.planner.schedule import BwdSchedule
from magi_attention.testing.masks import random_slices
from magi_attention.testing.spawn import run_processes

pytestmark = [pytest.mark.gpu, NEEDS_A_GPU]
CHOOSE = schedule_module._choose


def dense(q, k, v, allowed, dout, sink, dtype):
    """out, lse, dq, dk, dv, dsink by torch in ``dtype``; the float64 one is the truth, that in 16 bits the
    yardstick."""
    q, k, v = (x.to(dtype).detach().requires_grad_() for x in (q, k, v))
    leaf = None if sink is None else sink.double().detach().requires_grad_()
    group = q.shape[1] // k.shape[1]
    logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)).to(
        torch.float64 if dtype == torch.float64 else torch.float32
    )
    logits = (logits * q.shape[2] ** -0.5).masked_fill(~allowed, float("-inf"))
    joined = logits
    if leaf is not None:
        joined = torch.cat([logits, leaf.to(logits.dtype).t()[:, None].expand(-1, q.shape[0], -1)], 2)
    lse = torch.logsumexp(joined, 2)
    weights = torch.exp(logits - lse.nan_to_num(neginf=0.0)[..., None]).to(dtype)
    out = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))
    (out * dout.to(dtype)).sum().backward()
    grads = [x.grad.double() for x in (q, k, v)]
    return [out.detach().double(), lse.t().detach().double(), *grads, *([] if leaf is None else [leaf.grad])]


def slices_types(slices) -> list[str]:
    return [("full", "causal", "inv_causal", "bi_causal")[kind] for kind in slices[:, 4].tolist()]


def gather(x, key):
    return api.undispatch(x.detach().contiguous(), key)


def slack_of_dsink(truth, dout, sink, dtype) -> float:
    """What an out of 16 bits may cost dsink, by way of delta = sum(out * dout); the plain implementation rounds no out.

    Errors of rows are independent, so they add up as squares; some 5 standard deviations.
    """
    out, lse = truth[:2]
    delta_error = 2 * torch.finfo(dtype).eps * (out * dout.double()).square().sum(-1).sqrt()
    weight = torch.exp(sink.double()[:, None] - lse)
    return float((weight * delta_error).square().sum(1).sqrt().max())


def errors_of(got, plain, truth, slacks) -> list[float]:
    """For each result: its largest error over that of the plain implementation in 16 bits, and half of its slack."""
    found = []
    for a, b, t, slack in zip(got, plain, truth, slacks):
        a, b, t = (x.double().nan_to_num(neginf=-1e30) for x in (a, b, t))
        scale = float(t.where(t > -1e29, 0).abs().max()) + 1e-2  # where a row sees one key its dq is 0 but for rounding
        mine, theirs = float((a - t).abs().max()), float((b - t).abs().max())
        found.append(mine / (max(theirs, 1e-3 * scale) + slack / 2))
    return found


def schedule_as(stores: bool, by_document: bool):
    """Instead of ``select_schedule``: the same schedule, but where the first writer is to store, or documents are to
    come one after the other, whatever the mask."""

    def select_schedule(*call) -> BwdSchedule:
        return schedule_module.select_schedule(*call)._replace(first_writer=stores, by_document=by_document)

    return select_schedule


def choose_block_m(is_largest: bool, slices, q_shape, *rest) -> BwdSchedule:
    """What is chosen, with the largest m-blocks that there are, or the smallest."""
    found, (*_, is_deterministic, is_plain, _) = CHOOSE(slices, q_shape, *rest), rest
    largest = largest_block_m(q_shape[2], is_deterministic or found.first_writer)
    return found._replace(block_m=largest if is_largest and is_plain else 64)


def one_case(seed: int, dtype: torch.dtype, fused: bool, degree: int = 1):
    """Every rank makes the same case; returns gathered results and the case.

    Odd seeds take larger m-blocks in the backward, however short the mask is. Two of eight have so many heads that
    there is a last wave to be split, for most numbers of tiles (with 132 SMs, all but multiples of three).
    The last of ten seeds has a causal mask whose first rank reads no keys but its own.
    """
    schedule_module._choose = partial(choose_block_m, bool(seed % 2))
    rng = np.random.default_rng(seed)
    has_last_round = seed % 8 in (5, 6)
    total = int(rng.integers(800, 1400) if has_last_round else rng.integers(300, 2500))
    drawn = random_slices(rng, total, total, max_slices=int(rng.integers(1, 12)))
    slices = SliceTable(drawn if len(drawn) else np.array([[0, total, 0, total, 1]]))
    heads_kv, share = int(rng.choice((1, 2, 3))), int(rng.choice((1, 2, 4, 5, 8)))
    dim = int(rng.choice((64, 128, 128, 128, 80, 256)))
    if has_last_round:
        heads_kv, share, dim = 44, 4, 128
    gen = torch.Generator().manual_seed(seed)
    shapes = [
        (total, heads_kv * share, dim),
        (total, heads_kv, dim),
        (total, heads_kv, dim),
        (total, heads_kv * share, dim),
    ]
    q, k, v, dout = (torch.randn(*s, generator=gen).to(dtype).cuda() for s in shapes)
    sink = torch.randn(2, heads_kv * share, generator=gen).cuda() if rng.random() < 0.3 else None
    gives = seed % 10 == 9
    if gives:
        slices = SliceTable(np.array([[0, total, 0, total, 1]]))
    alg = api.SequentialDispatchAlg() if gives else api.MinHeapDispatchAlg()
    config = api.DistAttnConfig(
        api.DispatchConfig(chunk_size=int(rng.choice((32, 64, 128))), alg=alg),
        api.OverlapConfig(degree=degree, min_chunk_size=64),
    )
    os.environ["MAGI_ATTENTION_NATIVE_GRPCOLL"] = "1" if fused else "0"
    a = slices.array
    q_ranges, k_ranges = (AttnRanges.from_ranges(a[:, i : i + 2].tolist()) for i in (0, 2))
    key = api.magi_attn_flex_key(
        q_ranges, k_ranges, slices_types(a), total, total, heads_kv * share, heads_kv, dim, 0,
        cp_group_or_mesh=dist.group.WORLD, dist_attn_config=config,
    )  # fmt: skip
    return q, k, v, dout, sink, slices, key


def run(q, k, v, dout, sink, key):
    leaves = [api.dispatch(x, key).requires_grad_() for x in (q, k, v)]
    leaf = None if sink is None else sink.clone().requires_grad_()
    out, meta = api.calc_attn(*leaves, key, sink=leaf)
    out.backward(api.dispatch(dout, key))
    results = [gather(x, key) for x in (out, meta.lse, *(x.grad for x in leaves))]
    if leaf is not None:
        total = leaf.grad.clone()
        dist.all_reduce(total)
        results.append(total)
    return results


def random_cases(
    rank: int, world: int, dtype: torch.dtype, seeds: range, stores: bool = False
) -> list[tuple[int, list[float]]]:
    found = []
    for seed in seeds:
        if stores:
            ffa_backward.select_schedule = schedule_as(True, by_document=seed // 2 % 2 == 1)
        q, k, v, dout, sink, slices, key = one_case(seed, dtype, fused=True)
        got = run(q, k, v, dout, sink, key)
        if rank == 0:
            allowed = torch.from_numpy(to_dense(slices.array, q.shape[0], q.shape[0]).astype(bool)).cuda()
            truth = dense(q, k, v, allowed, dout, sink, torch.float64)
            plain = dense(q, k, v, allowed, dout, sink, dtype)
            slacks = [0.0] * 5 + ([] if sink is None else [slack_of_dsink(truth, dout, sink, dtype)])
            found.append((seed, errors_of(got, plain, truth, slacks)))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("world, backend", places(2, 4, shared=(2, 3)))
def test_random_masks_against_float64(world: int, backend: str, dtype: torch.dtype) -> None:
    results = run_processes(world, random_cases, dtype, range(40), timeout_s=240, backend=backend)
    for seed, errors in results[0]:
        print("seed", seed, [f"{e:.2f}" for e in errors])
        assert max(errors) <= 2.0, f"seed {seed}: {errors}"


@pytest.mark.parametrize("world, backend", places(2, 4))
def test_the_first_writer_stores(world: int, backend: str) -> None:
    """As for long packs of documents; half of the seeds one document after the other."""
    results = run_processes(world, random_cases, torch.bfloat16, range(24), True, timeout_s=240, backend=backend)
    for seed, errors in results[0]:
        print("seed", seed, [f"{e:.2f}" for e in errors])
        assert max(errors) <= 2.0, f"seed {seed}: {errors}"


NAMES = ("out", "lse", "dq", "dk", "dv", "dsink")


def differs(name: str, a: torch.Tensor, b: torch.Tensor, is_deterministic: bool = False) -> bool:
    """Not the same bits; of dq, which is summed in no fixed order otherwise, not the same but for rounding."""
    if name != "dq" or is_deterministic:
        return not torch.equal(a, b)
    return not torch.allclose(a.float(), b.float(), rtol=2**-6, atol=1e-3 * float(a.abs().max()))


def repeated(rank: int, world: int, is_deterministic: bool, fused: bool, stores: bool = False) -> list[str]:
    """The same cases many times beside other work. OrderedStreams that are not released show in a quarter of the masks.
    In one launch every third is taken up by document."""
    faults = []
    noise, side = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    os.environ["MAGI_ATTENTION_DETERMINISTIC_MODE"] = "1" if is_deterministic else "0"
    for seed in SEEDS_IN_TURNS if is_deterministic and fused else (1, 3, 4, 5, 7):
        if fused:
            ffa_backward.select_schedule = schedule_as(stores, by_document=seed % 3 == 1)
        q, k, v, dout, sink, slices, key = one_case(seed, torch.bfloat16, fused=fused)
        first = run(q, k, v, dout, sink, key)
        for i in range(100 // 5):
            with torch.cuda.stream(side):
                for _ in range(int(np.random.default_rng(rank + i).integers(0, 4))):
                    noise = noise @ noise * 1e-3
            again = run(q, k, v, dout, sink, key)
            faults += [
                f"seed {seed}, run {i}: {name}"
                for name, a, b in zip(NAMES, first, again)
                if differs(name, a, b, is_deterministic)
            ]
    return faults


SEEDS_IN_TURNS = range(24)
MODES = {
    "one launch": (False, True),
    "one launch, the first writer stores": (False, True, True),
    "one launch, deterministic": (True, True),
    "stages, deterministic": (True, False),
}


@pytest.mark.parametrize("world, backend", places(2, 4))
@pytest.mark.parametrize("mode", MODES)
def test_results_are_the_same_under_load(mode: str, world: int, backend: str) -> None:
    for faults in run_processes(world, repeated, *MODES[mode], timeout_s=240, backend=backend):
        assert not faults, faults[:5]


def captured(rank: int, world: int) -> list[str]:
    """Forward and backward in a graph, replayed on new inputs: the bits of calls launched anew."""
    q, k, v, dout, _, _, key = one_case(1, torch.bfloat16, fused=True)
    leaves = [api.dispatch(x, key).requires_grad_() for x in (q, k, v)]
    grad = api.dispatch(dout, key)

    def step():
        out, meta = api.calc_attn(*leaves, key)
        return [out, meta.lse, *torch.autograd.grad(out, leaves, grad)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step()
    faults = []
    for i in range(3):
        with torch.no_grad():
            for x in leaves:
                x.copy_(torch.randn_like(x))
        graph.replay()
        replayed = [x.detach().clone() for x in held]
        again = step()
        pairs = zip(NAMES, replayed, again)
        faults += [f"replay {i}: {name}" for name, a, b in pairs if differs(name, a, b.detach())]
    torch.cuda.synchronize()
    dist.barrier()
    return faults


@pytest.mark.parametrize("world, backend", places(2, 4))
def test_captured_in_a_graph(world: int, backend: str) -> None:
    for faults in run_processes(world, captured, timeout_s=120, backend=backend):
        assert not faults, faults


LAYERS, HOST_LIMIT_US = 16, 300  # wanted are 200; a limit that a slow host passes


def host_cost(rank: int, world: int) -> list[float]:
    """Microseconds of the host for a layer with keys of its own, one call of autograd for all: by the wall clock
    forward and backward, and of processors for both, which does not count what other programs take meanwhile."""
    q, k, v, dout, _, _, key = one_case(1, torch.bfloat16, fused=True)
    q, grad = api.dispatch(q, key).requires_grad_(), api.dispatch(dout, key)
    keys = [[api.dispatch(x, key).requires_grad_() for x in (k, v)] for _ in range(LAYERS)]
    leaves = [q, *(x for pair in keys for x in pair)]
    best = [float("inf")] * 3
    for _ in range(30):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        used, start = time.process_time(), time.perf_counter()
        x = q
        for pair in keys:
            x = api.calc_attn(x, *pair, key)[0]
        between = time.perf_counter()
        torch.autograd.grad(x, leaves, grad)
        end, used = time.perf_counter(), time.process_time() - used
        best = [min(pair) for pair in zip(best, (between - start, end - between, used))]
    torch.cuda.synchronize()
    return [b / LAYERS * 1e6 for b in best]


@pytest.mark.parametrize("world, backend", places(2, 4))
def test_host_cost_of_a_layer(world: int, backend: str) -> None:
    costs = run_processes(world, host_cost, timeout_s=120, backend=backend)
    text = ", ".join(f"{forward:.0f} + {backward:.0f} ({used:.0f})" for forward, backward, used in costs)
    print(f"{world} ranks, host us a layer of {LAYERS}, forward + backward (of processors): {text}")
    assert max(used for *_, used in costs) < HOST_LIMIT_US
