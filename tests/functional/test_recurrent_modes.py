# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers as users run them: some inputs want gradients, evaluation, autocast, bfloat16, compiled kernels,
recomputed layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from recurrences import LAYERS, Inputs, random_inputs, run
from torch.utils.checkpoint import checkpoint

from magi_attention.api import Mask, Plan, causal_conv1d, conv_history, pass_states, run_recurrent
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.errors import ContractError, PeerFailureError
from magi_attention.meta.planner import PlanOptions, plan_for_partitions
from magi_attention.testing.random_plans import random_plan
from magi_attention.testing.spawn import run_processes

CU, IN_TURNS = (0, 5, 6, 24), [range(0, 8, 2), range(1, 8, 2)]
CONSECUTIVE = [range(0, 3), range(3, 6), range(6, 8)]  # the second gives a state that it got, the third gives none


def plan_of(parts: list[range], cu_seqlens: tuple[int, ...] = CU) -> Plan:
    """Chunks of three tokens."""
    options = PlanOptions(cu_seqlens=cu_seqlens, plan_type=Plan)
    plan = plan_for_partitions(Mask.varlen(list(cu_seqlens), causal=True).slices, 24, 0, 3, parts, options)
    assert isinstance(plan, Plan)
    return plan


def kernel_of(layer: str):
    def kernel(value, initial_state, cu_seqlens, q, k, log_decay, beta):
        return run(layer, Inputs(q, k, value, log_decay, beta), initial_state, cu_seqlens.tolist())

    return kernel


def run_by(layer: str, x: Inputs, plan: Plan, transport, kernel=None, **options) -> torch.Tensor:
    options = {"state_dtype": torch.float64, **options}
    inputs = (x.q, x.k, x.log_decay, x.beta)
    return run_recurrent(kernel or kernel_of(layer), x.v, x.q.shape[2], plan, transport, inputs=inputs, **options)


def alone(layer: str, x: Inputs, plan: Plan) -> torch.Tensor:
    cu = list(plan.cu_seqlens)
    return run(layer, x, x.v.new_zeros(len(cu) - 1, x.q.shape[1], x.q.shape[2], x.v.shape[2]), cu)[0]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("way", ["states", "contiguous"])
