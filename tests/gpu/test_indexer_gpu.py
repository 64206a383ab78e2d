# SPDX-License-Identifier: Apache-2.0
"""The indexer's kernels on a Hopper GPU: the public function against scores in float64, and whole numbers exactly."""

from __future__ import annotations

import pytest
import torch
from block_problems import BF16, DEVICE, FP16, NEEDS_HOPPER
from graph_capture import capture

from magi_attention.api import indexer_topk
from magi_attention.kernels.indexer import Blocks, hopper
from magi_attention.kernels.indexer.topk import best_keys
from magi_attention.testing.indexer import assert_best, random_bounds

pytestmark = NEEDS_HOPPER
CASES = [  # queries, keys, heads, columns, best keys
    (300, 5000, 64, 128, 2048),
    (1000, 1000, 64, 128, 100),
    (77, 9000, 32, 64, 4096),
    (513, 700, 5, 40, 64),
    (200, 3000, 48, 96, 1),
]


def draw(case: tuple, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, ...]:
    """q, k and weights, and bounds of all kinds; NaN in keys that nobody sees."""
    queries, keys, heads, dim, _ = case
    gen = torch.Generator(DEVICE).manual_seed(seed)
    q, k = (torch.randn(s, generator=gen, device=DEVICE).to(dtype) for s in ((queries, heads, dim), (keys, dim)))
    weights, bounds = torch.randn(queries, heads, generator=gen, device=DEVICE), random_bounds(gen, queries, keys)
    bounds = bounds.clamp(min=keys // 10)
    k[: keys // 10] = float("nan")
    return q, k, weights, bounds


def topk(q, k, weights, bounds, count):
    return indexer_topk(q, k, weights, count, causal=False, k_start=bounds[:, 0], k_end=bounds[:, 1])


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """The best keys that each call of the kernels asked for."""
    found, run = [], hopper.best_keys

    def noted(*args):
        found.append(args[5])
        return run(*args)

    monkeypatch.setattr(hopper, "best_keys", noted)
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
    assert len(calls) == 5


@pytest.mark.parametrize("case", CASES[1:], ids=str)
def test_equal_scores_by_position(case, calls):
    seed = sum(case)
    print(f"seed {seed}")
    q, k, weights, bounds = draw(case, BF16, seed)
    q, k = ((x.nan_to_num() * 0.7).round().clamp(-1, 1) for x in (q, k))
    weights = weights.round() / 2
    want = best_keys(q, k, weights, bounds, case[4], Blocks(64, 4096))
    assert torch.equal(topk(q, k, weights, bounds, case[4]), want)
    assert len(calls) == 1


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
