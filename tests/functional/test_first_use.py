# SPDX-License-Identifier: Apache-2.0
"""Ranks that hold different plans, or call alike plans differently, are told so at the first use, all of them."""

from __future__ import annotations

import re
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from magi_attention import api
from magi_attention.comm.transport import consistency
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.comm.transport.torch import TorchTransport
from magi_attention.errors import ContractError, PeerFailureError, PlanMismatchError
from magi_attention.functional.runtime import AttnPolicy
from magi_attention.testing.spawn import run_processes

TOTAL, WORLD = 64, 3
CU = [0, 13, TOTAL]


def plan_of(cu=CU, causal=True, **options) -> api.Plan:
    return api.make_plan(api.Mask.varlen(cu, causal=causal), WORLD, **options)


def tensors(total: int = TOTAL, dtype=torch.float64) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(total, heads, 8, generator=gen, dtype=torch.float64).to(dtype) for heads in (4, 4, 4)]


def attention(plan, group, heads: int = 4, dtype=torch.float64, **options) -> torch.Tensor:
    q, k, v = (plan.shard(x, group) for x in tensors(plan.total_tokens, dtype))
    return api.attend(q, k[:, :heads], v[:, :heads], plan, group, **options)[0]


def check_right(plan, group) -> None:
    """Out and gradients of ``plan`` over the group are those of one rank."""
    wanted = [x.requires_grad_() for x in tensors()]
    api.attend(*wanted, api.make_plan(api.Mask.varlen(CU, causal=True), 1))[0].square().sum().backward()
    local = [plan.shard(x.detach(), group).requires_grad_() for x in wanted]
    api.attend(*local, plan, group)[0].square().sum().backward()
    for x, want in zip(local, wanted):
        torch.testing.assert_close(plan.gather(x.grad, group), want.grad, rtol=1e-9, atol=1e-9)


def mismatch_of(action) -> str:
    with pytest.raises(PlanMismatchError) as info:
        action()
    return str(info.value)


# What rank 1 does otherwise than the others, and words that have to be in what all ranks are told.
DIFFERENCES = {
    "documents": (lambda odd, g: attention(plan_of([0, 40, TOTAL] if odd else CU), g), "different plans", "mask of 2"),
    "number of documents": (lambda odd, g: attention(plan_of([0, TOTAL] if odd else CU), g), "1 slice ", "2 slices"),
    "total": (lambda odd, g: attention(plan_of([0, 13, 66] if odd else CU), g), "tokens 64", "tokens 66"),
    "kind of mask": (lambda odd, g: attention(plan_of(causal=not odd), g), "different plans", "mask"),
    "chunk size": (
        lambda odd, g: attention(plan_of(config=api.DistAttnConfig(api.DispatchConfig(chunk_size=2 if odd else 4))), g),
        "different plans", "dispatch in chunks of 2",
    ),
    "degree": (
        lambda odd, g: attention(
            plan_of(config=api.DistAttnConfig(overlap_config=api.OverlapConfig(degree=0 if odd else 1))), g
        ),
        "different plans", "stages of degree 0",
    ),
    "heads of the plan": (lambda odd, g: attention(plan_of(num_heads_q=2 if odd else 1), g), "the plan was made for 2"),
    "kv heads": (lambda odd, g: attention(plan_of(), g, heads=2 if odd else 4), "k heads 4 of dim 8", "k heads 2"),
    "dtype": (lambda odd, g: attention(plan_of(), g, dtype=torch.float32 if odd else torch.float64), "dtype float32"),
    "scale": (lambda odd, g: attention(plan_of(), g, softmax_scale=0.5 if odd else None), "softmax scale 0.5"),
    "softcap": (lambda odd, g: attention(plan_of(), g, softcap=3.0 if odd else 0.0), "softcap 3.0"),
    "max logits": (lambda odd, g: attention(plan_of(), g, return_max_logits=odd), "max logits"),
    "sink": (
        lambda odd, g: attention(plan_of(), g, sink=torch.zeros(1, 4, dtype=torch.float64) if odd else None),
        "sinks per head",
    ),
    "settings": (
        lambda odd, g: attention(plan_of(), g, policy=AttnPolicy(hide_tail_reduce=odd)),
        "settings hide_tail_reduce=True",
    ),
    "call": (
        lambda odd, g: _gather(plan_of(), g) if odd else attention(plan_of(), g),
        "different calls", "call gather", "call attention",
    ),
    "gathered plan": (lambda odd, g: _gather(plan_of([0, 40, TOTAL] if odd else CU), g), "different plans", "gather"),
    "rolled plan": (lambda odd, g: _roll(plan_of([0, 40, TOTAL] if odd else CU), g), "different plans", "roll"),
    "gathered width": (lambda odd, g: _gather(plan_of(), g, 8 - odd), "different rows", "(7,) of float32", "(8,)"),
    "gathered dtype": (
        lambda odd, g: _gather(plan_of(), g, dtype=torch.float64 if odd else torch.float32), "different rows", "float64"
    ),
    "rolled width": (lambda odd, g: _roll(plan_of(), g, width=8 - odd), "different rows", "(7,) of float32", "(8,)"),
    "shift": (lambda odd, g: _roll(plan_of(), g, -2 if odd else -1), "different shift", "shift -2", "shift -1"),
    "depth of labels": (lambda odd, g: _labels(plan_of(), g, depth=2 if odd else 1), "different shift", "shift -2"),
    "backward": (lambda odd, g: _step(plan_of(), g, not odd), "different calls", "backward, too: let its loss be"),
    "gradient of shard": (lambda odd, g: _shard(plan_of([0, 40, TOTAL] if odd else CU), g), "different plans"),
    "key": (lambda odd, g: _key([0, 40, TOTAL] if odd else CU, g), "different plans"),
}  # fmt: skip


