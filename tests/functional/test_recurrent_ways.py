# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers by states, contiguous shards and heads: float64, beside each document alone, and bytes that move."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from recurrences import LAYERS, Inputs, run
from test_recurrent_bytes import received

from magi_attention.api import (
    DispatchConfig,
    DistAttnConfig,
    Mask,
    Plan,
    RecurrentShape,
    make_plan,
    run_recurrent,
)
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.errors import ContractError, PeerFailureError
from magi_attention.meta.planner import PlanOptions, plan_for_partitions
from magi_attention.meta.recurrent.ways import WAYS, WayCounts
from magi_attention.testing.random_plans import random_plan
from magi_attention.testing.spawn import run_processes

KEY, WIDTH = 3, 2


def draw(layer: str, total: int, heads: int, key_heads: int, seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v, log_decay, beta and a parameter of each head; and weights of the loss. Queries and keys have fewer
    heads than values."""
    torch.manual_seed(seed)
    q, k = torch.randn(2, total, key_heads, KEY, dtype=torch.float64)
    decay = -torch.rand(total, heads, *[KEY] * (layer in ("gla", "kda")), dtype=torch.float64)
    v, weight = torch.randn(2, total, heads, WIDTH, dtype=torch.float64)
    beta, scale = torch.rand(total, heads, dtype=torch.float64), torch.rand(heads, dtype=torch.float64) + 0.5
    return [q, k / k.norm(dim=-1, keepdim=True), v, decay, beta, scale], weight


def kernel_of(layer: str):
    def kernel(value, initial_state, cu_seqlens, q, k, log_decay, beta, scale):
        times = value.shape[1] // k.shape[1]
        q, k = (x.repeat_interleave(times, dim=1) for x in (q, k))
        x = Inputs(q * scale[:, None], k, value, log_decay, beta)
        return run(layer, x, initial_state, cu_seqlens.tolist())

    return kernel


def alone(layer: str, plan: Plan, tensors: list[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
    """Out and gradients of one device."""
    cu, leaves = list(plan.cu_seqlens), [x.clone().requires_grad_() for x in tensors]
    q, k, v, decay, beta, scale = leaves
    zero = v.new_zeros(len(cu) - 1, v.shape[1], KEY, WIDTH)
    out = kernel_of(layer)(v, zero, torch.tensor(cu), q, k, decay, beta, scale)[0]
    grads = torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads))]


def of_rank(
    layer: str, plan: Plan, tensors: list[torch.Tensor], weight: torch.Tensor, way: str, transport: Any, has_decay: bool
):
    """The same of one rank by ``way``: out and gradients of tokens gathered, and its gradient of the parameter.
    ``has_decay``: layers that only decay their states give ``log_decay``."""
    *tokens, scale = tensors
    leaves = [*(plan.shard(x, transport) for x in tokens), scale.clone()]
    q, k, v, decay, beta, scale = (x.requires_grad_() for x in leaves)
    out = run_recurrent(
        kernel_of(layer), v, KEY, plan, transport, inputs=(q, k, decay, beta), parameters=(scale,),
        log_decay=decay if has_decay and layer in ("mamba2", "gla") else None, state_dtype=torch.float64, way=way,
    )  # fmt: skip
    (out * plan.shard(weight, transport)).sum().backward()
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return [*(plan.gather(x.detach(), transport) for x in (out, *grads[:-1])), grads[-1]]


def check(results: list[list[torch.Tensor]], want: list[torch.Tensor]) -> None:
    for found in results:
        for got, wanted in zip(found[:-1], want[:-1], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(sum(found[-1] for found in results), want[-1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(9))
def test_each_way_equals_documents_alone(way: str, layer: str, seed: int) -> None:
    """Also where ranks hold pads alone, shards are of unequal length, and keys have too few heads to divide."""
    print("seed", seed)
    plan = random_plan(np.random.default_rng(420 + seed), most_tokens=40, most_ranks=4)
    heads = plan.cp_size * (1 + seed % 2) * 2
    tensors, weight = draw(layer, plan.total_tokens, heads, (1, 2, heads)[seed % 3], seed)
    want = alone(layer, plan, tensors, weight)
    check(FakeWorld(plan.cp_size).run(lambda t: of_rank(layer, plan, tensors, weight, way, t, seed % 4 > 0)), want)


def test_random_plans_have_what_is_tested() -> None:
    plans = [random_plan(np.random.default_rng(420 + seed), most_tokens=40, most_ranks=4) for seed in range(9)]
    carried = [[p.fragments().carries(r).any() for p in plans[i::4] for r in range(p.cp_size)] for i in (0, 2)]
    assert all(map(any, carried)), "where layers tell their decay, and where not"
    assert any(len(set(plan.shard_sizes)) > 1 for plan in plans)
    assert any(min(plan.position_array(r)[0] for r in range(plan.cp_size)) >= 0 and any(
        plan.position_array(r)[0] >= plan.total_tokens for r in range(plan.cp_size)) for plan in plans)  # fmt: skip


# ---- bytes ----------------------------------------------------------------------------------------------


# Tokens in chunks of one, by turns: 32 fragments of a document, whose states are large.
BY_TURNS = [range(0, 32, 2), range(1, 32, 2)]


def by_turns(cu_seqlens: list[int]) -> Plan:
    options = PlanOptions(cu_seqlens=tuple(cu_seqlens), plan_type=Plan)
    plan = plan_for_partitions(Mask.varlen(cu_seqlens, causal=True).slices, 32, 0, 1, BY_TURNS, options)
    assert isinstance(plan, Plan)
    return plan


@pytest.mark.parametrize(
    ("way", "heads", "cu_seqlens"),
    [("states", 2, list(range(33))), ("heads", 2, [0, 32]), ("contiguous", 1, [0, 16, 32])],
)
def test_auto_takes_the_cheapest(way: str, heads: int, cu_seqlens: list[int]) -> None:
    """No state passes; or 32 of them do; or heads do not divide, and states do not cross the border of shards."""
    plan, key = by_turns(cu_seqlens), 1024
    shape = RecurrentShape(heads, key, key, element_bytes=4)
    assert plan.explain(recurrent=shape)["recurrent"]["way"] == way
    found = received(plan, "auto", shape)
    assert found == received(plan, way, shape)
    assert (found[0]["exchanges"] == 0) == (way == "states")


@pytest.mark.parametrize("layer", LAYERS)
def test_longer_sequences_favour_states(layer: str) -> None:
    """States are of one size, tokens are not."""
    plan = make_plan(Mask.causal(131072), 8, DistAttnConfig(DispatchConfig(max_fragments=4)))
    ways = plan.explain(recurrent=RecurrentShape(32, 128, 128, layer))["recurrent"]
    assert ways["way"] == "states"
    assert ways["states"]["busiest_bytes"] < ways["heads"]["busiest_bytes"] < ways["contiguous"]["busiest_bytes"]


def test_a_layer_that_decays_its_state_sends_no_matrices() -> None:
    counts = WayCounts.of(by_turns([0, 32]))
    delta, mamba = (counts.own.gathered(*sizes) for sizes in ((64, 64), (64, 1)))
    assert delta.total * 65 == mamba.total * 128 and delta.exchanges == mamba.exchanges == 1


# ---- runs of the kernel ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", ["gated_delta", "mamba2"])
@pytest.mark.parametrize("seed", range(5))
def test_summaries_take_the_tokens_that_pass_states(layer: str, seed: int) -> None:
    """A delta rule runs once on all tokens, and beside that on the last document's part of fragments that give a state,
    and of those that carry one through. A decay needs no third run."""
    print("seed", seed)
    plan = random_plan(np.random.default_rng(600 + seed))
    fragments, has_decay = plan.fragments(), layer == "mamba2"

    def rank(t):
        seen, rows = [], plan.shard_sizes[t.rank]
        x = torch.zeros(rows, 2, 3)

        def kernel(value, initial, cu_seqlens, k):
            assert len(k) == len(value) == cu_seqlens[-1] and len(initial) == len(cu_seqlens) - 1
            seen.append(len(value))
            return value, initial

        decay = torch.zeros(rows, 2) if has_decay else None
        run_recurrent(kernel, x, 3, plan, t, inputs=(x,), log_decay=decay, way="states")
        if not len(fragments.passes) or has_decay:
            return seen == [rows] * (1 + len(fragments.passes[:1]))
        lengths = np.diff(fragments.segments(t.rank))[fragments.last_segments(t.rank)]
        want = [int(lengths[which(t.rank)].sum()) for which in (fragments.gives, fragments.carries)]
        return seen == [*filter(None, want), rows]

    assert all(FakeWorld(plan.cp_size).run(rank))


# ---- errors ---------------------------------------------------------------------------------------------


def test_what_cannot_go_a_way_is_refused() -> None:
    plan, x = by_turns([0, 32]), torch.zeros(16, 3, 4)

    def rank(t):
        def call(way: str, inputs, **options):
            return run_recurrent(lambda v, s, *_: (v.sum(1), s), x, 4, plan, t, inputs=inputs, way=way, **options)

        for way, inputs, options, said in (
            ("heads", (x,), {}, "The heads of values, 3, or of inputs do not divide by 2 ranks"),
            ("contiguous", (), {}, "give it as inputs="),
            ("rows", (x,), {}, "way is 'rows'"),
            ("states", (x[1:],), {}, "An input has shape"),
            ("states", (x,), {"log_decay": x[..., :2]}, "log_decay has shape"),
        ):
            with pytest.raises(ContractError, match=said):
                call(way, inputs, **options)
        with pytest.raises(ContractError, match="kernel's out has shape"):
            call("contiguous", (x,))
        return True

    assert plan.explain(recurrent=RecurrentShape(3, 4, 4))["recurrent"]["heads"] is None
    assert all(FakeWorld(2).run(rank))
    for shape in ({"layer": "lstm"}, {"key_heads": 0}, {"value_dim": -1}):
        with pytest.raises(ContractError, match="give"):
            RecurrentShape(**{"heads": 2, "key_dim": 4, "value_dim": 4, **shape})


def test_an_error_of_one_rank_reaches_the_others() -> None:
    plan = by_turns([0, 32])

    def rank(t):
        x = torch.zeros(16 + t.rank, 2, 4)
        with pytest.raises(ContractError if t.rank else PeerFailureError, match="value has shape"):
            run_recurrent(lambda v, s, *_: (v, s), x, 4, plan, t, inputs=(x,), way="heads")

    FakeWorld(2).run(rank)


# ---- processes ------------------------------------------------------------------------------------------


def in_processes(rank: int, world: int) -> list[list[torch.Tensor]]:
    plan = plan_of(world)
    return [of_rank(layer, plan, *draw(layer, 41, 12, 2, 7), way, None, True) for way in WAYS for layer in LAYERS]


def plan_of(world: int) -> Plan:
    """Unequal shards of chunks of three tokens, documents of one and of many."""
    config = DistAttnConfig(DispatchConfig(3, uneven_shard=True))
    return make_plan(Mask.varlen([0, 5, 6, 37, 41], causal=True), world, config)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_they_run_on_gloo(world: int) -> None:
    found = run_processes(world, in_processes)
    wanted = [alone(layer, plan_of(world), *draw(layer, 41, 12, 2, 7)) for layer in LAYERS]
    for number, want in enumerate(wanted * len(WAYS)):
        check([of_rank[number] for of_rank in found], want)
