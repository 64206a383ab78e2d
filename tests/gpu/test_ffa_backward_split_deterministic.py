# SPDX-License-Identifier: Apache-2.0
"""``deterministic=True`` where some tiles are split by query heads: right, and the same bits beside whatever else runs.

Which tiles is forced here; how they are chosen is for ``tests/kernels/schedule``.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from backward_oracle import assert_grads, assert_near, make_dout, options_of, truth
from forward_oracle import make_inputs
from long_kernels import beside_long_kernels
from places import in_a_process
from test_ffa_backward import (  # noqa: F401
    DEVICE,
    differentiate,
    each_dtype,
    explicit_backend_in_poisoned_memory,
    forward,
    pytestmark,
)
from test_ffa_backward_deterministic import (
    CASES,
    assert_same_beside_other_work,
    assert_same_bits,
    assert_same_from_a_graph,
)

from magi_attention.errors import ContractError
from magi_attention.kernels.ffa import backward as ffa_backward
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.types import BackwardOperands, Grads
from magi_attention.native.planner.schedule import BwdSchedule, Split
from magi_attention.testing import masks

# Queries and keys, query and kv heads: enough work tiles for 132 multiprocessors, so that heads are not split anyway.
TOTAL, HEADS = 1337, (96, 24)
SPLITS = (Split(0, 2, 4), Split(3, 9, 2), Split(0, 11, 4), Split(10, 11, 2))


def force(split: Split) -> None:
    ffa_backward.select_schedule = lambda *_: BwdSchedule(80, 0, split=split)


@pytest.fixture
def forced(monkeypatch):
    monkeypatch.setattr(ffa_backward, "select_schedule", None)  # so that it is put back
    return force


@each_dtype
@pytest.mark.parametrize("dims", ((128, 128), (72, 120)), ids=str)
@pytest.mark.parametrize("name", CASES)
def test_right_and_the_same_every_time(name, dims, dtype, forced):
    x = make_inputs(0, CASES[name](TOTAL), TOTAL, TOTAL, HEADS, dims, dtype=dtype, device=DEVICE)
    dout, wanted = make_dout(x), None
    for split in SPLITS:
        forced(split)
        first = differentiate(x, dout, deterministic=True)
        wanted = truth(x, dout) if wanted is None else wanted
        assert_grads(x, first, wanted, (name, split))
        for _ in range(3):
            assert_same_bits(differentiate(x, dout, deterministic=True), first, (name, split))


@pytest.mark.parametrize("heads, parts", (((192, 24), 8), ((48, 24), 2), ((8, 2), 4)), ids=str)
def test_random_runs_of_tiles(heads, parts, forced):
    total = TOTAL if heads[1] > 2 else 16384
    tiles = -(-total // 128)
    x = make_inputs(1, CASES["documents"](total), total, total, heads, (128, 128), device=DEVICE)
    dout, rng = make_dout(x), np.random.default_rng(parts)
    forced(Split(0, 0, 0))
    whole = differentiate(x, dout, deterministic=True)
    for _ in range(6):
        begin, end = sorted(rng.choice(tiles + 1, 2, replace=False).tolist())
        forced(Split(begin, end, parts))
        print(heads, begin, end, parts)
        first = differentiate(x, dout, deterministic=True)
        assert_near(first, whole, (begin, end))
        assert_same_bits(differentiate(x, dout, deterministic=True), first, (begin, end))


@pytest.mark.parametrize("name", CASES)
def test_the_same_beside_other_work(name, forced):
    forced(Split(2, 7, 4))
    x = make_inputs(2, CASES[name](TOTAL), TOTAL, TOTAL, HEADS, (128, 128), device=DEVICE)
    assert_same_beside_other_work(x, name)


@each_dtype
def test_uneven_documents_as_chosen(dtype):
    """Two tiles hold the end of one document and the start of the next, and two work tiles come to each SM."""
    documents = masks.varlen([0, 960, 1568, 2048], 0)
    x = make_inputs(8, documents, 2048, 2048, (64, 16), (128, 128), dtype=dtype, device=DEVICE)
    dout, ffa = make_dout(x), FfaBackend()
    out, lse = forward(x, ffa)
    options = replace(options_of(x), deterministic=True)
    found = [ffa.backward_final(BackwardOperands(dout, x.q, x.k, x.v, out, lse, x.slices, options)) for _ in range(5)]
    assert_grads(x, found[0], truth(x, dout), dtype)
    for again in found[1:]:
        assert_same_bits(again, found[0], dtype)


def beside_kernels_that_hold_multiprocessors(rank: int, world: int) -> bool:
    for name, make in CASES.items():
        for split in SPLITS:
            force(split)
            x = make_inputs(3, make(TOTAL), TOTAL, TOTAL, HEADS, (128, 128), device=DEVICE)
            dout = make_dout(x)
            found = [differentiate(x, dout, deterministic=True) for _ in beside_long_kernels()]
            for again in found[1:]:
                assert_same_bits(again, found[0], (name, split))
    return True


def test_nobody_waits_for_ever():
    assert in_a_process(beside_kernels_that_hold_multiprocessors)


@pytest.mark.parametrize("margin", (1, 40, 131))
def test_with_multiprocessors_left_free(margin, forced):
    forced(Split(1, 6, 2))
    x = make_inputs(4, CASES["documents"](TOTAL), TOTAL, TOTAL, HEADS, (128, 128), device=DEVICE)
    dout = make_dout(x)
    found = [differentiate(x, dout, deterministic=True, sm_margin=margin) for _ in range(3)]
    assert_grads(x, found[0], truth(x, dout), margin)
    for again in found[1:]:
        assert_same_bits(again, found[0], margin)


@each_dtype
def test_added_to_what_is_there(dtype, forced):
    forced(Split(0, 5, 4))
    x = make_inputs(5, CASES["documents"](TOTAL), TOTAL, TOTAL, HEADS, (128, 128), dtype=dtype, device=DEVICE)
    dout, ffa = make_dout(x), FfaBackend()
    out, lse = forward(x, ffa)
    options = replace(options_of(x), deterministic=True)
    operands = BackwardOperands(dout, x.q, x.k, x.v, out, lse, x.slices, options)
    alone = ffa.backward(operands)
    into = Grads(*(torch.full(t.shape, 3.0, device=DEVICE) for t in (x.q, x.k, x.v)))
    ffa.backward(operands, into)
    for name in ("dq", "dk", "dv"):
        assert torch.allclose(getattr(into, name), getattr(alone, name) + 3.0, rtol=0, atol=2e-6), name


def test_in_a_cuda_graph(forced):
    forced(Split(2, 8, 4))
    assert_same_from_a_graph(make_inputs(6, CASES["causal"](TOTAL), TOTAL, TOTAL, HEADS, (128, 128), device=DEVICE))


def test_what_cannot_be_split_is_refused(forced):
    def error_of(split: Split, heads=HEADS, block_m: int = 80, **options) -> str:
        ffa_backward.select_schedule = lambda *_: BwdSchedule(block_m, 0, split=split)
        x = make_inputs(7, CASES["full"](TOTAL), TOTAL, TOTAL, heads, (128, 128), device=DEVICE)
        with pytest.raises(ContractError) as info:
            differentiate(x, make_dout(x), **{"deterministic": True, **options})
        return str(info.value)

    for split in (Split(0, 12, 2), Split(5, 5, 2), Split(-1, 5, 2), Split(0, 5, 3), Split(0, 5, 1), Split(0, 5, 8)):
        assert "cannot be split" in error_of(split), split
    assert "cannot be split" in error_of(Split(0, 5, 2), heads=(144, 24)), "three heads"
    for options in ({"block_m": 64}, {"deterministic": False}, {"heads": (8, 2)}):
        assert "only in deterministic order" in error_of(Split(0, 5, 4), **options), options
