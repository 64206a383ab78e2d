# SPDX-License-Identifier: Apache-2.0
"""A rank is killed at any stage of a training over gloo: the others say so, and go on in a new group."""

from __future__ import annotations

import gc
import os
import re
import signal
import weakref
from itertools import count

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


def _die(*_args, **_options) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _dies_at(name: str, number: int = 1, stage: str = "") -> None:
    """This process ends when its transport comes to this method, of ``stage``, for the ``number``-th time."""
    method, calls = getattr(TorchTransport, name), count(1)

    def call(self, *args, **options):
        if (not stage or args[0] == stage) and next(calls) == number:
            _die()
        return method(self, *args, **options)

    setattr(TorchTransport, name, call)


# Where rank 2 is killed. Attention of two stages sends keys and values once for each, in the forward and again in the
# backward, before it returns gradients.
KILLED_AT = {
    "import": _die,
    "transport made": lambda: (TorchTransport(None), _die()),
    "comparison of plans": lambda: _dies_at("gather_tokens"),
    "first forward": lambda: _dies_at("guard", 1, "attention forward"),
    "exchange of rows": lambda: _dies_at("all_to_all_v"),
    "stage 1": lambda: _dies_at("all_to_all_v", 2),
    "backward": lambda: _dies_at("guard", 1, "attention backward"),
    "reduce": lambda: _dies_at("all_to_all_v", 5),
    "between steps": lambda: _dies_at("guard", 2, "attention forward"),
    "the end": lambda: None,
}


def staged(rank: int, world: int, stage: str) -> None:
    if rank == 2:
        KILLED_AT[stage]()
    overlap = api.OverlapConfig(degree=2, min_chunk_size=4)
    config = api.DistAttnConfig(api.DispatchConfig(chunk_size=8), overlap)
    plan = api.make_plan(api.Mask.causal(TOTAL), world, config=config)
    assert plan.num_stages == 2

    def step() -> None:
        x = plan.shard(torch.ones(TOTAL, 2, 16, dtype=torch.float64)).requires_grad_()
        api.attend(x, x, x, plan)[0].sum().backward()

    def run() -> None:
        for _ in range(3):
            step()
        if rank == 2:
            _die()
        TorchTransport(None).meet("the end")

    text = error_of(run)
    assert "rank 2" in text.lower() and "rank 1" not in text.lower().replace("rank 1 failed", ""), text


@pytest.mark.parametrize("stage", KILLED_AT)
def test_who_was_killed_is_named(stage: str) -> None:
    """Long before the time limit of the group, half an hour here."""
    with pytest.raises(RankFailure, match=r"(?s)1 of 3 ranks failed.*rank 2 ---\ndied with exit code -9"):
        run_processes(WORLD, staged, stage, grace_s=DEADLINE_S)
