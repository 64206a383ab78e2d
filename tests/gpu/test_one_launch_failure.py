# SPDX-License-Identifier: Apache-2.0
"""A rank ends while others run attention in one launch with it: they say so, let go of its buffers and go on in a new
group. On as many GPUs as there are, up to 4; two ranks share the only one."""

from __future__ import annotations

import gc
import os
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from places import GPUS, NEEDS_A_GPU, places

from magi_attention import api
from magi_attention.comm.collectives.group import group_cast
from magi_attention.comm.symm.buffers import symm_group, why_no_symm_buffers
from magi_attention.comm.transport.torch import TorchTransport
from magi_attention.errors import PeerFailureError, PlanMismatchError
from magi_attention.testing.spawn import run_processes

pytestmark = [pytest.mark.gpu, NEEDS_A_GPU]
TOTAL, HEADS_Q, HEADS_KV, DIM = 2048, 4, 2, 64
TIMEOUT_S = 3


def key_of(group, causal: bool = True):
    cu = torch.tensor([0, TOTAL], dtype=torch.int32)
    config = api.DistAttnConfig(api.DispatchConfig(chunk_size=128))
    return api.magi_attn_varlen_key(
        cu, cu, HEADS_Q, HEADS_KV, DIM, 0, group, causal=causal, dist_attn_config=config
    )  # fmt: skip


def tensors() -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    shapes = [(TOTAL, heads, DIM) for heads in (HEADS_Q, HEADS_KV, HEADS_KV)]
    return [torch.randn(*shape, generator=gen).to(torch.bfloat16).cuda() for shape in shapes]


def attention(key) -> list[torch.Tensor]:
    """This rank's rows of out and gradients; all kernels have ended."""
    local = [api.dispatch(x, key).requires_grad_() for x in tensors()]
    out, _ = api.calc_attn(*local, key)
    out.backward(torch.ones_like(out))
    torch.cuda.synchronize()
    return [out.detach(), *(x.grad for x in local)]


def check_values(key) -> None:
    """Against dense attention in float64."""
    q, k, v = (x.double().requires_grad_() for x in tensors())
    logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(HEADS_Q // HEADS_KV, 1)) * DIM**-0.5
    later = torch.ones(TOTAL, TOTAL, dtype=torch.bool, device="cuda").triu(1)
    weights = logits.masked_fill(later, float("-inf")).softmax(2)
    out = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(HEADS_Q // HEADS_KV, 1))
    out.sum().backward()
    for got, wanted in zip(attention(key), (out.detach(), q.grad, k.grad, v.grad)):
        wanted = api.dispatch(wanted, key)
        assert float((got.double() - wanted).abs().max()) <= 5e-2 * float(wanted.abs().max())


def error_of(action) -> tuple[str, float]:
    start = time.monotonic()
    with pytest.raises(PeerFailureError) as info:
        action()
    return str(info.value), time.monotonic() - start


def cast(t, rows: int) -> None:
    """Everybody's rows to everybody else, natively."""
    others = [r for r in range(t.size) if r != t.rank]
    x = torch.full((rows, 64), float(t.rank), device="cuda")
    y = torch.empty(rows * len(others), 64, device="cuda")
    lists = ([rows], [rows] * len(others), [others], others)
    group_cast(x, y, *lists, t, native=True).wait_post_process()
    wanted = torch.tensor(others, device="cuda").repeat_interleave(rows)
    assert bool((y[:, 0] == wanted).all())


def check_release(rank: int, world: int) -> None:
    """The buffers of a group that is destroyed are freed."""
    group = dist.new_group(list(range(world)))
    t = TorchTransport(group, timeout_s=30)
    assert why_no_symm_buffers(t, by_wish=True) is None
    cast(t, 100)
    buffers = weakref.ref(symm_group(t, torch.device("cuda", torch.cuda.current_device())))
    torch.cuda.synchronize()
    t.barrier()
    dist.destroy_process_group(group)
    del group, t
    gc.collect()
    assert buffers() is None


def check_mismatch(rank: int) -> None:
    """Keys of different masks are told, not hung, before memory is shared for them."""
    with pytest.raises(PlanMismatchError, match="different plan"):
        attention(key_of(TorchTransport(None, timeout_s=30), causal=rank != 0))


def check_survivor(t, other, key, victim: int) -> None:
    """``t``: the group whose kernels wait in vain; ``other``: a group that finds out when its hosts meet."""
    local = [api.dispatch(x, key) for x in tensors()]
    start = time.monotonic()
    api.calc_attn(*local, key)
    torch.cuda.synchronize()
    waited = time.monotonic() - start
    assert TIMEOUT_S - 1 < waited < 3 * TIMEOUT_S + 4, waited
    for action in (lambda: api.calc_attn(*local, key), lambda: t.all_reduce(torch.ones(1, device="cuda")), t.barrier):
        text, waited = error_of(action)
        print(text, f"[after {waited:.2f} s]", flush=True)
        assert f"Rank {victim} did not deliver" in text and "attention forward" in text and waited < 2, text
    text, waited = error_of(lambda: cast(other, 100_000))
    print(text, f"[after {waited:.2f} s]", flush=True)
    assert f"Rank {victim} ended before the first use of a layout" in text and waited < TIMEOUT_S, (text, waited)


def main(rank: int, world: int) -> str:
    os.environ["MAGI_ATTENTION_NATIVE_GRPCOLL"] = "1"
    patient = TorchTransport(None, timeout_s=60)
    patient.barrier()  # processes may start seconds apart
    reason = why_no_symm_buffers(patient, by_wish=True)
    if reason is not None:
        return reason
    attention(key_of(TorchTransport(dist.new_group(list(range(world))), timeout_s=60)))  # loads all kernels
    check_release(rank, world)
    check_mismatch(rank)
    t = TorchTransport(None, timeout_s=TIMEOUT_S)
    key, other = key_of(t), TorchTransport(dist.new_group(list(range(world))), timeout_s=TIMEOUT_S)
    check_values(key)
    full = key_of(t, causal=False)  # every rank reads keys of every other
    attention(full)
    cast(other, 100)
    torch.cuda.synchronize()
    t.barrier()
    victim = world - 1
    if rank == victim:
        os._exit(0)
    time.sleep(1)
    check_survivor(t, other, full, victim)
    fresh = dist.new_group(list(range(victim)), use_local_synchronization=True)
    key = key_of(fresh if victim == 1 else TorchTransport(fresh, timeout_s=30))
    check_values(key)
    check_values(key)
    os._exit(0)  # why: to destroy the old group would wait for the rank that is gone


@pytest.mark.parametrize("world, backend", places(*sorted({2, min(GPUS, 4)})))
def test_a_rank_that_ends(world: int, backend: str) -> None:
    results = run_processes(world, main, timeout_s=90, backend=backend)
    if results[0] is not None:
        pytest.skip(results[0])
    assert results == [None] * world
