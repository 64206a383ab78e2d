# SPDX-License-Identifier: Apache-2.0
"""The indexer's kernels on a Hopper GPU: the public function against scores in float64, and whole numbers exactly."""

from __future__ import annotations

import pytest
import torch
from block_problems import BF16, DEVICE, FP16, NEEDS_HOPPER
from graph_capture import capture

from magi_attention.api import index_attn_func, indexer_topk, indexer_topk_blocks
from magi_attention.kernels.indexer import Blocks, hopper
from magi_attention.kernels.indexer.topk import best_blocks, best_keys
from magi_attention.testing.indexer import assert_best, assert_best_blocks, random_bounds

pytestmark = NEEDS_HOPPER
CASES = [  # queries, keys, heads, columns, best keys
    (300, 5000, 64, 128, 2048),
    (1000, 1000, 64, 128, 100),
    (77, 9000, 32, 64, 4096),
    (513, 700, 5, 40, 64),
    (200, 3000, 48, 96, 1),
]
BLOCK_CASES = [  # the same, blocks in place of keys; whether heads have weights, keys of a block, local blocks
    (700, 9000, 4, 128, 16, False, 128, 1),
    (513, 5000, 8, 64, 40, False, 16, 0),
    (90, 4000, 40, 128, 9, False, 64, 3),
    (300, 5000, 64, 128, 32, True, 64, 2),
    (400, 3000, 5, 40, 500, True, 7, 0),
    (65, 70_000, 2, 128, 4096, False, 16, 1),
    (9, 1 << 20, 2, 64, 4096, False, 16, 1),
]


