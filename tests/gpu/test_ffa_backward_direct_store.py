# SPDX-License-Identifier: Apache-2.0
"""Where a block of queries has a single contribution, the main kernel rounds dq and writes it: the same bits as through
dq_accum, which is never written there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from backward_oracle import assert_grads, make_dout, options_of, seen, truth
from forward_oracle import Inputs, make_inputs
from test_ffa_backward import (  # noqa: F401
    DEVICE,
    differentiate,
    each_dtype,
    explicit_backend_in_poisoned_memory,
    forward,
    poisoned_like,
    pytestmark,
)

from magi_attention.common.slices import SliceTable
from magi_attention.errors import ContractError
from magi_attention.kernels.ffa import backward as ffa_backward
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.types import BackwardOperands, Grads
from magi_attention.native.planner.schedule import BwdSchedule, Split
from magi_attention.testing import masks

COUNTERS = 128  # bytes at the start of the workspace


def documents(length: int, kind: int, total: int) -> SliceTable:
    return masks.varlen([*range(0, total, length), total], kind)


MASKS = {
    "documents of 64": lambda n: documents(64, 0, n),
    "causal documents of 128": lambda n: documents(128, 1, n),
    "causal documents of 300": lambda n: documents(300, 1, n),
    "uneven documents": lambda n: masks.varlen([0, 1, 70, 71, 200, 263, 330, n - 60, n], 0),
    "causal": masks.causal,
    "window": lambda n: masks.sliding_window(n, 60),
    "a part sees nothing": lambda n: SliceTable([[10, 75, 3, 40, 0], [150, 400, 128, 200, 1]]),
    "two segments of a tile": lambda n: SliceTable([[0, 64, 0, 20, 0], [0, 64, 30, 50, 0], [64, 300, 20, 60, 0]]),
}
DIMS = ((64, 64), (48, 64), (128, 128), (72, 120), (64, 128), (256, 256), (200, 136))


def schedule_of(queries: int, dims: tuple[int, int], is_ordered: bool) -> BwdSchedule:
    is_wide = queries == 80 and 64 < max(dims) <= 128
    return BwdSchedule(80 if is_wide else 64, 0, first_writer=not is_ordered, direct_dq_store=True)


def single_blocks(x: Inputs, queries: int) -> torch.Tensor:
    """(blocks,) bool, counted row by row: of all tiles of 128 keys only one has a key that is seen from the block."""
    table = torch.zeros(-(-len(x.q) // queries), -(-len(x.k) // 128), dtype=torch.bool)
    for q0, q1, k0, k1, kind in x.slices.array.tolist():
        for q in range(q0, q1):
            first = k0 + (q - q0 if kind & 2 else 0)
            end = k1 - (q1 - 1 - q if kind & 1 else 0)
            if first < end:
                table[q // queries, first // 128 : (end - 1) // 128 + 1] = True
    return table.sum(1) == 1


def through_dq_accum(x: Inputs, dout: torch.Tensor, is_ordered: bool) -> Grads:
    """In float32, which the main kernel never writes, and rounded here."""
    ffa, options = FfaBackend(), replace(options_of(x), deterministic=is_ordered)
    out, lse = forward(x, ffa)
    found = ffa.backward(BackwardOperands(dout, x.q, x.k, x.v, out, lse, x.slices, options))
    return Grads(*(g.to(x.q.dtype) for g in (found.dq, found.dk, found.dv)))


@pytest.fixture
def choose(monkeypatch):
    def chosen(queries: int, dims: tuple[int, int], is_ordered: bool) -> None:
        monkeypatch.setattr(ffa_backward, "select_schedule", lambda *_: schedule_of(queries, dims, is_ordered))

    return chosen


@each_dtype
@pytest.mark.parametrize("queries", (64, 80))
@pytest.mark.parametrize("name", MASKS)
def test_the_same_bits_as_through_dq_accum(name, queries, dtype, choose):
    """In order, for all blocks; with the first writer, which has no order, for those of a single contribution."""
    for dims in DIMS:
        for total, heads in ((1337, (8, 2)), (450, (5, 1)), (401, (3, 3))):
            x = make_inputs(0, MASKS[name](total), total, total, heads, dims, dtype, DEVICE)
            dout, note = make_dout(x), (name, queries, dims, total, heads)
            is_single = single_blocks(x, queries)
            rows = is_single.repeat_interleave(queries)[:total].to(DEVICE)
            for is_ordered in (True, False):
                choose(queries, dims, is_ordered)
                got, want = differentiate(x, dout, deterministic=is_ordered), through_dq_accum(x, dout, is_ordered)
                wanted = torch.ones_like(rows) if is_ordered else rows
                assert torch.equal(got.dq[wanted], want.dq[wanted]), note
                assert torch.equal(got.dk, want.dk) and torch.equal(got.dv, want.dv), note
            assert_grads(x, got, truth(x, dout), note)


@pytest.mark.parametrize("is_ordered", (True, False))
@pytest.mark.parametrize("queries, dim", ((64, 64), (64, 128), (80, 128), (64, 256)))
def test_their_dq_accum_is_never_written(queries, dim, is_ordered, choose, monkeypatch):
    """Memory of a workspace that was all ones still is, for blocks of a single contribution and for
    no others that are seen."""
    made: list[torch.Tensor] = []

    def watched(like: torch.Tensor) -> torch.Tensor:
        made.append(poisoned_like(like))
        return made[-1]

    monkeypatch.setattr(ffa_backward, "_empty_like", watched)
    dims, total, heads = (dim, dim), 1300, (8, 2)
    choose(queries, dims, is_ordered)
    x = make_inputs(1, documents(300, 1, total), total, total, heads, dims, device=DEVICE)
    differentiate(x, make_dout(x), deterministic=is_ordered)
    torch.cuda.synchronize()
    workspace = max((t for t in made if t.dtype == torch.uint8), key=torch.numel)
    blocks = -(-total // queries)
    begin = COUNTERS + 4 * 2 * queries * blocks * heads[0]
    size = 4 * queries * dim * blocks * heads[0]
    accumulated = workspace[begin : begin + size].view(heads[0], blocks, -1)
    is_written = (accumulated != 255).any(2)
    is_single, sees = single_blocks(x, queries), seen(x)[0].cpu()
    assert 0.1 < is_single.float().mean() < 0.9, "a mask with both"
    has_pairs = torch.nn.functional.pad(sees, (0, blocks * queries - total)).view(blocks, queries).any(1)
    assert torch.equal(is_written.cpu(), (has_pairs & ~is_single).expand(heads[0], -1))


def test_what_cannot_be_written_is_refused(monkeypatch):
    few, many = (
        make_inputs(2, masks.causal(total), total, total, heads, (128, 128), device=DEVICE)
        for total, heads in ((300, (4, 2)), (1337, (96, 24)))  # of the second, tiles may be split
    )

    def error_of(found: BwdSchedule, problem: Inputs, **options) -> str:
        dout = make_dout(problem)
        monkeypatch.setattr(ffa_backward, "select_schedule", lambda *_: found)
        with pytest.raises(ContractError) as info:
            differentiate(problem, dout, **options)
        return str(info.value)

    for found, problem, options in (
        (BwdSchedule(64, 0, direct_dq_store=True), few, {}),  # nothing is counted
        (BwdSchedule(64, 0, first_writer=True, direct_dq_store=True), replace(few, softcap=20.0), {}),
        (BwdSchedule(80, 0, split=Split(0, 2, 2), direct_dq_store=True), many, {"deterministic": True}),
    ):
        assert "leave direct_dq_store 0" in error_of(found, problem, **options), found
