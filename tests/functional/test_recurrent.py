# SPDX-License-Identifier: Apache-2.0
"""What recurrent layers are made of, states and convolutions over fragments: in float64, beside documents alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from magi_attention.api import (
    DispatchConfig,
    DistAttnConfig,
    Mask,
    Plan,
    causal_conv1d,
    conv_history,
    decay_of_fragments,
    make_plan,
    pass_states,
    run_recurrent,
)
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.errors import ContractError, PeerFailureError
from magi_attention.meta.planner import PlanOptions, plan_for_partitions
from magi_attention.testing.random_plans import random_documents, random_plan


def summaries(plan, kind: int, seed: int, heads: int = 2, key: int = 3, width: int = 4):
    """Random transitions of rank ``kind``, states, and weights of what comes, for each rank."""
    torch.manual_seed(seed)
    counts = [len(ranges) for ranges in plan.fragments().ranges]
    sizes = ((heads, key, key)[:kind], (heads, key, width), (heads, key, width))
    return [[torch.randn(n, *size, dtype=torch.float64) for size in sizes] for n in counts]


def walked(plan, a: list[torch.Tensor], b: list[torch.Tensor]) -> list[torch.Tensor]:
    """The states that come to fragments, fragment by fragment along the sequence."""
    fragments, state = plan.fragments(), None
    came = [list(torch.zeros_like(x)) for x in b]
    takers = {tuple(row) for row in fragments.passes[:, 2:].tolist()}
    for rank, number in fragments.order.tolist():
        now, transition = b[rank][number], a[rank][number]
        if (rank, number) in takers:
            came[rank][number] = state
            if fragments.carries(rank)[number]:
                matrix = torch.diag_embed(transition) if transition.dim() == 2 else transition
                now = now + (matrix @ state if matrix.dim() == 3 else matrix[:, None, None] * state)
        state = now
    return [torch.stack(x) for x in came]


@pytest.mark.parametrize("kind", [1, 2, 3])
@pytest.mark.parametrize("way", ["gather", "chain", "auto"])
@pytest.mark.parametrize("seed", range(8))
def test_states_and_gradients_in_every_way(kind: int, way: str, seed: int) -> None:
    print("seed", seed)
    plan = random_plan(np.random.default_rng(100 + seed))
    given = summaries(plan, kind, seed)
    a, b = ([x[i].clone().requires_grad_() for x in given] for i in (0, 1))
    want = walked(plan, a, b)
    loss = sum((x * w[2]).sum() for x, w in zip(want, given))
    grads = torch.autograd.grad(loss, [*a, *b], allow_unused=True) if loss.requires_grad else [None] * 2 * len(a)

    def rank(transport):
        transition, state, weight = (x.clone().requires_grad_() for x in given[transport.rank])
        came = pass_states(transition, state, plan, transport, way=way)
        again = pass_states(transition, state, plan, transport, way=way)
        assert torch.equal(came, again)  # deterministic
        if came.requires_grad:
            (came * weight).sum().backward()
        found = came.detach(), transition.grad, state.grad
        return [torch.zeros_like(like) if x is None else x for x, like in zip(found, (state, transition, state))]

    for r, found in enumerate(FakeWorld(plan.cp_size).run(rank)):
        expected = [want[r].detach(), grads[r], grads[len(a) + r]]
        for got, x in zip(found, expected):
            torch.testing.assert_close(got, torch.zeros_like(got) if x is None else x, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("way", ["gather", "chain"])
@pytest.mark.parametrize("seed", range(4))
def test_documents_may_be_given(seed: int, way: str) -> None:
    """Those of the mask and others take turns, so tables are told apart; beside a plan whose mask has the others."""
    print("seed", seed)
    rng = np.random.default_rng(300 + seed)
    plan = random_plan(rng)
    cu = random_documents(rng, plan.total_tokens)
    own = plan.with_mask(Mask.varlen(cu, causal=True))
    given, weight = summaries(plan, 3, seed), torch.randn(4, 3, dtype=torch.float64)

    def rank(t):
        def both(which: Plan, cu_seqlens):
            leaves = [x.clone().requires_grad_() for x in given[t.rank][:2]]
            came = pass_states(*leaves, which, t, cu_seqlens=cu_seqlens, way=way)
            if came.requires_grad:
                (came * given[t.rank][2]).sum().backward()
            x = which.shard(torch.arange(float(plan.total_tokens)).double().view(-1, 1).expand(-1, 4), t)
            decay = decay_of_fragments(-x / 50, which, t, cu_seqlens=cu_seqlens)
            return [came.detach(), *(x.grad for x in leaves), decay,
                    causal_conv1d(x, weight, which, t, cu_seqlens=cu_seqlens)]  # fmt: skip

        both(plan, None)
        found, want = both(plan, cu), both(own, None)
        return all(a is b is None or torch.equal(a, b) for a, b in zip(found, want))

    assert all(FakeWorld(plan.cp_size).run(rank))


def test_random_plans_have_what_is_tested() -> None:
    """Long runs, fragments of one token or two runs, and ranks with nothing but pad."""
    found = dict.fromkeys(("long run", "one token", "no tokens", "two runs"), 0)
    for seed in range(100, 108):
        plan = random_plan(np.random.default_rng(seed))
        fragments = plan.fragments()
        for r, ranges in enumerate(fragments.ranges):
            takes, gives, carries = fragments.takes(r), fragments.gives(r), fragments.carries(r)
            found["long run"] += int(carries.sum())
            found["one token"] += int((ranges[:, 1] - ranges[:, 0] == 1).sum())
            found["no tokens"] += int(ranges[0, 0] >= plan.total_tokens)
            found["two runs"] += int((takes & gives & ~carries).sum())
    assert all(found.values()), found


@pytest.mark.parametrize("kind", [1, 2, 3])
@pytest.mark.parametrize("way", ["gather", "chain"])
def test_gradients_are_differentiable(kind: int, way: str) -> None:
    plan = make_plan(Mask.varlen([0, 3, 30], causal=True), 3, DistAttnConfig(DispatchConfig(2)))
    given = summaries(plan, kind, 0)

    def second(came: list[torch.Tensor], leaves: list[torch.Tensor], weights: list[torch.Tensor]):
        loss = sum((x**3 * w).sum() for x, w in zip(came, weights))
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.autograd.grad(sum((x**2).sum() for x in first), leaves)

    a, b = ([x[i].clone().requires_grad_() for x in given] for i in (0, 1))
    want = second(walked(plan, a, b), [*a, *b], [x[2] for x in given])

    def rank(transport):
        leaves = [x.clone().requires_grad_() for x in given[transport.rank][:2]]
        return second([pass_states(*leaves, plan, transport, way=way)], leaves, [given[transport.rank][2]])

    for r, found in enumerate(FakeWorld(3).run(rank)):
        torch.testing.assert_close(list(found), [want[r], want[3 + r]], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_convolution_equals_documents_alone(seed: int) -> None:
    print("seed", seed)
    rng = np.random.default_rng(200 + seed)
    plan, width, channels = random_plan(rng), int(rng.integers(1, 5)), 3
    torch.manual_seed(seed)
    x, loss_weight = torch.randn(2, plan.total_tokens, channels, dtype=torch.float64)
    weight, bias = torch.randn(channels, width, dtype=torch.float64), torch.randn(channels, dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    want = leaves[2].expand(plan.total_tokens, -1).clone()
    for begin, end in zip(plan.cu_seqlens, plan.cu_seqlens[1:]):
        for back in range(min(width, end - begin)):
            want[begin + back : end] += leaves[1][:, width - 1 - back] * leaves[0][begin : end - back]
    grads = torch.autograd.grad((want * loss_weight).sum(), leaves)

    def rank(t):
        local, w, b = (tensor.clone().requires_grad_() for tensor in (plan.shard(x, t), weight, bias))
        out = causal_conv1d(local, w, plan, t, bias=b if seed % 2 else None)
        (out * plan.shard(loss_weight, t)).sum().backward()
        return plan.gather(out.detach(), t), plan.gather(local.grad, t), w.grad, b.grad

    results = FakeWorld(plan.cp_size).run(rank)
    for out, grad, *_ in results:
        torch.testing.assert_close(out, (want if seed % 2 else want - leaves[2]).detach())
        torch.testing.assert_close(grad, grads[0])
    torch.testing.assert_close(sum(result[2] for result in results), grads[1])
    if seed % 2:
        torch.testing.assert_close(sum(result[3] for result in results), grads[2])


@pytest.mark.parametrize("cuts, calls, has_transition", [([0, 6], 1, False), ([0, 24], 1, True)])
def test_auto_moves_what_is_less(cuts: list[int], calls: int, has_transition: bool) -> None:
    """A state alone where each document crosses one border; summaries at once where it crosses many."""
    parts = [range(r, cuts[-1] // 3, 2) for r in range(2)]
    options = PlanOptions(cu_seqlens=tuple(cuts), plan_type=Plan)
    plan = plan_for_partitions(Mask.causal(cuts[-1]).slices, cuts[-1], 0, 3, parts, options)

    def rank(t):
        moved, send = [], t.all_to_all_v

        def count(output, input, *args, **options):
            moved.append(input.shape[1])
            return send(output, input, *args, **options)

        t.all_to_all_v = count
        number = len(plan.fragments().ranges[t.rank])
        pass_states(torch.zeros(number, 2, 3, 3), torch.zeros(number, 2, 3, 4), plan, t)
        return moved

    for moved in FakeWorld(2).run(rank):
        assert len(moved) == calls and (moved[0] == 2 * 3 * 3 + 2 * 3 * 4) == has_transition


def test_shapes_that_do_not_fit_are_refused() -> None:
    plan, state, decay = make_plan(Mask.causal(12), 1), torch.zeros(1, 2, 3, 4), torch.zeros(1, 2)
    for a, b, way, said in (
        (decay, state[:, 0], "auto", "give \\(F, H, K, V\\)"),
        (torch.zeros(2, 2), state, "auto", "transition has shape"),
        (decay.double(), state, "auto", "one floating-point dtype"),
        (decay, state, "ring", "way is 'ring'"),
    ):
        with pytest.raises(ContractError, match=said):
            pass_states(a, b, plan, way=way)
    with pytest.raises(ContractError, match="value has shape"):
        run_recurrent(lambda *_: None, torch.zeros(11, 2, 4), 3, plan)  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="one filter a channel"):
        causal_conv1d(torch.zeros(12, 3), torch.zeros(2, 4), plan)
    with pytest.raises(ContractError, match="width is 0"):
        conv_history(torch.zeros(12, 3), 0, plan)


def test_an_error_of_one_rank_reaches_the_others() -> None:
    plan = make_plan(Mask.causal(12), 2, DistAttnConfig(DispatchConfig(1)))

    def rank(t):
        count = len(plan.fragments().ranges[t.rank])
        state = torch.zeros(count + t.rank, 2, 3, 4)
        with pytest.raises(ContractError if t.rank else PeerFailureError, match="state has shape"):
            pass_states(torch.zeros(count, 2), state, plan, t)

    FakeWorld(2).run(rank)
