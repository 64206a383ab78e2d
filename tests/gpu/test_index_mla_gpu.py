# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels of index attention in MLA's form, where values are columns of the keys, against the reference in
float64."""

from __future__ import annotations

import pytest
import torch
from block_problems import BF16, DEVICE, FP16, NEEDS_HOPPER
from graph_capture import capture
from test_index_attn_gpu import assert_near, draw

from magi_attention.api import index_attn_func, prepare_indices
from magi_attention.integrations.gather_attention import gather_attn
from magi_attention.kernels.index_attn import choose
from magi_attention.kernels.index_attn.types import IndexProblem
from magi_attention.kernels.types import options_of

pytestmark = NEEDS_HOPPER
# tokens, keys, query heads, kv heads, head dims, entries
CASES = [
    (40, 500, 128, 1, 576, 512, 256),
    (33, 300, 64, 1, 576, 512, 200),
    (150, 3000, 128, 1, 576, 512, 2048),
    (50, 700, 16, 4, 320, 256, 130),
    (17, 900, 96, 1, 200, 200, 513),
    (300, 2000, 8, 1, 576, 512, 384),
    (30, 128, 24, 2, 136, 64, 1),
    (60, 700, 16, 2, 128, 96, 100),
]


def run(tensors: list[torch.Tensor], indices, **options) -> tuple[torch.Tensor, ...]:
    """out, lse, dq and dk; the values are as many columns of k as dout has."""
    q, k, _, dout = tensors
    q, k = (x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in (q, k))
    out, meta = index_attn_func(q, k, None, indices, head_dim_v=dout.shape[2], **options)
    out.backward(dout.to(out.dtype))
    return out.detach(), meta.lse, q.grad, k.grad


def reference(monkeypatch, tensors: list[torch.Tensor], indices, **options) -> tuple[torch.Tensor, ...]:
    with monkeypatch.context() as patch:
        patch.setenv("MAGI_ATTENTION_KERNEL_BACKEND", "sdpa")
        return run(tensors, indices, **options)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_directions(case, dtype, monkeypatch):
    seed = sum(case)
    print(f"seed {seed}")
    tensors, indices = draw(case, dtype, seed, strided=case[0] % 2 == 1)
    lists, options = prepare_indices(indices, case[1]), options_of(0.1, 0.0, "sh", False, 0)
    problem = IndexProblem.of_lists(*tensors[:2], None, options, lists, needs_backward=True, head_dim_v=case[5])
    assert choose(problem).name == "ffa"
    want = run([x.double() for x in tensors], indices)
    plain = reference(monkeypatch, tensors, indices)
    assert_near(run(tensors, indices), want, plain)
    again = [run(tensors, indices, deterministic=True) for _ in range(3)]
    assert_near(again[0], want, plain)
    for other in again[1:]:
        assert all(torch.equal(a, b) for a, b in zip(again[0], other))


def test_sinks_scale_margin_and_shared_lists(monkeypatch):
    """Lists of 4 queries, in blocks of keys that are seen up to a last one."""
    tensors, _ = draw((60, 700, 16, 2, 576, 512, 1), BF16, 7)
    gen = torch.Generator(DEVICE).manual_seed(7)
    indices = torch.randint(-2, 43, (15, 2, 20), generator=gen, device=DEVICE)
    end = torch.randint(100, 700, (15,), generator=gen, device=DEVICE)
    lists = prepare_indices(indices, 700, q_block_size=4, k_block_size=16, k_end=end)
    options = {"softmax_scale": 0.05, "sm_margin": 100}
    sink = torch.randn((2, 16), device=DEVICE)
    want = run([x.double() for x in tensors], lists, sink=sink.double(), **options)
    got = run(tensors, lists, sink=sink, **options)
    assert_near(got, want, reference(monkeypatch, tensors, lists, sink=sink, **options))


def test_keys_that_nobody_lists_are_not_read():
    case = CASES[0]
    tensors, indices = draw(case, BF16, 3)
    listed = torch.zeros(case[1], dtype=torch.bool, device=DEVICE)
    listed[indices[indices >= 0].long()] = True
    listed[::7] = False
    indices = torch.where(listed[indices.clamp_min(0).long()], indices, -1)
    clean = run(tensors, indices, deterministic=True)
    tensors[1][~listed] = float("nan")
    poisoned = run(tensors, indices, deterministic=True)
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned))
    assert not clean[3][~listed].any()


def test_large_logits_and_many_tokens(monkeypatch):
    tensors, indices = draw((1000, 3000, 128, 1, 576, 512, 512), BF16, 11)
    for size in (1.0, 8.0):
        scaled = [x * size for x in tensors[:2]] + tensors[2:]
        want = run([x.double() for x in scaled], indices)
        assert_near(run(scaled, indices), want, reference(monkeypatch, scaled, indices))


def test_the_same_bits_in_a_cuda_graph():
    tensors, indices = draw(CASES[1], BF16, 5)
    lists = prepare_indices(indices, CASES[1][1])
    problem = IndexProblem.of_lists(*tensors[:2], None, options_of(0.1, 0.0, "sh", False, 0), lists, head_dim_v=512)
    assert choose(problem).name == "ffa"

    def attend() -> torch.Tensor:
        return index_attn_func(*tensors[:2], None, lists, head_dim_v=512)[0]

    graph, want, out = capture(attend)
    out.zero_()
    graph.replay()
    assert torch.equal(out, want)


@pytest.mark.parametrize("is_packed", (False, True))
def test_gather_attn_of_attn_gym(is_packed):
    """DeepSeek V4's form: 512 columns that are their own values, a window, rows of a pool and a sink."""
    gen = torch.Generator(DEVICE).manual_seed(12)
    batch, tokens, pool = (1, 700, 170) if is_packed else (2, 300, 75)
    shapes = (batch, 64, tokens, 512), (batch, 1, tokens, 512), (batch, 1, pool, 512), (64,)
    tensors = [torch.randn(s, generator=gen, device=DEVICE).to(BF16) for s in shapes]
    tensors[3] = tensors[3].float()
    indices = torch.rand(batch, tokens, pool, generator=gen, device=DEVICE).argsort(-1)[..., :48]
    options = dict(sliding_window_size=128)
    if is_packed:
        for name, ends in (("cu_seqlens", [0, 401, 402, 700]), ("cu_seqlens_k", [0, 100, 100, 170])):
            options[name] = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    found = []
    for device, dtype in ((DEVICE, None), ("cpu", torch.float64)):
        leaves = [x.detach().to(device, dtype).requires_grad_() for x in tensors]
        masks = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
        out = gather_attn(*leaves[:3], indices.to(device), leaves[3], **masks)
        found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for got, want in zip(*found):
        assert (got.double().cpu() - want).abs().max() <= 0.02 * want.abs().max()
