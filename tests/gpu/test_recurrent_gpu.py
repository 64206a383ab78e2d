# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers on GPUs: ranks as threads of one GPU and as processes over NCCL, beside each document alone on the
CPU in float64; and flash-linear-attention's kernel where it is installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from magi_attention.api import DispatchConfig, DistAttnConfig, Mask, Plan, causal_conv1d, make_plan, run_recurrent
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.integrations.recurrent_kernels import fla_kernel
from magi_attention.meta.recurrent.ways import WAYS
from magi_attention.testing.spawn import run_processes

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "functional"))
from recurrences import LAYERS, Inputs, random_inputs, run  # noqa: E402

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="needs a GPU")]
CU = (0, 37, 38, 192)


def plan_of(world: int, cu_seqlens: tuple[int, ...] = CU) -> Plan:
    few = DistAttnConfig(DispatchConfig(max_fragments=4))
    return make_plan(Mask.varlen(cu_seqlens, causal=True), world, few)


def alone(layer: str, seed: int) -> list[torch.Tensor]:
    """Out, gradients of inputs, of a convolution's filters, in float64 on the CPU."""
    x = Inputs(*(tensor.requires_grad_() for tensor in random_inputs(layer, CU[-1], seed, heads=4)))
    filters = torch.linspace(-1, 1, 64, dtype=torch.float64).view(16, 4).requires_grad_()
    out, _ = run(layer, x._replace(v=convolved(x.v, filters, CU)), x.v.new_zeros(3, 4, 3, 4), list(CU))
    grads = torch.autograd.grad(out.square().sum(), [*x, filters], allow_unused=True)
    return [out.detach(), *(torch.zeros_like(t) if g is None else g for t, g in zip([*x, filters], grads))]


def convolved(v: torch.Tensor, filters: torch.Tensor, cu_seqlens: tuple[int, ...]) -> torch.Tensor:
    parts = [v[a:b].flatten(1).T[None] for a, b in zip(cu_seqlens, cu_seqlens[1:])]
    done = [F.conv1d(F.pad(part, (3, 0)), filters[:, None], groups=16)[0].T for part in parts]
    return torch.cat(done).view_as(v)


def of_rank(transport, world: int, layer: str, way: str, x: Inputs, device: str = "cuda") -> list[torch.Tensor]:
    """The same over ranks in float32, copied to the CPU: after an evaluation with the same plan, twice, with equal
    bits. Ranks wait for each other in their backwards, which one thread would make for all of them."""
    with torch.autograd.set_multithreading_enabled(False):
        return results_of_rank(transport, world, layer, way, x, device)


def results_of_rank(transport, world: int, layer: str, way: str, x: Inputs, device: str) -> list[torch.Tensor]:
    plan = plan_of(world)
    filters = torch.linspace(-1, 1, 64).view(16, 4).to(device).requires_grad_()
    local = Inputs(*(plan.shard(tensor.float().to(device), transport) for tensor in x))

    def kernel(value, initial_state, cu_seqlens, q, k, log_decay, beta):
        return run(layer, Inputs(q, k, value, log_decay, beta), initial_state, cu_seqlens.tolist())

    def call(x: Inputs) -> torch.Tensor:
        v = causal_conv1d(x.v.flatten(1), filters, plan, transport).view_as(x.v)
        decay = {"log_decay": x.log_decay} if layer in ("mamba2", "gla") else {}
        inputs = (x.q, x.k, x.log_decay, x.beta)
        return run_recurrent(kernel, v, 3, plan, transport, inputs=inputs, way=way, **decay)

    with torch.inference_mode():
        evaluated = call(local)
    results = []
    for _ in range(2):
        leaves = Inputs(*(tensor.clone().requires_grad_() for tensor in local))
        out = call(leaves)
        grads = torch.autograd.grad(out.square().sum(), [*leaves, filters], allow_unused=True)
        zeros = (torch.zeros_like(t) if g is None else g for t, g in zip([*leaves, filters], grads))
        results.append([out.detach(), *zeros])
    assert torch.equal(evaluated, results[0][0]) and all(map(torch.equal, *results))
    *rows, of_filters = results[0]
    return [*(plan.gather(x, transport).cpu() for x in rows), of_filters.cpu()]


def check(ranks: list[list[torch.Tensor]], want: list[torch.Tensor]) -> None:
    filters = sum(found[-1].double() for found in ranks)
    for found in ranks:
        for got, exactly in zip([*found[:-1], filters], want, strict=True):
            assert (got.double() - exactly).abs().max() <= 2e-5 * max(float(exactly.abs().max()), 1.0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layer", LAYERS)
def test_ranks_as_threads(layer: str, way: str) -> None:
    x = random_inputs(layer, CU[-1], 3, heads=4)
    check(FakeWorld(4, timeout_s=120).run(of_rank, 4, layer, way, x), alone(layer, 3))


def over_nccl(rank: int, world: int, layer: str, device: str = "cuda") -> list[list[torch.Tensor]]:
    x = random_inputs(layer, CU[-1], 4, heads=4)
    return [of_rank(None, world, layer, way, x, device) for way in WAYS]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("layer", ["gated_delta", "mamba2"])
def test_ranks_over_nccl(layer: str, world: int) -> None:
    if world > GPUS:
        pytest.skip(f"needs {world} GPUs")
    found = run_processes(world, over_nccl, layer, timeout_s=240.0, backend="nccl")
    for number in range(len(WAYS)):
        check([of_ways[number] for of_ways in found], alone(layer, 4))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "chunk_kda"])
def test_kernels_of_fla(name: str, way: str) -> None:
    """Over four ranks beside one call with all documents, in bfloat16."""
    library = pytest.importorskip(
        {"chunk_kda": "fla.ops.kda"}.get(name, "fla.ops.gated_delta_rule"), reason="needs flash-linear-attention"
    )
    function, cu_seqlens = getattr(library, name), (0, 700, 701, 4096)
    plan = plan_of(4, cu_seqlens)
    draw = torch.Generator("cuda").manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(4096, 4, *shape, generator=draw, device="cuda")

    decay = -normal(*[128] * (name == "chunk_kda")).abs() / 8
    q, k = (F.normalize(normal(128), dim=-1).bfloat16() for _ in range(2))
    tensors = [q, k, decay, normal().sigmoid().bfloat16(), normal(128).bfloat16()]
    weight = normal(128).bfloat16()

    def with_gradients(leaves: list[torch.Tensor], out: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]

    whole = [x.clone().requires_grad_() for x in tensors]
    q, k, g, beta, v = (x[None] for x in whole)
    bounds = torch.tensor(cu_seqlens, device="cuda")
    want = with_gradients(whole, function(q, k, v, g, beta, cu_seqlens=bounds)[0][0], weight)

    def rank(t):
        with torch.autograd.set_multithreading_enabled(False):
            return results(t)

    def results(t):
        *inputs, v = local = [plan.shard(x, t).requires_grad_() for x in tensors]
        out = run_recurrent(fla_kernel(function), v, 128, plan, t, inputs=inputs, way=way)
        return [plan.gather(x, t) for x in with_gradients(local, out, plan.shard(weight, t))]

    for found in FakeWorld(4, timeout_s=120).run(rank):
        for got, wanted in zip(found, want, strict=True):
            assert (got.float() - wanted.float()).norm() <= 0.02 * wanted.float().norm()
