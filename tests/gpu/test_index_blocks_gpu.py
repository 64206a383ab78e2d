# SPDX-License-Identifier: Apache-2.0
"""The forward of block masks that copies blocks, against the reference in float64 and the one that gathers keys."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from block_problems import BF16, DEVICE, FP16, NEEDS_HOPPER, draw_blocks, draw_rows, noted_launches

from magi_attention.api import block_sparse_attn_func
from magi_attention.native.index.abi import IndexFwdBlocksParams
from magi_attention.testing.block_lists import poison_unseen

pytestmark = NEEDS_HOPPER
CASES = [
    (900, 1100, 16, 2, 128, 128, 128, 128, 0.3),
    (900, 1100, 16, 2, 64, 64, 64, 64, 0.3),
    (1000, 700, 4, 4, 128, 64, 128, 16, 0.2),
    (700, 1300, 2, 1, 72, 128, 192, 48, 0.5),
    (1500, 1000, 32, 4, 64, 40, 16, 384, 0.5),
    (65, 130, 2, 1, 128, 128, 64, 64, 1.0),
    (4096, 4096, 32, 4, 128, 128, 128, 128, 0.1),
    (4096, 4096, 32, 4, 128, 128, 64, 64, 0.1),
    (300, 5000, 8, 1, 128, 128, 4096, 128, 0.6),
]


def draw(case: tuple, dtype: torch.dtype, seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v with NaN in rows that take part in nothing; a row of blocks and a column are of none, one row of all."""
    gen = torch.Generator(DEVICE).manual_seed(seed)
    q, k, v, _ = draw_rows(case, dtype, gen)
    blocks = draw_blocks(case, gen)
    blocks[-1, 0] = True
    if blocks.shape[1] > 1:
        blocks[0, -1], blocks[0, :, 1] = False, False
    poison_unseen(blocks, case[6], case[7], (q,), (k, v))
    return [q, k, v], blocks


def forward(tensors: list[torch.Tensor], blocks: torch.Tensor, case: tuple, **options) -> list[torch.Tensor]:
    out, meta = block_sparse_attn_func(*tensors, blocks, case[6], case[7], **options)
    return [out, meta.lse, *([] if meta.max_logits is None else [meta.max_logits])]


@pytest.fixture
def calls(monkeypatch) -> Iterator[list[int]]:
    """Tokens of each forward that copied blocks."""
    found: list[int] = []
    with noted_launches(monkeypatch, "forward_blocks_raw", IndexFwdBlocksParams, lambda p: found.append(p.total_q)):
        yield found


def assert_near(got: list[torch.Tensor], want: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """Infinite in the same places, and no further from the truth than twice what the other forward is, and a little."""
    for name, x, truth, other in zip(("out", "lse", "max_logits"), got, want, others):
        assert torch.equal(torch.isfinite(x), torch.isfinite(truth)) and not x.isnan().any(), name
        x, truth, other = (torch.nan_to_num(y.double(), neginf=0.0) for y in (x, truth, other))
        off, usual = ((y - truth).abs().max() for y in (x, other))
        allowed = 2 * usual + 1e-3 * (1 + truth.abs().max())
        assert off <= allowed, f"{name} is off by {off}, allowed {allowed}"


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(case, dtype, calls, monkeypatch):
    """Many times, with the same bits: CTAs take tiles in any order, and each row has one."""
    seed = sum(case[:8])
    print(f"seed {seed}")
    tensors, blocks = draw(case, dtype, seed)
    want = forward([x.double() for x in tensors], blocks, case)
    monkeypatch.setenv("MAGI_ATTENTION_INDEX_FORWARD", "gather")
    others = forward(tensors, blocks, case)
    assert not calls
    monkeypatch.setenv("MAGI_ATTENTION_INDEX_FORWARD", "blocks")
    first = forward(tensors, blocks, case)
    assert_near(first, want, others)
    for _ in range(20):
        assert all(torch.equal(x, y) for x, y in zip(forward(tensors, blocks, case), first))
    assert len(calls) == 21


def test_sink_scale_logits_and_margin(calls, monkeypatch):
    case = CASES[0]
    tensors, blocks = draw(case, BF16, 3)
    sink = torch.randn(1, case[2], device=DEVICE)
    options = {"softmax_scale": 0.3, "return_max_logits": True}
    want = forward([x.double() for x in tensors], blocks, case, sink=sink.double(), **options)
    got = forward(tensors, blocks, case, sink=sink, sm_margin=100, **options)
    assert len(calls) == 1
    monkeypatch.setenv("MAGI_ATTENTION_INDEX_FORWARD", "gather")
    assert_near(got, want, forward(tensors, blocks, case, sink=sink, **options))


def test_in_a_graph(calls):
    """The counter of work tiles is cleared by each call."""
    case = (2048, 2048, 16, 2, 128, 128, 128, 128, 0.3)
    tensors, blocks = draw(case, BF16, 7)
    tensors = [torch.nan_to_num(x) for x in tensors]
    want = forward(tensors, blocks, case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = forward(tensors, blocks, case)
    for _ in range(3):
        for x in got:
            x.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(got, want))
    assert len(calls) == 2
