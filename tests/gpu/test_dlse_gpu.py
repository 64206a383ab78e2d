# SPDX-License-Identifier: Apache-2.0
"""Losses of lse on a GPU, by every kernel that has a backward, against float64: flex_flash_attn_func on Hopper and on
portable kernels, index attention in all its forms, block-sparse attention, and ranks in stages and in one launch."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from places import places

from magi_attention.api import (
    DispatchConfig,
    DistAttnConfig,
    Mask,
    attend,
    block_sparse_attn_func,
    flex_flash_attn_func,
    index_attn_func,
    make_plan,
)
from magi_attention.common.slices import SliceTable, to_dense
from magi_attention.native.families import SM90, family_of
from magi_attention.testing.masks import random_slices
from magi_attention.testing.spawn import run_processes

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() in SM90.capabilities
NEEDS_HOPPER = pytest.mark.skipif(not IS_HOPPER, reason="The kernels of index attention run on Hopper GPUs.")
DTYPES = (torch.bfloat16, torch.float16)
NEG_INF = float("-inf")


def draw(seed: int, dtype: torch.dtype, tokens, keys, heads: tuple[int, int], dims: tuple[int, int]):
    """q, k, v, dout and dlse, which is as large as the products of dout and rows of v."""
    gen = torch.Generator(DEVICE).manual_seed(seed)
    sizes = (tokens, heads[0]), (keys, heads[1]), (keys, heads[1]), (tokens, heads[0])
    rows = [(*size, dims[i]) for size, i in zip(sizes, (0, 0, 1, 1))]
    x = [torch.randn(row, generator=gen, device=DEVICE).to(dtype) for row in rows]
    return x, dims[1] ** 0.5 * torch.randn(tokens, heads[0], generator=gen, device=DEVICE)


def truth(leaves, allowed, dout, dlse, scale, softcap=0.0, width=None):
    """Gradients in float64 of q, k, v (or columns of k) and sink; ``allowed`` (1 or Hq, Tq, Tk)."""
    leaves = [x.detach().double().requires_grad_() for x in leaves]
    q, k, *rest = leaves
    v = k[..., :width] if width is not None else rest.pop(0)
    group = q.shape[1] // k.shape[1]
    logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    mass = logits.exp() * allowed
    total = mass.sum(2) + (rest[0].exp().sum(0)[:, None] if rest else 0.0)
    is_empty = total == 0
    total = total.masked_fill(is_empty, 1.0)
    out = torch.einsum("hqk,khd->qhd", mass / total[..., None], v.repeat_interleave(group, 1))
    loss = (out * dout.double()).sum() + (total.log().masked_fill(is_empty, 0.0).t() * dlse.double()).sum()
    return torch.autograd.grad(loss, leaves), is_empty.t()


def assert_near(got, want, without) -> None:
    """Within what 16 bits explain, and far from the gradients of a loss without lse."""
    for number, (a, b) in enumerate(zip(got, want)):
        assert a.isfinite().all(), number
        off, size = (a.double() - b).norm().item(), b.norm().item()
        assert off <= 0.015 * size, f"gradient {number} is {off / size:.1e} of its norm off"
    assert (want[0] - without[0]).norm() > 0.3 * want[0].norm()


def check(call, leaves, allowed, dout, dlse, scale, **options) -> None:
    """Rows that see nothing have NaN in dout and infinity in dlse."""
    want, is_empty = truth(leaves, allowed, dout, dlse, scale, **options)
    without, _ = truth(leaves, allowed, dout, torch.zeros_like(dlse), scale, **options)
    given = [x.detach().requires_grad_() for x in leaves]
    out, meta = call(*given)
    assert torch.equal(meta.lse == NEG_INF, is_empty)
    poison = is_empty[..., None].expand_as(dout)
    grads = torch.autograd.grad(
        (out, meta.lse), given, (dout.masked_fill(poison, float("nan")), dlse.masked_fill(is_empty, float("inf")))
    )
    assert_near(grads, want, without)


@pytest.fixture(params=("hopper", "portable"))
def kernels(request, monkeypatch) -> str:
    is_portable = request.param == "portable"
    if not is_portable and not IS_HOPPER:
        pytest.skip("The GPU is not a Hopper GPU.")
    family = family_of(torch.cuda.get_device_capability(), portable=is_portable)
    if family is None:
        pytest.skip("There are no portable kernels for this GPU.")
    monkeypatch.setenv("MAGI_ATTENTION_PORTABLE_KERNELS", str(int(is_portable)))
    monkeypatch.setenv("MAGI_ATTENTION_KERNEL_BACKEND", "ffa")
    return request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("on_gpu", (False, True), ids=("host ranges", "device ranges"))
@pytest.mark.parametrize("kind", ("plain", "softcap and sink", "deterministic"))
def test_flex_flash_attn_func(kernels, kind, on_gpu, dtype) -> None:
    for seed in range(3):
        print(f"seed {seed}")
        rng, dims = np.random.default_rng(seed), ((64, 64), (128, 128), (72, 40))[seed]
        tokens, keys = (int(n) for n in rng.integers(150, 700, 2))
        slices = random_slices(rng, tokens, keys, max_slices=6)
        (*leaves, dout), dlse = draw(seed, dtype, tokens, keys, (4, 2), dims)
        if kind == "softcap and sink":
            leaves.append(torch.randn(2, 4, device=DEVICE))
        softcap = 5.0 if kind == "softcap and sink" else 0.0
        mask = [x.to(DEVICE if on_gpu else "cpu") for x in SliceTable(slices).tensors()]
        allowed = torch.from_numpy(to_dense(slices, tokens, keys)).to(DEVICE)[None]

        options = dict(softcap=softcap, deterministic=kind == "deterministic")

        def call(q, k, v, sink=None, mask=mask, options=options):
            return flex_flash_attn_func(q, k, v, *mask, sink=sink, **options)

        check(call, leaves, allowed, dout, dlse, dims[0] ** -0.5, softcap=softcap)


def lists_of(tokens: int, heads: int, keys: int, width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists (T, Hk, N), some empty, and the dense mask (Hk, T, keys)."""
    gen = torch.Generator(DEVICE).manual_seed(seed)
    indices = torch.randint(0, keys, (tokens, heads, width), generator=gen, device=DEVICE, dtype=torch.int32)
    indices[torch.rand(tokens, generator=gen, device=DEVICE) < 0.1] = -1
    seen = torch.zeros((tokens, heads, keys + 1), dtype=torch.bool, device=DEVICE)
    seen.scatter_(2, torch.where(indices < 0, keys, indices).long(), True)
    return indices, seen[..., :keys].transpose(0, 1)