def _rows(plan, width: int, dtype=torch.float32) -> torch.Tensor:
    return torch.zeros(plan.shard_sizes[dist.get_rank()], width, dtype=dtype)


def _gather(plan, group, width: int = 1, dtype=torch.float32):
    return plan.gather(_rows(plan, width, dtype), group)


def _roll(plan, group, shift: int = -1, width: int = 1):
    return plan.roll(_rows(plan, width), shift, group)


def _labels(plan, group, **options):
    return plan.labels(torch.zeros(plan.shard_sizes[dist.get_rank()], dtype=torch.int64), group=group, **options)


def _step(plan, group, has_labels: bool) -> None:
    """A rank without labels makes no backward and is in its next forward when the others are in backward."""
    out = attention_with_grad(plan, group)
    if has_labels:
        out.sum().backward()
    attention_with_grad(plan, group)


def _shard(plan, group):
    plan.shard(torch.zeros(TOTAL, requires_grad=True), group).sum().backward()


def _key(cu, group):
    cu = torch.tensor(cu, dtype=torch.int32)
    key = api.magi_attn_varlen_key(cu, cu, 4, 4, 8, 0, group, causal=True)
    return api.undispatch(api.dispatch(torch.zeros(TOTAL), key), key)


def differing(rank: int, world: int) -> dict[str, str]:
    told = {}
    for name, (action, *_) in DIFFERENCES.items():
        group = dist.new_group()
        told[name] = mismatch_of(partial(action, rank == 1, group))
        check_right(plan_of(), group)  # nothing has travelled, so the group is whole
    return told


def check_differences(all_told: list[dict[str, str]]) -> None:
    """Every rank is told of every difference."""
    assert all_told[0] == all_told[1] == all_told[2]
    for name, (_, *words) in DIFFERENCES.items():
        text = all_told[0][name]
        assert "rank 1:" in text and "ranks 0, 2:" in text and all(word in text for word in words), (name, text)


