# SPDX-License-Identifier: Apache-2.0
"""The key-stationary backward of block masks, against the reference in float64 and the query-stationary one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from block_problems import BF16, DEVICE, FP16, NEEDS_HOPPER, draw_blocks, draw_rows, noted_launches

from magi_attention.api import block_sparse_attn_func
from magi_attention.kernels.index_attn import launches
from magi_attention.kernels.index_attn.choice import default_backends
from magi_attention.native.index.abi import IndexBwdKeysParams
from magi_attention.testing.block_lists import poison_unseen

pytestmark = NEEDS_HOPPER
CASES = [
    (900, 1100, 16, 2, 128, 128, 128, 128, 0.3),
    (900, 1100, 16, 2, 64, 64, 64, 64, 0.3),
    (1000, 700, 4, 4, 128, 64, 64, 16, 0.2),
    (700, 1300, 8, 1, 72, 128, 192, 48, 0.5),
    (1500, 1000, 32, 4, 64, 40, 256, 384, 0.5),
    (65, 130, 2, 1, 128, 128, 64, 64, 1.0),
    (4096, 4096, 32, 4, 128, 128, 128, 128, 0.1),
    (4096, 4096, 32, 4, 128, 128, 64, 64, 0.1),
]


def draw(case: tuple, dtype: torch.dtype, seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v, dout with NaN in rows that take part in nothing; blocks with a row and a column of none, one of all."""
    gen = torch.Generator(DEVICE).manual_seed(seed)
    q, k, v, dout = draw_rows(case, dtype, gen)
    blocks = draw_blocks(case, gen)
    blocks[-1, :, 0] = True
    blocks[0, -1], blocks[0, :, -1] = False, False
    poison_unseen(blocks, case[6], case[7], (q, dout), (k, v))
    return [q, k, v, dout], blocks


def gradients(tensors: list[torch.Tensor], blocks: torch.Tensor, case: tuple, **options) -> list[torch.Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]
    out, _ = block_sparse_attn_func(*leaves, blocks, case[6], case[7], **options)
    return list(torch.autograd.grad(out, leaves, tensors[3].to(out.dtype)))


@pytest.fixture
def calls(monkeypatch) -> Iterator[list[int]]:
    """Bytes of the workspace of each backward that kept keys."""
    found: list[int] = []
    note = lambda p: found.append(p.workspace_bytes)  # noqa: E731
    with noted_launches(monkeypatch, "backward_keys_raw", IndexBwdKeysParams, note):
        yield found


def assert_near(got: list[torch.Tensor], want: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """Finite, and no further from the truth than twice what the other backward is, and a little."""
    for name, x, truth, other in zip(("dq", "dk", "dv"), got, want, others):
        assert torch.isfinite(x).all(), name
        off, usual = ((y.double() - truth).abs().max() for y in (x, other))
        allowed = 2 * usual + 2e-3 * (1 + truth.abs().max())
        assert off <= allowed, f"{name} is off by {off}, allowed {allowed}"


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case, dtype, calls, monkeypatch):
    seed = sum(case[:8])
    print(f"seed {seed}")
    tensors, blocks = draw(case, dtype, seed)
    want = gradients([x.double() for x in tensors], blocks, case)
    monkeypatch.setenv("MAGI_ATTENTION_INDEX_BACKWARD", "queries")
    others = gradients(tensors, blocks, case)
    assert not calls
    monkeypatch.setenv("MAGI_ATTENTION_INDEX_BACKWARD", "keys")
    for parts in (1, 2, 3, 8) * 3:
        monkeypatch.setattr(launches, "HEAD_SPLITS", parts)
        default_backends.cache_clear()
        assert_near(gradients(tensors, blocks, case), want, others)
    assert len(calls) == 12


def test_sink_scale_and_margin(calls, monkeypatch):
    case = CASES[0]
    tensors, blocks = draw(case, BF16, 3)
    sink = torch.randn(1, case[2], device=DEVICE)
    want = gradients([x.double() for x in tensors], blocks, case, sink=sink.double(), softmax_scale=0.3)
    got = gradients(tensors, blocks, case, sink=sink, softmax_scale=0.3, sm_margin=100)
    assert len(calls) == 1
    monkeypatch.setenv("MAGI_ATTENTION_INDEX_BACKWARD", "queries")
    assert_near(got, want, gradients(tensors, blocks, case, sink=sink, softmax_scale=0.3))


def test_a_tile_that_all_queries_see(calls, monkeypatch):
    """Its list is longer than the share of a CTA, so its heads are shared out; all other tiles see one block."""
    case = (16384, 16384, 16, 2, 128, 128, 128, 128, 0.0)
    tensors, _ = draw(case, BF16, 5)
    blocks = torch.eye(128, dtype=torch.bool, device=DEVICE).expand(2, -1, -1).clone()
    blocks[:, :, 3] = True
    tensors = [torch.nan_to_num(x) for x in tensors]
    got = gradients(tensors, blocks, case)
    assert len(calls) == 1
    monkeypatch.setenv("MAGI_ATTENTION_INDEX_BACKWARD", "queries")
    others = gradients(tensors, blocks, case)
    for name, x, other in zip(("dq", "dk", "dv"), got, others):
        off, allowed = (x - other).abs().max(), 0.02 * (1 + other.abs().max())
        assert off <= allowed, f"{name} is off by {off}, allowed {allowed}"
