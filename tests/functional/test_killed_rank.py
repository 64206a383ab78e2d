# SPDX-License-Identifier: Apache-2.0
"""A rank is killed between two calls of attention over gloo: the others say so, and go on in a new group."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref

import pytest
import torch
import torch.distributed as dist

from magi_attention import api
from magi_attention.comm.torch_transport import TorchTransport, attached
from magi_attention.errors import PeerFailureError
from magi_attention.testing.spawn import RankFailure, run_processes

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


def error_of(action) -> tuple[str, float]:
    start = time.monotonic()
    with pytest.raises(PeerFailureError) as info:
        action()
    return str(info.value), time.monotonic() - start


def check_meetings(rank: int) -> None:
    # Bounds are far from the 2 s of this group and from the 20 s of the other: machines are busy.
    late = TorchTransport(dist.new_group(), timeout_s=2)
    for i in range(4):
        late.meet(f"meeting {i}")
    if rank == 1:
        time.sleep(5)
        assert "did not arrive" in error_of(lambda: late.meet("the last meeting"))[0]
    else:
        text, waited = error_of(lambda: late.meet("the last meeting"))
        assert "rank 1 did not arrive" in text and "the last meeting" in text and waited < 8, text
        text, waited = error_of(lambda: late.meet("another one"))
        assert "rank 1 did not come back" in text and waited < 8, text
    group = dist.new_group()
    attached(group)["kept"] = kept = _Kept()
    gone = weakref.ref(kept)
    dist.destroy_process_group(group)
    del group, kept
    gc.collect()
    assert gone() is None, "what is kept for a group goes with it"


class _Kept:
    pass


def main(rank: int, world: int) -> None:
    check_meetings(rank)
    group = TorchTransport(None, timeout_s=20)
    before = attention(group)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    text, waited = error_of(lambda: attention(group))
    assert "rank 2" in text and waited < 15, (text, waited)
    # what is known is said, and no cause that is not: nobody reported a lack of memory
    assert "process has ended" in text and "memory" not in text, text
    text, waited = error_of(lambda: group.meet("a meeting"))
    assert "make a new one" in text and waited < 5, (text, waited)
    fresh = dist.new_group([0, 1], use_local_synchronization=True)
    for a, b in zip(attention(fresh), before):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_killed_rank() -> None:
    with pytest.raises(RankFailure, match=r"(?s)1 of 3 ranks failed.*rank 2 ---\ndied with exit code -9"):
        run_processes(WORLD, main, timeout_s=120)
