# SPDX-License-Identifier: Apache-2.0
"""Head chunks beside whole heads and dense float64 attention, over gloo, with and without torch.compile."""

from __future__ import annotations

import random
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from oracle import dense_attention

from magi_attention.api import AttnPolicy, DispatchConfig, DistAttnConfig, Mask, OverlapConfig, attend, make_plan
from magi_attention.comm.transport.torch import as_transport
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.functional import AttnRuntime
from magi_attention.functional.dist_attn import dist_attn
from magi_attention.functional.stages.comm import Handle
from magi_attention.kernels import Registry
from magi_attention.testing.spawn import run_processes

sys.path.insert(0, str(Path(__file__).parent))
from live_bytes import EmptyBackend  # noqa: E402

TOKENS, HEADS, D = 90, (8, 4, 4, 8), (8, 8, 6, 6)  # of q, k, v and out


def operands(seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(TOKENS, h, d, dtype=dtype, generator=generator) for h, d in zip(HEADS, D)]


def step(rank: int, world: int, seed: int, dtype: torch.dtype, chunks: int, degree: int) -> tuple:
    """out, lse, max_logits and gradients of all tokens, and of the sink; twice, for their bits."""
    rng = random.Random(seed)
    mask = Mask.from_lengths([40, 1, 49], causal=rng.random() < 0.7)
    plan = make_plan(mask, world, DistAttnConfig(DispatchConfig(8), OverlapConfig(degree=degree, min_chunk_size=4)))
    group, softcap = dist.group.WORLD, rng.choice((0.0, 3.0))
    q, k, v, dout = operands(seed, dtype)
    sink = torch.linspace(-1, 1, 16, dtype=torch.float64).view(2, 8)
    policy = AttnPolicy(head_chunks=chunks, deterministic=True, high_precision_reduce=True, hide_tail_reduce=True)

    is_token = plan.shard(torch.ones(TOKENS, 1), group)  # pad rows see the sinks, too

    def run():
        local = [plan.shard(x, group).requires_grad_() for x in (q, k, v)]
        own = sink.clone().requires_grad_()
        out, meta = attend(*local, plan, group, sink=own, softcap=softcap, return_max_logits=True, policy=policy)
        (out * plan.shard(dout, group)).sum().add((meta.lse.sin() * is_token).sum()).backward()
        dist.all_reduce(own.grad)
        rows = [plan.gather(x.detach(), group) for x in (out, meta.lse, *(x.grad for x in local))]
        return [*rows, meta.max_logits, own.grad]

    first, again = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(first, again)), "the same bits"
    wanted = [x.double().requires_grad_() for x in (q, k, v)]
    own = sink.clone().requires_grad_()
    out, lse, _ = dense_attention(*wanted, torch.from_numpy(mask.to_dense()), D[0] ** -0.5, softcap, own)
    (out * dout.double()).sum().add(lse.sin().sum()).backward()
    return first, [out.detach(), lse.detach(), *(x.grad for x in wanted), own.grad]


def steps(rank: int, world: int, seed: int, degree: int) -> list[tuple]:
    return [step(rank, world, seed, torch.float64, chunks, degree) for chunks in (1, 2, 4)]


@pytest.mark.parametrize(("world", "degree"), [(1, 1), (2, 0), (2, 1), (3, 2)])
def test_chunks_are_whole_heads_and_dense_attention(world, degree):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    for (of_whole, _), *in_chunks in run_processes(world, steps, seed, degree):
        for got, truth in in_chunks:
            for a, b in zip(got, of_whole):
                torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10)
            for a, b in zip([*got[:5], got[6]], truth):
                torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-8)


class Logged:
    """A stage's exchange, or a backend, that writes down what begins and what ends."""

    def __init__(self, inner, log: list[str]) -> None:
        self._inner, self._log = inner, log

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def fetch(self, *operands):
        self._log.append("fetch")
        return self._inner.fetch(*operands)

    def give_back(self, *operands):
        handle = self._inner.give_back(*operands)
        self._log.append("give back")

        def wait() -> None:
            handle.wait()
            self._log.append("came back")

        return Handle(wait)

    def forward(self, *operands):
        self._log.append("kernel")
        return self._inner.forward(*operands)

    def forward_final(self, *operands):
        self._log.append("kernel")
        return self._inner.forward_final(*operands)

    def backward(self, *operands):
        self._log.append("kernel")
        return self._inner.backward(*operands)


