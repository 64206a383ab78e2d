# SPDX-License-Identifier: Apache-2.0
"""The bytes that are predicted for attention beside those that a call saves and allocates, over gloo."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

from magi_attention.api import AttnPolicy, DispatchConfig, DistAttnConfig, Mask, OverlapConfig, make_plan
from magi_attention.comm.transport.base import SingleTransport
from magi_attention.comm.transport.torch import as_transport
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.functional import AttnRuntime
from magi_attention.functional.attention_memory import HeadShape, attention_memory
from magi_attention.functional.dist_attn import dist_attn
from magi_attention.kernels import Registry
from magi_attention.meta.one_launch.fused_layout import FusedLayout
from magi_attention.testing.spawn import run_processes

sys.path.insert(0, str(Path(__file__).parent))
from live_bytes import EmptyBackend, LiveBytes  # noqa: E402

HEADS = HeadShape(8, 4, 32, 16)
TOKENS = 1 << 13
CASES = [(0, 1), (1, 1), (3, 2), (0, 2), (0, 4), (1, 4), (2, 4)]  # degree, head chunks
SMALL = 64 << 10  # bytes of lists and of what the ranks compare


def plan_of(seed: int, ranks: int, degree: int):
    rng = random.Random(seed)
    ends = sorted(rng.sample(range(1, TOKENS), rng.randint(0, 4)))
    mask = Mask.varlen([0, *ends, TOKENS], causal=rng.random() < 0.7)
    return make_plan(mask, ranks, DistAttnConfig(DispatchConfig(256), OverlapConfig(degree=degree, min_chunk_size=256)))


def operands(rows: int) -> list[torch.Tensor]:
    shapes = ((rows, 8, 32), (rows, 4, 32), (rows, 4, 16))
    return [torch.randn(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]


def saved_bytes(function) -> tuple[int, torch.Tensor]:
    """Bytes of the storages that the graph of ``function()`` saves, each counted once, and what it returns."""
    storages = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = function()
    return sum(storages.values()), result


def measure(rank: int, world: int, seed: int, degree: int, head_chunks: int) -> dict[str, tuple[int, int]]:
    """(measured, predicted) bytes by name."""
    plan = plan_of(seed, world, degree)
    want = attention_memory(plan, rank, HEADS, head_chunks=head_chunks)
    policy = AttnPolicy(backend="empty", head_chunks=head_chunks)
    transport = SingleTransport() if world == 1 else as_transport(None)
    runtime = AttnRuntime(plan, transport, Registry((EmptyBackend(),)), policy)
    q, k, v = operands(plan.shard_sizes[rank])
    forward, backward = [], []
    for _ in range(4):  # the first call makes tables, and gloo's thread may let go of a buffer late
        with LiveBytes() as live:
            kept, (out, lse, _) = saved_bytes(lambda: dist_attn(q, k, v, runtime))
        forward.append(live.peak - out.nbytes - lse.nbytes)
        dout = torch.ones_like(out)
        with LiveBytes() as live:
            torch.autograd.grad(out, (q, k, v), dout)
        backward.append(live.peak)
    found = {"kept": (kept, want.kept), "forward": (min(forward), want.forward)}
    return {**found, "backward": (min(backward), want.backward)}


def measure_all(rank: int, world: int, seed: int) -> list[dict[str, tuple[int, int]]]:
    return [measure(rank, world, seed, *case) for case in CASES]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_predicted_bytes_are_those_of_a_call(ranks):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    of_ranks = run_processes(ranks, measure_all, seed) if ranks > 1 else [measure_all(0, 1, seed)]
    for (_, chunks), found in (pair for of_rank in of_ranks for pair in zip(CASES, of_rank, strict=True)):
        measured, predicted = found["kept"]
        assert measured == predicted, "attention keeps q, k, v, out and lse of local rows, and nothing else"
        # Where there is no kernel, rows of dk that arrive are copied to float32 before they are added.
        copied = -(-TOKENS // ranks) * HEADS.num_heads_kv // chunks * HEADS.head_dim * 4
        for name, more in (("forward", 0), ("backward", copied if ranks > 1 else 0)):
            measured, predicted = found[name]
            assert -0.1 * measured - SMALL <= measured - predicted <= 0.1 * measured + SMALL + more, (name, found)


def test_shared_buffers_are_those_of_the_largest_rank():
    plan, row, grad = plan_of(1, 4, 1), HEADS.kv_row * 2, HEADS.kv_row * 4
    parts = [FusedLayout(plan).part(rank) for rank in range(4)]
    rows = max(int(plan.comm_matrix().sum(0).max()), 1)
    for precise in (False, True):
        found = {
            attention_memory(plan, rank, HEADS, is_one_launch=True, high_precision_reduce=precise).buffers
            for rank in range(4)
        }
        assert len(found) == 1, "ranks share them, so all have as many"
        (bytes_of_all,) = found
        assert rows * (row + (grad if precise else row)) <= bytes_of_all, "all that one rank receives has room"
        assert bytes_of_all == parts[0].buffer_rows * row + parts[0].grad_rows * (grad if precise else row)


def test_what_is_not_predicted_is_refused():
    mask = Mask.varlen([0, 3000, TOKENS], causal=True)
    heads = {"num_heads_q": 8, "num_heads_kv": 4, "head_dim": 32}
    plan = make_plan(mask, 2, query_moves="always", **heads)
    with pytest.raises(UnsupportedError, match="never"):
        attention_memory(plan, 0, HEADS)
    with pytest.raises(ContractError, match="no divisor of the 4 kv heads"):
        attention_memory(plan_of(1, 2, 1), 0, HEADS, head_chunks=3)