def declined(rank: int, world: int) -> None:
    """What is wrong with the call of one rank is told to all, and the group goes on."""
    group, plan = dist.new_group(), plan_of()
    for options in (dict(cu_seqlens=[0, TOTAL + 1]), dict(depth=0), dict(depth=1.5), dict(ignore_index=0.5)):
        with pytest.raises(ContractError if rank == 1 else PeerFailureError) as info:
            _labels(plan, group, **(options if rank == 1 else {}))
        assert rank == 1 or "rank 1 failed: ContractError in labels" in str(info.value), str(info.value)
        check_right(plan, group)
    q, k, v = (plan.shard(x, group) for x in tensors())
    with pytest.raises(ContractError if rank == 1 else PeerFailureError, match="q is NoneType"):
        api.attend(None if rank == 1 else q, k, v, plan, group)
    check_right(plan, group)


def staying_in_step(rank: int, world: int) -> None:
    number, add = [0], consistency.KnownUses.add

    def counted(*args):
        number[0] += 1
        return add(*args)

    consistency.KnownUses.add = counted  # type: ignore[method-assign]
    group = dist.new_group()

    def count(action) -> int:
        before = number[0]
        action()
        return number[0] - before

    # Once for each plan and group, whatever is done with it, and whoever made it.
    assert count(lambda: check_right(plan_of(), group)) == 1
    assert count(lambda: [check_right(plan_of(), group) for _ in range(3)]) == 0
    assert count(lambda: attention(plan_of(), group, softmax_scale=0.25)) == 0
    assert count(lambda: attention(plan_of(), group, heads=2)) == 1
    assert count(lambda: attention(plan_of(), dist.new_group())) == 1

    # What one rank forgets, others need not: one makes its plan anew, another has dropped its keys.
    keys = [plan_of() for _ in range(2)]
    check_right(keys[0], group)
    assert count(lambda: check_right(keys[rank % 2], group)) == 0

    # More plans than are remembered: all ranks forget the same ones.
    plans = [plan_of([0, n, TOTAL]) for n in range(1, 9)]
    limit, consistency.MAX_KNOWN = consistency.MAX_KNOWN, 9  # of attention, three entries for each plan
    for _ in range(2):
        assert count(lambda: [attention(plan, group) for plan in plans]) == len(plans)
    assert count(lambda: [attention(plan if rank else plan_of([0, 8, TOTAL]), group) for plan in plans[-1:]]) == 0
    consistency.MAX_KNOWN = limit

    # A call that fails on one rank before anything has travelled, new or known: the group goes on.
    check_right(plan_of(), group)
    for plan in (plan_of([0, 30, TOTAL]), plan_of()):
        with pytest.raises(ContractError if rank == 2 else PeerFailureError, match="rows"):
            q, k, v = (plan.shard(x, group)[int(rank == 2) :] for x in tensors())
            api.attend(q, k, v, plan, group)
        assert count(lambda: check_right(plan_of(), group)) == 0
    with pytest.raises(ContractError if rank == 2 else PeerFailureError, match="gather.*rows"):
        plan_of().gather(plan_of().shard(tensors()[0], group)[int(rank == 2) :], group)
    check_right(plan_of(), group)

    # First uses in different orders, and one rank at its first use while others use what they know.
    order = [plan_of([0, 50, TOTAL]), plan_of([0, 51, TOTAL])]
    for plan in (order[rank == 1], order[0] if rank == 1 else plan_of()):
        text = mismatch_of(partial(attention, plan, group))
        assert "different plans" in text and "rank 1:" in text
        check_right(plan_of(), group)


def known_plans(rank: int, world: int) -> None:
    """What differs in calls that each rank has made before."""
    group, order = dist.new_group(), [plan_of([0, 50, TOTAL]), plan_of([0, 51, TOTAL])]
    # Plans that all know, in different orders; then the same plan with another scale.
    for plan in order:
        attention(plan, group)
    text = mismatch_of(lambda: attention(order[rank == 1], group))
    assert "different plans" in text and "rank 1:" in text
    text = mismatch_of(lambda: attention(plan_of(), group, softmax_scale=0.5 + (rank == 1)))
    assert "softmax scale 1.5" in text and "rank 1:" in text

    # Forward beside backward.
    out = attention_with_grad(plan_of(), group)
    text = mismatch_of(lambda: attention(plan_of(), group) if rank == 1 else out.sum().backward())
    assert "different calls" in text and "rank 1:" in text
    check_right(plan_of(), group)