@pytest.mark.parametrize("seed", range(6))
def test_any_inputs_may_want_gradients(layer: str, way: str, seed: int) -> None:
    """Queries alone, too: no state depends on them, so that only ranks without one to give have a graph before it."""
    print("seed", seed)
    rng = np.random.default_rng(700 + seed)
    plan = plan_of(CONSECUTIVE) if seed < 2 else random_plan(rng, most_tokens=40, most_ranks=4)
    names = ["q"] if seed % 2 == 0 else [n for n in Inputs._fields if rng.random() < 0.4] or ["v"]
    x = random_inputs(layer, plan.total_tokens, seed)
    weight = torch.randn(plan.total_tokens, 2, 4, dtype=torch.float64)

    def leaves(tensors) -> Inputs:
        return Inputs(*(t.clone().requires_grad_(n in names) for n, t in zip(Inputs._fields, tensors)))

    def gradients(given: Inputs, out: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        if out.requires_grad:  # a layer without a delta rule does not look at beta
            (out * weight).sum().backward()
        found = [getattr(given, name) for name in names]
        return [torch.zeros_like(t) if t.grad is None else t.grad for t in found]

    whole = leaves(x)
    want = gradients(whole, alone(layer, whole, plan), weight)

    def rank(t):
        local = leaves(plan.shard(tensor, t) for tensor in x)
        decay = {"log_decay": local.log_decay} if layer in ("mamba2", "gla") and seed % 3 else {}
        found = gradients(local, run_by(layer, local, plan, t, way=way, **decay), plan.shard(weight, t))
        return [plan.gather(grad, t) for grad in found]

    for found in FakeWorld(plan.cp_size).run(rank):
        torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("way", ["states", "contiguous", "heads"])
def test_training_after_an_evaluation(way: str) -> None:
    """What the plan keeps from a call in ``inference_mode`` serves a call with gradients."""
    plan, x = plan_of(IN_TURNS), random_inputs("gated_delta", 24, 0)
    filters = torch.randn(3, 4, dtype=torch.float64)

    def rank(t):
        def all_calls(given: Inputs, filters: torch.Tensor) -> list[torch.Tensor]:
            flat, table = given.v.flatten(1)[:, :3], filters.repeat(8, 1)
            states = given.v[: len(plan.fragments().ranges[t.rank]), :, :3, None].mT
            out = run_by("gated_delta", given, plan, t, way=way)
            return [
                out, causal_conv1d(flat, filters, plan, t), conv_history(flat, 3, plan, t),
                pass_states(states[:, :, 0, 0], states.mT, plan, t), plan.to_contiguous(flat, t),
                F.embedding(plan.positions(t), table),
            ]  # fmt: skip

        local = Inputs(*(plan.shard(tensor, t) for tensor in x))
        with torch.inference_mode():
            evaluated = all_calls(local, filters)
        with torch.no_grad():
            again = all_calls(local, filters)
        leaves = Inputs(*(tensor.requires_grad_() for tensor in local))
        trained = all_calls(leaves, filters.clone().requires_grad_())
        sum(found.sum() for found in trained).backward()
        assert not any(found.requires_grad for found in (*evaluated, *again))
        for found in zip(evaluated, again, trained):
            assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
        return leaves.v.grad.abs().sum() > 0

    assert all(FakeWorld(2).run(rank))


@pytest.mark.parametrize("kind", [1, 2, 3])
@pytest.mark.parametrize("way", ["gather", "chain"])
def test_autocast_rounds_no_state(kind: int, way: str) -> None:
    plan = plan_of(IN_TURNS)

    def rank(t):
        torch.manual_seed(t.rank)
        count = len(plan.fragments().ranges[t.rank])
        transition, state = torch.randn(count, *(2, 3, 3)[:kind]), torch.randn(count, 2, 3, 4)

        def both() -> list[torch.Tensor]:
            leaves = [x.clone().requires_grad_() for x in (transition, state)]
            came = pass_states(*leaves, plan, t, way=way)
            came.pow(2).sum().backward()
            return [came.detach(), *(x.grad for x in leaves)]

        want = both()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = both()
        assert want[0].abs().sum() > 0
        return all(map(torch.equal, found, want))

    assert all(FakeWorld(2).run(rank))


@pytest.mark.parametrize("way", ["states", "contiguous", "heads"])
def test_bfloat16_inputs_have_float32_states(way: str) -> None:
    """Beside float64 of the same inputs: what is left is the rounding of the output, and of gradients."""
    plan, dtype = plan_of(IN_TURNS), torch.bfloat16
    x = Inputs(*(tensor.to(dtype) for tensor in random_inputs("gated_delta", 24, 1)))
    exact = Inputs(*(tensor.double().requires_grad_() for tensor in x))
    out = alone("gated_delta", exact, plan)
    want = [out.detach(), *torch.autograd.grad(out.sum(), exact)]

    def kernel(value, initial_state, cu_seqlens, q, k, log_decay, beta):
        assert initial_state.dtype == torch.float32 and value.dtype == dtype
        given = Inputs(*(tensor.float() for tensor in (q, k, value, log_decay, beta)))
        out, final = run("gated_delta", given, initial_state, cu_seqlens.tolist())
        return out.to(dtype), final

    def rank(t):
        local = Inputs(*(plan.shard(tensor, t).requires_grad_() for tensor in x))
        out = run_by("gated_delta", local, plan, t, kernel, way=way, state_dtype=torch.float32)
        out.sum().backward()
        assert {out.dtype, *(tensor.grad.dtype for tensor in local)} == {dtype}
        return [plan.gather(tensor, t) for tensor in (out.detach(), *(tensor.grad for tensor in local))]

    for found in FakeWorld(2).run(rank):
        for got, exactly in zip(found, want):
            # a token's gradient may be the sum of two rounded parts, one by the states
            assert (got.double() - exactly).abs().max() <= 2**-7 * exactly.abs().max()


@pytest.mark.parametrize("has_decay", [False, True])
def test_states_of_another_dtype_are_refused_on_all_ranks(has_decay: bool) -> None:
    plan = plan_of(CONSECUTIVE)

    def rank(t):
        x = torch.zeros(plan.shard_sizes[t.rank], 2, 3)
        decay = {"log_decay": x[..., 0]} if has_decay else {}
        with pytest.raises((ContractError, PeerFailureError), match=r"final state is torch\.bfloat16"):
            run_recurrent(lambda v, s, *_: (v, s.bfloat16()), x, 3, plan, t, inputs=(x,), way="states", **decay)
        return True

    assert all(FakeWorld(3).run(rank))


def in_processes(rank: int, world: int) -> list[list[torch.Tensor]]:
    """Out and gradients of a compiled kernel, of a compiled function around the layer, and of a recomputed layer."""
    plan, x = plan_of(IN_TURNS), random_inputs("gated_delta", 24, 2)
    compiled = torch.compile(kernel_of("gated_delta"), backend="aot_eager")

    def layer(*tensors: torch.Tensor) -> torch.Tensor:
        return 2 * run_by("gated_delta", Inputs(*tensors), plan, None, way="states")

    calls = (
        lambda *tensors: 2 * run_by("gated_delta", Inputs(*tensors), plan, None, compiled, way="states"),
        torch.compile(layer, backend="aot_eager"),
        lambda *tensors: checkpoint(layer, *tensors, use_reentrant=False),
    )
    found = []
    for call in calls:
        local = [plan.shard(tensor).requires_grad_() for tensor in x]
        out = call(*local)
        out.sum().backward()
        found.append([plan.gather(tensor) for tensor in (out.detach(), *(tensor.grad for tensor in local))])
    return found


def test_compiled_and_recomputed() -> None:
    plan, x = plan_of(IN_TURNS), random_inputs("gated_delta", 24, 2)
    leaves = Inputs(*(tensor.requires_grad_() for tensor in x))
    out = 2 * alone("gated_delta", leaves, plan)
    want = [out.detach(), *torch.autograd.grad(out.sum(), leaves)]
    for found in run_processes(2, in_processes):
        for got in found:
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)
