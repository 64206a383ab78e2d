# SPDX-License-Identifier: Apache-2.0
"""Libraries' kernels over fragments: float64, beside the library's own call with the documents of one device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from recurrent_stand_ins import chunk_gated_delta_rule, chunk_gla, chunk_rwkv7, mamba_chunk_scan_combined

from magi_attention.api import run_recurrent
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.errors import ContractError
from magi_attention.integrations.recurrent_kernels import attn_gym_kernel, fla_kernel, run_mamba2
from magi_attention.meta.recurrent.tables import contiguous_fragments
from magi_attention.testing.random_plans import random_plan

HEADS, KEY, WIDTH = 2, 3, 4


def inputs(total: int, decay_dim: int, seed: int) -> list[torch.Tensor]:
    """q, k, decay, beta and v of all tokens."""
    torch.manual_seed(seed)
    q, k, v = (torch.randn(total, HEADS, n, dtype=torch.float64) for n in (KEY, KEY, WIDTH))
    decay = -torch.rand(total, HEADS, *[KEY] * decay_dim, dtype=torch.float64)
    return [q, k / k.norm(dim=-1, keepdim=True), decay, torch.rand(total, HEADS, dtype=torch.float64), v]


def with_gradients(function, tensors: list[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


def check_ranks(plan, function, tensors: list[torch.Tensor], want: list[torch.Tensor], weight, tolerance=1e-9) -> None:
    """``function(transport, *tensors)`` of each rank, and gradients, gathered."""

    def of_rank(transport):
        local = [plan.shard(x, transport) for x in tensors]
        found = with_gradients(lambda *x: function(transport, *x), local, plan.shard(weight, transport))
        return [plan.gather(x, transport) for x in found]

    for found in FakeWorld(plan.cp_size).run(of_rank):
        for got, wanted in zip(found, want, strict=True):
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["chunk_gdn", "chunk_kda"])
@pytest.mark.parametrize("seed", range(3))
def test_attn_gym_gives_what_it_gives_on_one_device(name: str, seed: int) -> None:
    linear = pytest.importorskip("attn_gym.linear", reason="needs attn-gym; ci/integrations installs it")
    print("seed", seed)
    chunked = getattr(linear, name)
    plan = random_plan(np.random.default_rng(seed), most_tokens=40, most_ranks=4)
    dtype, tolerance = (torch.float32, 1e-4) if name == "chunk_kda" else (torch.float64, 1e-9)  # what they take
    tensors = [x.to(dtype) for x in inputs(plan.total_tokens, int(name == "chunk_kda"), seed)]
    weight = torch.randn(plan.total_tokens, HEADS, WIDTH, dtype=dtype)
    cu_seqlens = torch.tensor(plan.cu_seqlens, dtype=torch.int32)

    def whole(q, k, gate, beta, v):
        x = (t[None] for t in (q, k, v, gate, beta))
        return chunked(*x, cu_seqlens=cu_seqlens, scale=0.7, impl="reference")[0][0]

    def by_plan(transport, q, k, gate, beta, v):
        kernel = attn_gym_kernel(chunked, scale=0.7, impl="reference")
        return run_recurrent(kernel, v, KEY, plan, transport, inputs=(q, k, gate, beta), state_dtype=dtype)

    check_ranks(plan, by_plan, tensors, with_gradients(whole, tensors, weight), weight, tolerance)


@pytest.mark.parametrize("seed", range(20))
def test_attn_gym_routes_our_fragments_as_we_do(seed: int) -> None:
    parallel = pytest.importorskip("attn_gym.linear.context_parallel", reason="needs attn-gym")
    print("seed", seed)
    plan = random_plan(np.random.default_rng(seed), most_tokens=80, most_ranks=6)
    found = plan.fragments()
    documents = found.cu_seqlens.tolist() + [plan.total_tokens + plan.pad_size] * bool(plan.pad_size)
    ranges = [[tuple(row) for row in of_rank.tolist()] for of_rank in found.ranges]
    passes = {(giver, a, taker, b) for giver, a, taker, b in found.passes.tolist()}
    theirs = set()
    for rank in range(plan.cp_size):
        routed = parallel.ContextParallelPlan.from_fragments(documents, ranges, rank)
        assert list(routed.cu_seqlens) == found.segments(rank).tolist()
        theirs |= {(*givers[-1], rank, number) for number, givers in enumerate(routed.predecessors) if givers}
    # a pad is one more document there
    end = found.cu_seqlens[-1]
    assert passes == {p for p in theirs if ranges[p[2]][p[3]][0] < end}


@pytest.mark.parametrize("seed", range(6))
def test_arguments_and_states_of_fla(seed: int) -> None:
    print("seed", seed)
    plan = random_plan(np.random.default_rng(seed), most_tokens=40, most_ranks=4)
    tensors = inputs(plan.total_tokens, 0, seed)
    weight = torch.randn(plan.total_tokens, HEADS, WIDTH, dtype=torch.float64)
    cu_seqlens = torch.tensor(plan.cu_seqlens)

    def whole(q, k, g, beta, v):
        zero = v.new_zeros(len(cu_seqlens) - 1, HEADS, KEY, WIDTH)
        x = (t[None] for t in (q, k, v, g, beta))
        packed = {"initial_state": zero, "output_final_state": True, "cu_seqlens": cu_seqlens}
        return chunk_gated_delta_rule(*x, scale=0.7, **packed)[0][0]

    def by_plan(transport, q, k, g, beta, v):
        kernel = fla_kernel(chunk_gated_delta_rule, scale=0.7)
        return run_recurrent(kernel, v, KEY, plan, transport, inputs=(q, k, g, beta), state_dtype=torch.float64)

    check_ranks(plan, by_plan, tensors, with_gradients(whole, tensors, weight), weight)


@pytest.mark.parametrize("name", ["chunk_rwkv7", "chunk_gla"])
@pytest.mark.parametrize("seed", range(4))
def test_other_functions_of_fla_by_their_names(name: str, seed: int) -> None:
    print("seed", seed)
    plan = random_plan(np.random.default_rng(800 + seed), most_tokens=40, most_ranks=4)
    function, names = {"chunk_rwkv7": (chunk_rwkv7, "rwkab"), "chunk_gla": (chunk_gla, "qkg")}[name]
    q, k, decay, _, v = inputs(plan.total_tokens, 1, seed)
    known = {"q": q, "r": q, "k": k, "g": decay, "w": decay, "a": -k, "b": k * torch.rand_like(k)}
    tensors = [*(known[letter] for letter in names), v]
    weight = torch.randn(plan.total_tokens, HEADS, WIDTH, dtype=torch.float64)
    cu_seqlens = torch.tensor(plan.cu_seqlens)

    def whole(*tensors):
        named = {letter: x[None] for letter, x in zip((*names, "v"), tensors)}
        zero = tensors[-1].new_zeros(len(cu_seqlens) - 1, HEADS, KEY, WIDTH)
        return function(**named, initial_state=zero, cu_seqlens=cu_seqlens)[0][0]

    def by_plan(transport, *tensors):
        *given, v = tensors
        options = {"log_decay": given[2]} if name == "chunk_gla" else {}
        kernel = fla_kernel(function, tuple(names))
        return run_recurrent(kernel, v, KEY, plan, transport, inputs=given, state_dtype=torch.float64, **options)

    check_ranks(plan, by_plan, tensors, with_gradients(whole, tensors, weight), weight)
    with pytest.raises(ContractError, match="2 inputs came for"):
        fla_kernel(function, tuple(names))(v, v, cu_seqlens, q, k)


@pytest.mark.parametrize("way", ["states", "contiguous", "heads"])
@pytest.mark.parametrize("seed", range(8))
def test_mamba2_is_called_once_a_fragment(seed: int, way: str) -> None:
    print("seed", seed)
    plan = random_plan(np.random.default_rng(seed), most_tokens=40, most_ranks=4)
    total, heads = plan.total_tokens, 2 * plan.cp_size
    torch.manual_seed(seed)
    x, dt = torch.randn(total, heads, 3), torch.randn(total, heads)
    B, C = torch.randn(total, 2, 5), torch.randn(total, 2, 5)
    A, D, bias = -torch.rand(heads), torch.randn(heads), torch.randn(heads)
    weight = torch.randn(total, heads, 3)
    options = {"dt_bias": bias, "dt_softplus": True, "dt_limit": (0.1, 2.0)}
    document = np.searchsorted(plan.cu_seqlens, np.arange(total), side="right") - 1
    seq_idx = torch.from_numpy(document.astype(np.int32))[None]
    calls = []

    def whole(x, dt, B, C):
        zero = x.new_zeros(1, heads, 3, 5)
        parts = (t[None] for t in (x, dt))
        return mamba_chunk_scan_combined(
            *parts, A, B[None], C[None], 4, D=D, initial_states=zero, seq_idx=seq_idx, return_final_states=True,
            **options,
        )[0][0]  # fmt: skip

    def counted(*args, **kwargs):
        calls.append(1)
        return mamba_chunk_scan_combined(*args, **kwargs)

    def by_plan(transport, x, dt, B, C):
        return run_mamba2(counted, x, dt, A, B, C, 4, plan, transport, D=D, way=way, **options)

    tensors = [x, dt, B, C]
    check_ranks(plan, by_plan, tensors, with_gradients(whole, tensors, weight), weight, 2e-4)  # states are float32
    held = contiguous_fragments(plan) if way == "contiguous" else plan.fragments()
    fragments = plan.cp_size if way == "heads" else sum(map(len, held.ranges))
    assert len(calls) == fragments * (2 if way != "heads" and len(held.passes) else 1)


# A module of the library that transformers looks for, and the function that it takes from there.
LIBRARIES = {
    "fla/ops/gated_delta_rule.py": "chunk_gated_delta_rule",
    "fla/ops/kda.py": "chunk_gated_delta_rule as chunk_kda",
    "mamba_ssm/ops/triton/ssd_combined.py": "mamba_chunk_scan_combined",
}
COUNTED = """
import atexit, os, recurrent_stand_ins
atexit.register(lambda: open(os.environ["PACKED_CALLS"], "a").write(" ".join(recurrent_stand_ins.packed_calls)))
"""


@pytest.mark.nightly
def test_hybrid_models_call_libraries_with_all_documents_at_once(tmp_path) -> None:
    """The same test as with torch's functions, in a process that finds fla and mamba_ssm installed."""
    pytest.importorskip("transformers", reason="needs transformers; ci/integrations installs it")
    here = Path(__file__).parent
    for path, function in LIBRARIES.items():
        module = tmp_path / path
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(f"from recurrent_stand_ins import {function}\n")
        for folder in (*module.relative_to(tmp_path).parents,)[:-1]:
            (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "fla" / "__init__.py").write_text(COUNTED)
    calls = tmp_path / "calls"
    paths = [str(tmp_path), str(here), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(here / "test_hybrid_models.py"),
         "-k", "documents_alone and (Qwen3Next or KimiLinear or FalconH1)"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PACKED_CALLS": str(calls)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr
    assert set(calls.read_text().split()) == {"chunk_gated_delta_rule", "chunk_kda", "mamba_chunk_scan_combined"}
