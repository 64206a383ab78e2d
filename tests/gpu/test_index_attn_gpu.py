# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels of index attention, both directions, against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from block_problems import BF16, DEVICE, FP16, NEEDS_HOPPER
from graph_capture import capture

from magi_attention.api import block_sparse_attn_func, index_attn_func, prepare_indices
from magi_attention.kernels.index_attn import choose
from magi_attention.kernels.index_attn.types import IndexProblem
from magi_attention.kernels.types import options_of

pytestmark = NEEDS_HOPPER
# tokens, keys, query heads, kv heads, head dims, entries
CASES = [
    (40, 500, 128, 1, 128, 128, 256),
    (33, 300, 64, 1, 128, 128, 200),
    (50, 700, 16, 4, 128, 128, 130),
    (20, 64, 8, 8, 64, 64, 64),
    (17, 900, 96, 1, 64, 64, 513),
    (300, 2000, 128, 1, 96, 80, 384),
    (30, 128, 24, 2, 72, 128, 1),
    (700, 4096, 32, 4, 128, 128, 1024),
]


def draw(case: tuple[int, ...], dtype: torch.dtype, seed: int, strided: bool = False):
    """q, k, v, dout and lists with -1, duplicates, lists of no and of one key."""
    tokens, keys, heads_q, heads_kv, dim, dim_v, width = case
    gen = torch.Generator(DEVICE).manual_seed(seed)

    def rows(n: int, heads: int, d: int) -> torch.Tensor:
        whole = torch.randn((heads, n, d) if strided else (n, heads, d), generator=gen, device=DEVICE)
        return (whole.transpose(0, 1) if strided else whole).to(dtype)

    tensors = [rows(tokens, heads_q, dim), rows(keys, heads_kv, dim), rows(keys, heads_kv, dim_v)]
    tensors.append(rows(tokens, heads_q, dim_v))
    indices = torch.randint(0, keys, (tokens, heads_kv, width), generator=gen, device=DEVICE, dtype=torch.int32)
    length = torch.randint(0, width + 1, (tokens, heads_kv, 1), generator=gen, device=DEVICE)
    length[::3], length[1], length[2] = width, 0, 1
    place = torch.arange(width, device=DEVICE)
    return tensors, torch.where(place < length, indices, -1)


def run(tensors: list[torch.Tensor], indices: torch.Tensor, **options):
    q, k, v = (x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in tensors[:3])
    out, meta = index_attn_func(q, k, v, indices, **options)
    out.backward(tensors[3].to(out.dtype))
    return out.detach(), meta.lse, q.grad, k.grad, v.grad


def reference(monkeypatch, tensors: list[torch.Tensor], indices: torch.Tensor, **options):
    """``run`` by the reference in the dtype of the tensors."""
    with monkeypatch.context() as patch:
        patch.setenv("MAGI_ATTENTION_KERNEL_BACKEND", "sdpa")
        return run(tensors, indices, **options)


def assert_near(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], plain: tuple[torch.Tensor, ...]) -> None:
    """No further from the truth than twice what 16-bit steps of the reference are, and a little."""
    for name, x, truth, rough in zip(("out", "lse", "dq", "dk", "dv"), got, want, plain):
        assert torch.equal(torch.isfinite(x), torch.isfinite(truth)), name
        truth = torch.nan_to_num(truth, neginf=0.0)
        off, usual = ((torch.nan_to_num(y.double(), neginf=0.0) - truth).abs().max() for y in (x, rough))
        allowed = 2 * usual + 2e-3 * (1 + truth.abs().max())
        assert off <= allowed, f"{name} is off by {off}, allowed {allowed}"


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_directions(case, dtype, monkeypatch):
    seed = sum(case)
    print(f"seed {seed}")
    tensors, indices = draw(case, dtype, seed, strided=case[0] % 2 == 1)
    problem = IndexProblem.of_lists(
        *tensors[:3], options_of(0.1, 0.0, "sh", False, 0), prepare_indices(indices, case[1]), needs_backward=True
    )
    assert choose(problem).name == "ffa"
    want = run([x.double() for x in tensors], indices)
    got = run(tensors, indices)
    again = [run(tensors, indices, deterministic=True) for _ in range(3)]
    plain = reference(monkeypatch, tensors, indices)
    assert_near(got, want, plain)
    assert_near(again[0], want, plain)
    for other in again[1:]:
        assert all(torch.equal(a, b) for a, b in zip(again[0], other))


@pytest.mark.parametrize("sink_layout", ["sh", "ssh"])
def test_sinks_scale_and_margin(sink_layout, monkeypatch):
    case = CASES[2]
    tensors, indices = draw(case, BF16, 7)
    shape = (2, case[2]) if sink_layout == "sh" else (case[0], 2, case[2])
    sink = torch.randn(shape, device=DEVICE)
    options = {"sink_layout": sink_layout, "softmax_scale": 0.3}
    want = run([x.double() for x in tensors], indices, sink=sink.double(), **options)
    got = run(tensors, indices, sink=sink, sm_margin=100, **options)
    assert_near(got, want, reference(monkeypatch, tensors, indices, sink=sink, **options))


