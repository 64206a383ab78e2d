# SPDX-License-Identifier: Apache-2.0
"""Attention in one launch over logical nodes, by NVSHMEM: six masks beside float64, the same bits under load and with
late ranks, a CUDA graph, and a rank that ends. Each rank has a GPU."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from places import NEEDS_A_GPU, over_nvshmem

from magi_attention import api
from magi_attention.errors import PeerFailureError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "comm"))
import logical_nodes  # noqa: E402

pytestmark = [pytest.mark.gpu, NEEDS_A_GPU]
SHAPES = pytest.mark.parametrize("world, node_size", [(2, 1), (4, 2), (4, 1)])
NAMES = ("out", "lse", "dq", "dk", "dv")
TOKENS, TIMEOUT_S = 1024, 5.0  # for each rank; of the group in which a rank ends
SIZE = logical_nodes.Size(plans=0, repetitions=0, tokens=TOKENS, heads=(8, 2), head_dim=64)


class Launches:
    """How often rows of this group travelled beside attention, and in stages."""

    def __init__(self, verbs) -> None:
        self.beside = self.staged = 0
        relay, put = verbs.relay, verbs.put

        def count_relay(params) -> None:
            self.beside += 1
            relay(params)

        def count_put(params) -> None:
            self.staged += 1  # of gradients, too
            put(params)

        verbs.relay, verbs.put = count_relay, count_put


def join(rank: int, node_size: int, timeout_s: float = 60.0, **variables: str) -> logical_nodes.Ranks:
    os.environ["MAGI_ATTENTION_NATIVE_GRPCOLL"] = "1"  # in stages is an error
    names = {"HIERARCHICAL_COMM": "1", "NODE_SIZE": str(node_size), "NODE_TRANSPORT": "nvshmem", **variables}
    os.environ.update({f"MAGI_ATTENTION_{name}": value for name, value in names.items()})
    return logical_nodes.Ranks.join(rank, node_size, SIZE, timeout_s)


def drawn(world: int, head_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    gen, total = torch.Generator().manual_seed(head_dim), TOKENS * world
    shapes = [(total, heads, head_dim) for heads in (8, 2, 2, 8)]
    return [torch.randn(*shape, generator=gen).to(dtype).cuda() for shape in shapes]


def plan_of(mask: api.Mask, world: int, node_size: int, head_dim: int):
    dispatch = api.DispatchConfig(chunk_size=TOKENS // 8, nodes=node_size)
    return api.make_plan(mask, world, api.DistAttnConfig(dispatch), num_heads_q=8, num_heads_kv=2, head_dim=head_dim)


def step(ranks: logical_nodes.Ranks, plan, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """out, lse, dq, dk and dv of this rank's tokens."""
    q, k, v, dout = (plan.shard(x, ranks.t).detach().requires_grad_() for x in tensors)
    out, meta = api.attend(q, k, v, plan, ranks.t)
    return [out.detach(), meta.lse.detach(), *torch.autograd.grad(out, (q, k, v), dout.detach())]


# ---- float64 --------------------------------------------------------------------------------------------------------
CASES = [(64, torch.bfloat16, "0"), (128, torch.float16, "1")]  # head dim, dtype, gradients in float32 on the way


def six_masks(rank: int, world: int, node_size: int, head_dim: int, dtype: torch.dtype, precise: str) -> list[str]:
    ranks = join(rank, node_size, BACKWARD_HIGH_PRECISION_REDUCE=precise)
    launches, faults = Launches(ranks.group.verbs), []
    tensors = drawn(world, head_dim, dtype)
    masks = logical_nodes.six_masks(TOKENS * world)
    for name, mask in masks.items():
        wanted = logical_nodes.dense(mask, *tensors)
        plan = plan_of(mask, world, node_size, head_dim)
        got = step(ranks, plan, tensors)
        for label, x, want in zip(("out", "dq", "dk", "dv"), (got[0], *got[2:]), wanted):
            want = plan.shard(want, ranks.t)
            error = float((x.double() - want).abs().max() / want.abs().max().clamp(min=1e-9))
            faults += [] if error <= 2e-2 else [f"{name}, {label}: error {error:.3g}"]
    ranks.group.check("the test")
    if (launches.beside, launches.staged) != (2 * len(masks), len(masks)):
        faults.append(f"{launches.beside} launches of rows beside attention, {launches.staged} of others")
    ranks.synchronize()
    return faults


@pytest.mark.parametrize("head_dim, dtype, precise", CASES)
@SHAPES
def test_six_masks_against_float64(world, node_size, head_dim, dtype, precise) -> None:
    check(run(six_masks, world, node_size, head_dim, dtype, precise))


# ---- bits -----------------------------------------------------------------------------------------------------------
def differs(name: str, a: torch.Tensor, b: torch.Tensor, is_deterministic: bool) -> bool:
    """Not the same bits; of dq, which is summed in no fixed order otherwise, not the same but for rounding."""
    if name != "dq" or is_deterministic:
        return not torch.equal(a, b)
    return not torch.allclose(a.float(), b.float(), rtol=2**-6, atol=1e-3 * float(a.abs().max()))