def skipping(rank: int, world: int) -> list[str]:
    """Rank 1 leaves its backward out; the time limit is this package's, then the process group's."""
    store, texts = dist.distributed_c10d._get_default_store(), []
    for i, group in enumerate((TorchTransport(dist.new_group()), dist.new_group())):
        plan = plan_of()
        out = attention_with_grad(plan, group)
        if i == 0:  # a short time from here on; the forward may take as long as a busy machine needs
            group.timeout_s = 3
        else:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), group)
        if rank == 1:  # it lives on until the others have found out
            store.wait([f"told {i} {r}" for r in (0, 2)], timedelta(minutes=5))
            continue
        with pytest.raises(PeerFailureError) as info:
            out.sum().backward()
        texts.append(str(info.value))
        store.set(f"told {i} {rank}", "1")
    return texts


def attention_with_grad(plan, group) -> torch.Tensor:
    return api.attend(*(plan.shard(x, group).requires_grad_() for x in tensors()), plan, group)[0]


def first_uses(rank: int, world: int) -> tuple[dict[str, str], list[str]]:
    told = differing(rank, world)
    declined(rank, world)
    staying_in_step(rank, world)
    known_plans(rank, world)
    return told, skipping(rank, world)


def test_first_uses() -> None:
    all_told, texts = zip(*run_processes(WORLD, first_uses))
    print(all_told, texts)
    check_differences(all_told)
    check_skipped(texts)


def check_skipped(texts: list[list[str]]) -> None:
    """The rank that skips its backward is named as that."""
    for i in range(2):
        pair = [texts[0][i], texts[2][i]]
        # on a busy machine another rank may be late as well
        assert all(re.search("rank 1.* did not arrive", text) and "memory" not in text for text in pair), pair
        first = min(pair, key=len)  # the other one may be its echo
        assert "Rank 1 is alive and has not begun attention backward; its last call on this group was" in first
        assert "was attention forward, which ended" in first, first


# ---- the same between threads, many masks -----------------------------------------------------------


def threaded(transport, plans) -> str:
    plan = plans[transport.rank]
    x = plan.shard(torch.ones(plan.total_tokens, 1, 8, dtype=torch.float64), transport)
    try:
        api.attend(x, x, x, plan, transport)
        return "done"
    except PlanMismatchError as error:
        return str(error)


@pytest.mark.parametrize("seed", range(20))
def test_any_two_masks_that_differ_are_told_apart(seed: int) -> None:
    print("seed", seed)
    rng = np.random.default_rng(seed)
    masks = []
    for _ in range(2):
        cu = np.unique(np.concatenate([[0, 32], rng.integers(1, 32, rng.integers(0, 3))])).tolist()
        masks.append(api.Mask.varlen(cu, causal=bool(rng.integers(2))))
    plans = [api.make_plan(masks[rank == 1], 3) for rank in range(3)]
    is_same = np.array_equal(masks[0].to_dense(), masks[1].to_dense())
    told = FakeWorld(3).run(threaded, plans)
    assert all((text == "done") == is_same for text in told) and len(set(told)) == 1, told


def alone(rank: int, world: int) -> None:
    """Each rank holds a document of its own, so a known plan moves no row, and one rank may call it alone."""
    plan = plan_of([0, 21, 42, 63], config=api.DistAttnConfig(api.DispatchConfig(chunk_size=21)))
    assert not plan.comm_matrix().sum()
    x = torch.ones(plan.shard_sizes[rank], 1, 8, dtype=torch.float64)
    api.attend(x, x, x, plan)
    for _ in range(rank):
        assert torch.equal(api.attend(x, x, x, plan)[0], x)
    attention(plan_of(), None)


def test_a_rank_may_call_alone_where_nothing_travels() -> None:
    run_processes(WORLD, alone)