@pytest.mark.parametrize("heads", [(4, 4), (16, 2), (6, 2)], ids=str)
@pytest.mark.parametrize("sizes", [(128, 128), (64, 64), (16, 64), (256, 32), (4, 16)], ids=str)
def test_block_masks(heads, sizes, monkeypatch):
    """Every kv head has its own mask, and the last blocks are shorter; heads that do not divide 64 run as slices."""
    tokens, keys = 900, 1100
    seed = sum(heads) + sum(sizes)
    print(f"seed {seed}")
    tensors, _ = draw((tokens, keys, *heads, 128, 128, 4), BF16, seed)
    gen = torch.Generator(DEVICE).manual_seed(seed)
    shape = (heads[1], -(-tokens // sizes[0]), -(-keys // sizes[1]))
    blocks = torch.rand(shape, generator=gen, device=DEVICE) < 0.3
    blocks[0, 0], blocks[-1, :, 1] = False, False

    def attend(tensors: list[torch.Tensor]):
        q, k, v = (x.detach().clone().requires_grad_() for x in tensors[:3])
        out, meta = block_sparse_attn_func(q, k, v, blocks, *sizes)
        out.backward(tensors[3].to(out.dtype))
        return out.detach(), meta.lse, q.grad, k.grad, v.grad

    got, want = attend(tensors), attend([x.double() for x in tensors])
    with monkeypatch.context() as patch:
        patch.setenv("MAGI_ATTENTION_KERNEL_BACKEND", "sdpa")
        plain = attend(tensors)
    assert_near(got, want, plain)


@pytest.mark.parametrize("block", [1, 16, 100])
def test_lists_within_bounds(block, monkeypatch):
    """Blocks of keys counted from a first key, and seen up to a last one, as MSA has them."""
    tokens, keys, heads_q, heads_kv = 60, 2000, 16, 2
    tensors, _ = draw((tokens, keys, heads_q, heads_kv, 128, 128, 1), BF16, block)
    gen = torch.Generator(DEVICE).manual_seed(block)
    start = torch.randint(0, 900, (tokens,), generator=gen, device=DEVICE)
    end = start + torch.randint(0, 1000, (tokens,), generator=gen, device=DEVICE)
    indices = torch.randint(-2, 1000 // block, (tokens, heads_kv, 12), generator=gen, device=DEVICE)
    lists = prepare_indices(indices, keys, k_block_size=block, k_start=start, k_end=end)
    want = run([x.double() for x in tensors], lists)
    plain = reference(monkeypatch, tensors, lists)
    for deterministic in (False, True):
        assert_near(run(tensors, lists, deterministic=deterministic), want, plain)


def test_keys_that_nobody_lists_are_not_read():
    tensors, indices = draw(CASES[0], BF16, 3)
    listed = torch.zeros(CASES[0][1], dtype=torch.bool, device=DEVICE)
    listed[indices[indices >= 0].long()] = True
    listed[::7] = False
    indices = torch.where(listed[indices.clamp_min(0).long()], indices, -1)
    clean = run(tensors, indices, deterministic=True)
    for x in tensors[1:3]:
        x[~listed] = float("nan")
    poisoned = run(tensors, indices, deterministic=True)
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned))
    assert not clean[3][~listed].any() and not clean[4][~listed].any()


def test_large_logits_and_many_tokens(monkeypatch):
    case = (2000, 3000, 128, 1, 128, 128, 512)
    tensors, indices = draw(case, BF16, 11)
    for size in (1.0, 8.0):
        scaled = [x * size for x in tensors[:2]] + tensors[2:]
        want = run([x.double() for x in scaled], indices)
        assert_near(run(scaled, indices), want, reference(monkeypatch, scaled, indices))


def test_in_a_cuda_graph_and_on_another_stream():
    tensors, indices = draw(CASES[1], BF16, 5)
    lists = prepare_indices(indices, CASES[1][1])
    want = index_attn_func(*tensors[:3], lists)[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            index_attn_func(*tensors[:3], lists)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = index_attn_func(*tensors[:3], lists)[0]
        out.zero_()
        graph.replay()
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(out, want)


@pytest.mark.parametrize("is_inverted", [True, False], ids=["inverted before", "inverted by each backward"])
def test_deterministic_gradients_in_a_cuda_graph(is_inverted):
    tensors, indices = draw(CASES[1], BF16, 6)
    lists = prepare_indices(indices, CASES[1][1], deterministic=is_inverted)

    def step() -> tuple[torch.Tensor, ...]:
        return run(tensors, lists, deterministic=True)

    want = step()
    graph, before, written = capture(step)
    with torch.no_grad():
        for x in written:
            x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    for got in (before, written):
        assert all(torch.equal(*pair) for pair in zip(got, want))
