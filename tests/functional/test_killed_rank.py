# SPDX-License-Identifier: Apache-2.0
"""A rank is killed between two calls of attention over gloo: the others say so, and go on in a new group."""

from __future__ import annotations

import gc
import os
import re
import signal
import weakref

import pytest
import torch
import torch.distributed as dist

from magi_attention import api
from magi_attention.comm.transport.process_groups import attached
from magi_attention.comm.transport.torch import TorchTransport
from magi_attention.errors import PeerFailureError
from magi_attention.testing.spawn import RankFailure, run_processes
from magi_attention.testing.waiting import DEADLINE_S, Flags

TOTAL, WORLD = 96, 3


def attention(group) -> list[torch.Tensor]:
    """Causal; out and gradients of all tokens."""
    gen = torch.Generator().manual_seed(0)
    tensors = [torch.randn(TOTAL, 2, 16, generator=gen, dtype=torch.float64) for _ in range(3)]
    cu = torch.tensor([0, TOTAL], dtype=torch.int32)
    config = api.DistAttnConfig(api.DispatchConfig(chunk_size=8))
    key = api.magi_attn_varlen_key(cu, cu, 2, 2, 16, 0, group, causal=True, dist_attn_config=config)
    local = [api.dispatch(x, key).requires_grad_() for x in tensors]
    out, _ = api.calc_attn(*local, key)
    out.square().sum().backward()
    return [api.undispatch(x.detach(), key) for x in (out, *(x.grad for x in local))]


def error_of(action) -> str:
    with pytest.raises(PeerFailureError) as info:
        action()
    return str(info.value)


def check_meetings(rank: int, flags: Flags) -> None:
    patient = TorchTransport(dist.new_group())
    for i in range(4):
        patient.meet(f"meeting {i}")
    # On a busy machine another rank than the one that stays away may be late as well.
    hasty = TorchTransport(dist.new_group(), timeout_s=2)
    if rank == 1:
        flags.wait("rank 0 gave up", "rank 2 gave up")
        assert "did not arrive" in error_of(lambda: hasty.meet("the last meeting"))
    else:
        text = error_of(lambda: hasty.meet("the last meeting"))
        assert re.search("After 2 s in the last meeting, .*rank 1.* did not arrive", text), text
        text = error_of(lambda: hasty.meet("another one"))
        assert re.search("rank 1.* did not come back", text), text
        flags.set(f"rank {rank} gave up")
    group = dist.new_group()
    attached(group)["kept"] = kept = _Kept()
    gone = weakref.ref(kept)
    dist.destroy_process_group(group)
    del group, kept
    gc.collect()
    assert gone() is None, "what is kept for a group goes with it"


class _Kept:
    pass


def main(rank: int, world: int, folder: str) -> None:
    check_meetings(rank, Flags(folder))
    group = TorchTransport(None)
    before = attention(group)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    text = error_of(lambda: attention(group))
    assert "rank 2" in text, text
    # what is known is said, and no cause that is not: nobody reported a lack of memory
    assert "process has ended" in text and "memory" not in text, text
    text = error_of(lambda: group.meet("a meeting"))
    assert "make a new one" in text, text
    fresh = dist.new_group([0, 1], use_local_synchronization=True)
    for a, b in zip(attention(fresh), before):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_killed_rank(tmp_path) -> None:
    with pytest.raises(RankFailure, match=r"(?s)1 of 3 ranks failed.*rank 2 ---\ndied with exit code -9"):
        run_processes(WORLD, main, str(tmp_path), grace_s=DEADLINE_S)
