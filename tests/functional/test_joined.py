# SPDX-License-Identifier: Apache-2.0
"""When a single stage is waited for, and that only GPUs do so."""

from __future__ import annotations

import pytest
import torch

from magi_attention.api import Mask, make_plan
from magi_attention.comm.transport.fake import FakeWorld
from magi_attention.functional.joined import are_on_one_host, is_joined_faster
from magi_attention.functional.runtime import AttnRuntime
from magi_attention.kernels.registry import default_registry


def tensors(tokens: int, heads: tuple[int, int] = (64, 8), device: str = "meta") -> tuple[torch.Tensor, ...]:
    counts = (heads[0], heads[1], heads[1])
    return tuple(torch.empty((tokens, n, 128), dtype=torch.bfloat16, device=device) for n in counts)


def most_rows(is_one_host: bool, tokens: int = 8192, heads: tuple[int, int] = (64, 8)) -> int:
    """By bisection."""
    operands, low, high = tensors(tokens, heads), 0, 1 << 24
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_joined_faster(middle, *operands, is_one_host) else (low, middle)
    return low


def test_few_rows_and_fast_links():
    assert most_rows(True) > 4 * most_rows(False) > 0
    assert most_rows(False, tokens=16_384) == pytest.approx(2 * most_rows(False), abs=2)
    assert most_rows(False, heads=(64, 64)) == pytest.approx(most_rows(False) / 8, abs=2)  # eight times as many bytes


@pytest.mark.parametrize(
    ("ranks", "size", "is_one"),
    [((0, 1), 2, True), ((2, 3), 2, True), ((1, 2), 2, False), ((0, 8), 8, False), ((0,), None, 0)],
)
def test_hosts(ranks, size, is_one):
    assert are_on_one_host(ranks, size) == is_one


def test_on_a_cpu_a_stage_is_a_stage(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    plan = make_plan(Mask.causal(64), 2)

    def rank(transport) -> bool:
        runtime = AttnRuntime(plan, transport, default_registry())
        call = runtime.call(*tensors(plan.rank(transport.rank).num_tokens, (2, 2), "cpu"), None, None, 0.0, False)
        return call.prepared.is_joined

    assert plan.num_stages == 1 and FakeWorld(2).run(rank) == [False, False]