def draw(case: tuple, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, ...]:
    """q, k and weights, and bounds of all kinds; NaN in keys that nobody sees."""
    queries, keys, heads, dim = case[:4]
    gen = torch.Generator(DEVICE).manual_seed(seed)
    q, k = (torch.randn(s, generator=gen, device=DEVICE).to(dtype) for s in ((queries, heads, dim), (keys, dim)))
    weights, bounds = torch.randn(queries, heads, generator=gen, device=DEVICE), random_bounds(gen, queries, keys)
    bounds = bounds.clamp(min=keys // 10)
    k[: keys // 10] = float("nan")
    return q, k, weights, bounds


def topk(q, k, weights, bounds, count):
    return indexer_topk(q, k, weights, count, causal=False, k_start=bounds[:, 0], k_end=bounds[:, 1])


def topk_blocks(q, k, weights, bounds, count, size, local):
    masks = {"causal": False, "k_start": bounds[:, 0], "k_end": bounds[:, 1]}
    return indexer_topk_blocks(q, k, weights, count, size, local_blocks=local, **masks)


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """What each call of the kernels asked for."""
    found: list[str] = []

    def note(name, run):
        def noted(*args):
            found.append(name)
            return run(*args)

        monkeypatch.setattr(hopper, name, noted)

    note("best_keys", hopper.best_keys)
    note("best_blocks", hopper.best_blocks)
    return found


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_best_keys(case, dtype, calls, monkeypatch):
    seed = sum(case)
    print(f"seed {seed}")
    q, k, weights, bounds = draw(case, dtype, seed)
    first = topk(q, k, weights, bounds, case[4])
    assert_best(first, q, k, weights, bounds, case[4])
    for size in (1, 1 << 22, 1 << 28):  # of scores in memory
        monkeypatch.setattr(hopper, "SCORES_BYTES", size)
        assert torch.equal(topk(q, k, weights, bounds, case[4]), first)
    assert torch.equal(topk(q[9:60], k, weights[9:60], bounds[9:60], case[4]), first[9:60])
    assert calls == ["best_keys"] * 5


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", BLOCK_CASES, ids=str)
def test_the_best_blocks(case, dtype, calls, monkeypatch):
    seed = sum(case[:5])
    print(f"seed {seed}")
    q, k, weights, bounds = draw(case, dtype, seed)
    count, has_weights, size, local = case[4:]
    weights = weights if has_weights else None

    def part(rows):
        return topk_blocks(q[rows], k, weights[rows] if has_weights else None, bounds[rows], count, size, local)

    first = part(slice(0, None))
    assert_best_blocks(first.rows, q, k, weights, bounds, count, size, local)
    assert torch.equal(first.counts, (first.rows >= 0).sum(2, dtype=torch.int32))
    for limit in (1, 1 << 22, 1 << 28):  # of scores in memory
        monkeypatch.setattr(hopper, "SCORES_BYTES", limit)
        assert torch.equal(part(slice(0, None)).rows, first.rows)
    assert torch.equal(part(slice(9, 60)).rows, first.rows[9:60])
    assert calls == ["best_blocks"] * 5


@pytest.mark.parametrize("case", BLOCK_CASES, ids=str)
def test_equal_blocks_by_position(case, calls):
    seed = sum(case[:5])
    print(f"seed {seed}")
    q, k, weights, bounds = draw(case, BF16, seed)
    q, k = ((x.nan_to_num() * 0.7).round().clamp(-1, 1) for x in (q, k))
    weights = weights.round() / 2 if case[5] else None
    rest = case[4], *case[6:]
    want = best_blocks(q, k, weights, bounds, *rest, Blocks(64, 4096))
    assert torch.equal(topk_blocks(q, k, weights, bounds, *rest).rows, want)
    assert calls == ["best_blocks"]


def test_attention_takes_the_blocks(calls):
    """Those of documents, from the masks that callers give, with as many index heads as kv heads."""
    print("seed 7")
    gen = torch.Generator(DEVICE).manual_seed(7)
    q_index, k_index = (
        torch.randint(-1, 2, s, generator=gen, device=DEVICE).bfloat16() for s in ((700, 2, 64), (700, 64))
    )
    masks = {"local_blocks": 1, "cu_seqlens": [0, 13, 450, 700]}
    lists = indexer_topk_blocks(q_index, k_index, None, 3, 16, **masks)
    want = indexer_topk_blocks(q_index.cpu(), k_index.cpu(), None, 3, 16, **masks)
    assert calls == ["best_blocks"]
    for name in ("rows", "counts", "k_start", "k_end"):
        assert torch.equal(getattr(lists, name).cpu(), getattr(want, name)), name
    q, k, v = (torch.randn(700, heads, 64, generator=gen, device=DEVICE).bfloat16() for heads in (8, 2, 2))
    out = index_attn_func(q, k, v, lists)[0]
    exact = index_attn_func(q.cpu().double(), k.cpu().double(), v.cpu().double(), want)[0]
    assert (out.cpu() - exact).abs().max() < 0.04


def test_an_infinite_key_of_few_heads():
    q, k, weights, bounds = draw((100, 500, 3, 64), BF16, 6)
    k = k.nan_to_num()
    k[77], k[300] = float("inf"), float("nan")
    q, weights = q.abs() + 0.1, weights.abs() + 0.1
    want = best_keys(q, k, weights, bounds, 1, Blocks(64, 1024))
    assert torch.equal(topk(q, k, weights, bounds, 1), want)


@pytest.mark.parametrize("case", CASES[1:], ids=str)
def test_equal_scores_by_position(case, calls):
    seed = sum(case)
    print(f"seed {seed}")
    q, k, weights, bounds = draw(case, BF16, seed)
    q, k = ((x.nan_to_num() * 0.7).round().clamp(-1, 1) for x in (q, k))
    weights = weights.round() / 2
    want = best_keys(q, k, weights, bounds, case[4], Blocks(64, 4096))
    assert torch.equal(topk(q, k, weights, bounds, case[4]), want)
    assert calls == ["best_keys"]


@pytest.mark.parametrize("has_weights", [False, True])
def test_blocks_in_a_graph(has_weights):
    q, k, weights, bounds = draw((256, 2000, 8, 128), BF16, 5)
    weights = weights if has_weights else None
    graph, before, written = capture(lambda: topk_blocks(q, k, weights, bounds, 9, 64, 1).rows)
    written.fill_(-7)
    graph.replay()
    assert torch.equal(written, before)
    bounds += 40
    graph.replay()
    assert torch.equal(written, topk_blocks(q, k, weights, bounds, 9, 64, 1).rows)


def test_in_a_graph():
    case = (256, 2000, 64, 128, 300)
    q, k, weights, bounds = draw(case, BF16, 5)
    graph, before, written = capture(lambda: topk(q, k, weights, bounds, 300))
    written.fill_(-7)
    graph.replay()
    assert torch.equal(written, before)
    bounds += 40
    graph.replay()
    assert torch.equal(written, topk(q, k, weights, bounds, 300))


def test_scores_of_all_are_never_in_memory():
    q, k, weights, _ = draw((4096, 60_000, 64, 128, 0), BF16, 1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    indexer_topk(q, k.nan_to_num(), weights, 2048, causal=False)
    assert torch.cuda.max_memory_allocated() - start < 2 * hopper.SCORES_BYTES
    torch.cuda.reset_peak_memory_stats()
    indexer_topk_blocks(q[:, :4], k.nan_to_num(), None, 16, 64, local_blocks=1, causal=False)
    assert torch.cuda.max_memory_allocated() - start < 2 * hopper.SCORES_BYTES