def repeated(rank: int, world: int, node_size: int, is_deterministic: bool) -> list[str]:
    """Two plans take turns, under load; then again with every launch of a verb late."""
    ranks = join(rank, node_size, DETERMINISTIC_MODE="1" if is_deterministic else "0")
    tensors, faults = drawn(world, 128, torch.bfloat16), []
    masks = logical_nodes.six_masks(TOKENS * world)
    plans = [plan_of(masks[name], world, node_size, 128) for name in ("causal", "varlen_block_causal")]
    first = [step(ranks, plan, tensors) for plan in plans]
    noise, side = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()

    def again(what: str, times: int) -> None:
        for i in range(times):
            with torch.cuda.stream(side):
                for _ in range((7 * i + rank) % 4):
                    noise.copy_((noise @ noise) * 1e-3)
            got = step(ranks, plans[i % 2], tensors)
            pairs = zip(NAMES, first[i % 2], got)
            faults.extend(f"{what} {i}: {n}" for n, a, b in pairs if differs(n, a, b, is_deterministic))

    again("run", 40)
    with logical_nodes.delays(ranks, 5):
        again("late run", 40)
    ranks.synchronize()
    ranks.group.check("the test")
    return faults


@pytest.mark.parametrize("is_deterministic", [True, False])
@SHAPES
def test_results_are_the_same_under_load_and_with_late_ranks(world, node_size, is_deterministic) -> None:
    check(run(repeated, world, node_size, is_deterministic))


# ---- a graph --------------------------------------------------------------------------------------------------------
def captured(rank: int, world: int, node_size: int) -> list[str]:
    """Forward and backward in a graph, replayed on new inputs: the bits of calls launched anew."""
    ranks, faults = join(rank, node_size, DETERMINISTIC_MODE="1"), []
    plan = plan_of(api.Mask.causal(TOKENS * world), world, node_size, 128)
    local = [plan.shard(x, ranks.t).detach() for x in drawn(world, 128, torch.bfloat16)]
    leaves, dout = [x.requires_grad_() for x in local[:3]], local[3]

    def one() -> list[torch.Tensor]:
        out, meta = api.attend(*leaves, plan, ranks.t)
        return [out, meta.lse, *torch.autograd.grad(out, leaves, dout)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            one()
    torch.cuda.current_stream().wait_stream(side)
    ranks.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = one()
    for i in range(3):
        with torch.no_grad():
            for x in leaves:
                x.copy_(torch.randn_like(x))
        graph.replay()
        replayed = [x.detach().clone() for x in held]
        pairs = zip(NAMES, replayed, one())
        faults += [f"replay {i}: {name}" for name, a, b in pairs if differs(name, a, b.detach(), True)]
    ranks.synchronize()
    ranks.group.check("the test")
    return faults


@SHAPES
def test_captured_in_a_graph(world, node_size) -> None:
    check(run(captured, world, node_size))


# ---- a rank that ends -----------------------------------------------------------------------------------------------
def ended(rank: int, world: int, node_size: int, verb: str) -> list[str]:
    """The last rank ends right before its launch of ``verb``; all others name it, and end."""
    ranks = join(rank, node_size, TIMEOUT_S)
    tensors, victim = drawn(world, 64, torch.bfloat16), world - 1
    plan = plan_of(api.Mask.full(TOKENS * world), world, node_size, 64)
    for _ in range(2):
        step(ranks, plan, tensors)
    ranks.synchronize()

    def last(params) -> None:
        torch.cuda.synchronize()  # what was launched before has been sent
        os._exit(0)

    if rank == victim:
        assert hasattr(ranks.group.verbs, verb)
        setattr(ranks.group.verbs, verb, last)
    start = time.monotonic()
    with pytest.raises(PeerFailureError) as info:
        for _ in range(4):
            step(ranks, plan, tensors)
            torch.cuda.synchronize()
    text = str(info.value)
    print(f"rank {rank}: {text} [after {time.monotonic() - start:.1f} s]", flush=True)
    # Said by this rank, or by one that it waits for.
    assert f"Rank {victim} (node {victim // node_size}) did not deliver within {TIMEOUT_S:g} s" in text, text
    os._exit(0)  # why: to destroy the group would wait for the rank that is gone


@pytest.mark.parametrize("world, node_size, verb", [(2, 1, "relay"), (4, 2, "relay"), (4, 2, "sum"), (4, 1, "end")])
def test_a_rank_that_ends_is_named(world, node_size, verb) -> None:
    run(ended, world, node_size, verb, timeout_s=90.0)


# ---- all of them ----------------------------------------------------------------------------------------------------
def run(main: Callable, world: int, *args, timeout_s: float = 240.0) -> list:
    return over_nvshmem(main, world, *args, timeout_s=timeout_s, grace_s=15.0, backend="cpu:gloo,cuda:nccl")


def check(results: list[list[str]]) -> None:
    for rank, faults in enumerate(results):
        assert not faults, f"rank {rank}: {len(faults)} faults, {faults[:5]}"