def logs_of_a_step(rank: int, world: int, degree: int, chunks: int) -> list[list[str]]:
    """What a forward and a backward do, in their order, with as many stages as the plan has."""
    config = DistAttnConfig(DispatchConfig(8), OverlapConfig(degree=degree, min_chunk_size=4))
    plan, log = make_plan(Mask.full(TOKENS), world, config), []
    policy = AttnPolicy(backend="empty", head_chunks=chunks)
    runtime = AttnRuntime(plan, as_transport(None), Registry((Logged(EmptyBackend(), log),)), policy)
    runtime.comms = tuple(Logged(comm, log) for comm in runtime.comms)
    q, k, v, _ = (plan.shard(x, dist.group.WORLD).requires_grad_() for x in operands(1, torch.float32))
    out, _, _ = dist_attn(q, k, v, runtime)
    forward = list(log)
    log.clear()
    out.sum().backward()
    return [forward, list(log), ["stage"] * plan.num_stages]


def places(log: list[str], name: str) -> list[int]:
    return [i for i, what in enumerate(log) if what == name]


@pytest.mark.parametrize("degree", [0, 1, 2])
def test_rows_of_a_chunk_travel_beside_the_kernels_of_its_neighbours(degree):
    chunks = 4
    for forward, backward, stages in run_processes(2, logs_of_a_step, degree, chunks):
        per_chunk = max(len(stages), 1) + (degree > 0)  # kernels
        for log in (forward, backward):
            fetches, kernels = places(log, "fetch"), places(log, "kernel")
            assert len(kernels) == per_chunk * chunks and len(fetches) == len(stages) * chunks
            for i in range(1, chunks):
                last_kernel_before = kernels[i * per_chunk - 1]
                assert fetches[i * len(stages)] < last_kernel_before, "it sets out before the last kernel"
                earlier = fetches[i * len(stages) - 1]
                assert earlier < fetches[i * len(stages)], "and behind all rows of the chunk before"
        back = places(backward, "came back")
        kernels = places(backward, "kernel")
        assert len(back) == len(stages) * chunks
        for i in range(1, chunks):
            first_kernel = kernels[i * per_chunk]
            assert first_kernel < back[(i - 1) * len(stages)], "gradients return beside the next chunk's first kernel"


def compiled(rank: int, world: int) -> list[torch.Tensor]:
    plan = make_plan(Mask.causal(TOKENS), world)
    found = []
    for chunks in (1, 2):
        call = torch.compile(partial(attend, plan=plan, policy=AttnPolicy(head_chunks=chunks)), backend="aot_eager")
        q, k, v, dout = (plan.shard(x, dist.group.WORLD) for x in operands(1, torch.float64))
        local = [x.clone().requires_grad_() for x in (q, k, v)]
        call(*local)[0].backward(dout)
        found.append([x.grad for x in local])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10)
    return found[1]


def test_in_a_compiled_model():
    assert all(len(grads) == 3 for grads in run_processes(2, compiled))


@pytest.mark.parametrize(
    ("options", "chunks", "error", "sentence"),
    [
        ({}, 3, ContractError, "no divisor of the 4 kv heads"),
        ({"dropout_p": 0.1, "dropout_seed": 1}, 2, UnsupportedError, "set head_chunks to 1"),
    ],
)
def test_refused(options, chunks, error, sentence):
    q, k, v, _ = operands(1, torch.float32)
    with pytest.raises(error, match=sentence):
        attend(q, k, v, make_plan(Mask.causal(TOKENS), 1), policy=AttnPolicy(head_chunks=chunks), **options)


@pytest.mark.parametrize("chunks", [0, -1, 1.5, "two"])
def test_a_number_of_chunks(chunks):
    with pytest.raises(ContractError, match="head_chunks"):
        AttnPolicy(head_chunks=chunks)