@NEEDS_HOPPER
@pytest.mark.parametrize("deterministic", (False, True), ids=("any order", "deterministic"))
@pytest.mark.parametrize("form", ("gqa", "mqa", "mla"))
def test_index_attention(form, deterministic, monkeypatch) -> None:
    monkeypatch.setenv("MAGI_ATTENTION_KERNEL_BACKEND", "ffa")
    heads, dims = {"gqa": ((8, 2), (128, 128)), "mqa": ((64, 1), (64, 64)), "mla": ((64, 1), (576, 512))}[form]
    (q, k, v, dout), dlse = draw(7, torch.bfloat16, 60, 500, heads, dims)
    indices, seen = lists_of(60, heads[1], 500, 200, 7)
    width = 512 if form == "mla" else None
    leaves = [q, k] if form == "mla" else [q, k, v]
    sink = torch.randn(2, heads[0], device=DEVICE) if form == "gqa" else None
    if sink is not None:
        leaves.append(sink)

    def call(q, k, v=None, sink=None):
        return index_attn_func(q, k, v, indices, head_dim_v=width, sink=sink, deterministic=deterministic)

    allowed = seen.repeat_interleave(heads[0] // heads[1], 0)
    check(call, leaves, allowed, dout, dlse, dims[0] ** -0.5, width=width)


@NEEDS_HOPPER
@pytest.mark.parametrize("keeps", ("queries", "keys"))
def test_block_sparse_attention(keeps, monkeypatch) -> None:
    """Both backwards of lists of blocks."""
    monkeypatch.setenv("MAGI_ATTENTION_INDEX_BACKWARD", keeps)
    (*leaves, dout), dlse = draw(9, torch.bfloat16, 500, 640, (8, 2), (128, 128))
    gen = torch.Generator(DEVICE).manual_seed(9)
    blocks = torch.rand((2, 4, 5), generator=gen, device=DEVICE) < 0.5
    blocks[:, 1], blocks[:, :, 4], blocks[:, 0, 0] = False, False, True
    allowed = blocks.repeat_interleave(128, 1)[:, :500].repeat_interleave(128, 2).repeat_interleave(4, 0)
    call = lambda q, k, v: block_sparse_attn_func(q, k, v, blocks, 128)  # noqa: E731
    check(call, leaves, allowed, dout, dlse, 128**-0.5)


def of_ranks(rank: int, world: int, fused: bool, has_sink: bool, moves: str) -> list[float]:
    """How far q's, k's, v's and the sink's gradients are off on this rank, as shares of their norms."""
    os.environ["MAGI_ATTENTION_NATIVE_GRPCOLL"] = str(int(fused))
    total, heads, dims = 900, (8, 2), (128, 128)
    mask = Mask.varlen([0, 130, 600, total], causal=True)
    config = DistAttnConfig(DispatchConfig(chunk_size=32))
    shape = dict(num_heads_q=heads[0], num_heads_kv=heads[1], head_dim=dims[0])
    plan = make_plan(mask, world, config, query_moves=moves, **shape)
    (*tensors, dout), dlse = draw(3, torch.bfloat16, total, total, heads, dims)
    sink = torch.randn(2, heads[0], device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(4))
    leaves = [*tensors, *([sink] if has_sink else [])]
    want, _ = truth(leaves, torch.from_numpy(mask.to_dense()).to(DEVICE)[None], dout, dlse, dims[0] ** -0.5)
    own = [plan.shard(x).detach().requires_grad_() for x in tensors]
    own_sink = sink.clone().requires_grad_() if has_sink else None
    out, meta = attend(*own, plan, sink=own_sink)
    losses = (out, meta.lse), (plan.shard(dout), plan.shard(dlse))
    grads = torch.autograd.grad(losses[0], [*own, *([own_sink] if has_sink else [])], losses[1])
    whole = [plan.gather(x) for x in grads[:3]]
    if has_sink:
        dist.all_reduce(grads[3])
        whole.append(grads[3])
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(whole, want)]


MODES = {
    "one launch": (True, False, "never"),
    "one launch, sinks": (True, True, "never"),
    "stages, sinks": (False, True, "never"),
    "queries move": (False, False, "always"),
}


@pytest.mark.parametrize("world, backend", places(2, 4))
@pytest.mark.parametrize("mode", MODES)
def test_over_ranks(mode, world, backend) -> None:
    fused, has_sink, moves = MODES[mode]
    if fused and not IS_HOPPER:
        pytest.skip("Attention in one launch needs Hopper GPUs.")
    for shares in run_processes(world, of_ranks, fused, has_sink, moves, timeout_s=120, backend=backend):
        assert max(shares) <= 0.015, shares
