# SPDX-License-Identifier: Apache-2.0
"""Top-k attention against a dense masked softmax in float64, with gradients; every published backend name."""

from __future__ import annotations

import pytest
import torch
from dense import assert_equal_gradients, dense_attention

from magi_attention.errors import ContractError
from magi_attention.kernels.index_attn import reference
from magi_attn_extensions import dsa_attn_func
from magi_attn_extensions.dsa_interface import BACKENDS

# (Tq, Tk, Hq, Hk, D, top-k); the last two are the published sizes
SIZES = [
    (7, 9, 4, 2, 8, 4), (5, 3, 3, 3, 5, 3), (1, 6, 4, 1, 16, 1), (128, 128, 8, 2, 64, 16), (256, 512, 16, 4, 128, 32),
]  # fmt: skip


def draw(sizes, seed, padded=True, dtype=torch.float64):
    """Leaves q, k, v and indices (Tq, Hk, top-k), distinct, some of them -1 and some rows nothing but -1."""
    tq, tk, hq, hk, dim, topk = sizes
    generator = torch.Generator().manual_seed(seed)
    shapes = (tq, hq, dim), (tk, hk, dim), (tk, hk, dim)
    leaves = [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]
    indices = torch.rand(tq, hk, tk, generator=generator).argsort(-1)[..., :topk].int()
    if padded:
        indices[torch.rand(indices.shape, generator=generator) < 0.2] = -1
        indices[torch.rand(tq, generator=generator) < 0.1] = -1
    return leaves, indices


def dense(leaves, indices, scale=None, block=1):
    q, k, v = (x.double() for x in leaves)
    number = torch.arange(k.shape[0]) // block
    allowed = (indices[..., None] == number).any(2).permute(1, 0, 2)  # (Hk, Tq, Tk)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    return dense_attention(q, k, v, allowed.repeat_interleave(q.shape[1] // k.shape[1], 0), scale)


@pytest.mark.parametrize("sizes, seed", [(s, i) for s in SIZES for i in range(4 if s[0] < 128 else 1)], ids=str)
def test_top_k_attention_is_dense_attention(sizes, seed, monkeypatch):
    """Also with so small a budget that a block has a few queries only."""
    if sizes[0] < 128:
        monkeypatch.setattr(reference, "BUDGET", 200)
    leaves, indices = draw(sizes, seed)
    scale = 0.7 if seed == 1 else None
    out, lse = dsa_attn_func(*leaves, indices.transpose(0, 1), scale)
    want, want_lse = dense(leaves, indices, scale)
    torch.testing.assert_close(lse, want_lse.detach())
    z_losses = (x[x.isfinite()].square().sum() for x in (lse, want_lse))
    for got, wanted in zip(*(torch.autograd.grad(x, leaves[:2], retain_graph=True) for x in z_losses)):
        torch.testing.assert_close(got, wanted)
    dout = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(seed))
    assert_equal_gradients(out, want, leaves, dout, "qkv")


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_are_names_of_one_implementation(backend):
    block = 4 if backend == "ffa_block_sparse" else 1
    leaves, indices = draw((6, 10, 4, 2, 8, 3 if block > 1 else 4), 5)
    indices = torch.where(indices < 0, indices, indices // block)  # 10 keys: the last block has two
    by_head = indices if BACKENDS[backend] else indices.transpose(0, 1)
    options = dict(backend=backend, sparse_k_block_size=block)
    want = dense(leaves, indices, block=block)
    for got in (
        dsa_attn_func(*leaves, by_head, **options),
        dsa_attn_func(*leaves, index_sparse_indices=indices, deterministic=True, **options),
    ):
        torch.testing.assert_close(got, want)


def test_a_key_listed_twice_counts_once():
    leaves, indices = draw(SIZES[0], 2)
    twice = torch.cat([indices, indices[..., :2], indices[..., 1:3]], dim=-1)
    torch.testing.assert_close(
        dsa_attn_func(*leaves, index_sparse_indices=twice), dsa_attn_func(*leaves, index_sparse_indices=indices)
    )


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_other_dtypes_and_the_same_bits_again(dtype):
    leaves, indices = draw(SIZES[3], 1, dtype=dtype)
    want, _ = dense(leaves, indices)
    runs = []
    for _ in range(2):
        out, lse = dsa_attn_func(*leaves, indices.transpose(0, 1))
        runs.append([out, lse, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    assert all(torch.equal(a, b) for a, b in zip(*runs))
    assert runs[0][0].dtype == dtype and runs[0][1].dtype == torch.float32
    tolerance = 32 * torch.finfo(dtype).eps
    torch.testing.assert_close(runs[0][0].double(), want, rtol=tolerance, atol=tolerance)


def test_what_does_not_fit_is_refused():
    leaves, indices = draw(SIZES[0], 0, padded=False)
    with pytest.raises(ContractError, match="backend='triton' is unknown; use one of flex"):
        dsa_attn_func(*leaves, indices.transpose(0, 1), backend="triton")
    with pytest.raises(ContractError, match="exactly one"):
        dsa_attn_func(*leaves, indices, index_sparse_indices=indices)
    with pytest.raises(ContractError, match=r"give integers \(7 queries, 2 kv heads, keys\)"):
        dsa_attn_func(*leaves, indices)
    with pytest.raises(ContractError, match="but k has only 9 rows"):
        dsa_attn_func(*leaves, index_sparse_indices=indices + 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("deterministic", (False, True), ids=("default", "deterministic"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_on_a_gpu_it_is_right_and_deterministic_repeats_its_bits(dtype, deterministic):
    leaves, indices = draw(SIZES[4], 7, dtype=dtype)
    want, _ = dense(leaves, indices)
    wanted = torch.autograd.grad(want, leaves, torch.ones_like(want))
    there = [x.detach().cuda().requires_grad_() for x in leaves]
    runs = []
    for _ in range(2):
        out, _ = dsa_attn_func(*there, index_sparse_indices=indices.cuda(), deterministic=deterministic)
        runs.append([out, *torch.autograd.grad(out, there, torch.ones_like(out))])
    assert not deterministic or all(torch.equal(a, b) for a, b in zip(*runs))
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for got, expected in zip(runs[0], (want, *wanted)):
        torch.testing.assert_close(got.cpu().double(), expected.double(), rtol=tolerance, atol=tolerance)
