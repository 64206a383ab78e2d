# SPDX-License-Identifier: Apache-2.0
"""Tiles that the forward kernel splits along the keys: all, where there are fewer of them than multiprocessors; and
long ones, where the host knows the mask."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from forward_oracle import (
    NEG_INF,
    Result,
    allowed_error,
    allowed_error_of_huge_logits,
    assert_right,
    dense,
    make_inputs,
)
from test_ffa_forward import DTYPES, attend, check, each_dtype, explicit_backend, options_of, pytestmark  # noqa: F401

from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.types import Operands, Partial
from magi_attention.native.planner.schedule import ForwardSplits
from magi_attention.testing import masks

DEVICE = "cuda"
# (query rows, key rows, (query heads, key heads)): from one tile to nearly as many as there are multiprocessors.
SHAPES = [(16, 20_000, (8, 1)), (100, 5_000, (4, 4)), (130, 3_000, (16, 2)), (40, 9_001, (5, 1)), (700, 2_500, (8, 2))]


@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_few_queries_and_many_keys(dtype, shape):
    tq, tk, heads = shape
    rng = np.random.default_rng(tk)
    kinds = {
        "full": [[0, tq, 0, tk, 0]],
        "causal": [[0, tq, 0, tk, 1]],
        "two ends": [[0, tq, 0, 700, 0], [0, tq, tk - 300, tk, 2]],
        "short and long": [[0, tq // 2, 0, 200, 0], [tq // 2, tq, 0, tk, 0]],
        "random": masks.random_slices(rng, tq, tk, max_slices=60),
    }
    for seed, slices in enumerate(kinds.values()):
        check(seed, np.array(slices), tq, tk, heads, (128, 128), dtype)


@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (192, 192), (256, 256), (80, 48)], ids=str)
def test_head_dims(dims):
    for dtype in DTYPES:
        check(0, np.array([[0, 48, 0, 6_000, 1]]), 48, 6_000, (4, 2), dims, dtype)


def test_options():
    slices = np.array([[0, 60, 0, 7_000, 1], [60, 64, 0, 100, 0]])
    for softcap, sink in product((0.0, 20.0), (None, (3, 8), (64, 1, 8))):
        check(1, slices, 64, 7_000, (8, 1), (128, 128), softcap=softcap, sink_shape=sink)
    for size in (10.0, 40.0):
        x = make_inputs(2, slices, 64, 7_000, (8, 1), (128, 128), size=size)
        want = dense(x, torch.float64)
        assert_right(x, attend(x), allowed_error_of_huge_logits(x, want), want)


def test_nan_in_unseen_rows_stays_there():
    x = make_inputs(6, np.array([[0, 64, 100, 2_000, 0], [0, 64, 2_500, 6_000, 1]]), 64, 6_000, (8, 1), (128, 128))
    want = attend(x)
    for rows in (slice(0, 100), slice(2_000, 2_500)):
        x.k[rows] = float("nan")
        x.v[rows] = float("inf")
    got = attend(x)
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)


def test_it_cuts_and_the_workspace_follows():
    backend = FfaBackend()
    few = make_inputs(0, np.array([[0, 64, 0, 5_000, 1]]), 64, 5_000, (8, 1), (128, 128))
    many = make_inputs(0, masks.causal(6_000), 6_000, 6_000, (8, 1), (128, 128))
    for x in (many, few, many):
        backend.forward_final(Operands(x.q, x.k, x.v, x.slices, options_of(x)))
    small, large = sorted({call.workspace_bytes for call in backend._forward._prepared.values()})
    assert small < 10_000 < 1_000_000 < large
    ((workspace, *_),) = backend._forward._workspaces.values()
    assert workspace.nbytes == large
    assert not workspace[:4096].any(), "counters must be back at zero"
    want, *_ = backend.forward_final(Operands(few.q, few.k, few.v, few.slices, options_of(few)))
    workspace[4096:] = 255  # NaN in every float
    got, *_ = backend.forward_final(Operands(few.q, few.k, few.v, few.slices, options_of(few)))
    assert torch.equal(got, want)


def test_results_do_not_depend_on_timing():
    x = make_inputs(3, np.array([[0, 64, 0, 30_000, 1]]), 64, 30_000, (8, 1), (128, 128))
    first = attend(x)
    for margin in (0, 0, 0, 60, 120, 131):
        again = attend(x, sm_margin=margin)
        assert all(torch.equal(getattr(first, n), getattr(again, n)) for n in ("out", "lse", "max_logits")), margin


def test_stages():
    """Parts are joined before they are merged into what out and lse hold."""
    ffa = FfaBackend()
    x = make_inputs(4, np.array([[0, 64, 0, 4_000, 0], [0, 64, 4_000, 9_000, 1]]), 64, 9_000, (8, 1), (128, 128))
    out = torch.zeros(64, 8, 128, device=DEVICE)
    part = Partial(out, torch.full((64, 8), NEG_INF, device=DEVICE))
    for row in (0, 1):
        one = type(x.slices)(x.slices.array[row : row + 1])
        ffa.forward(Operands(x.q, x.k, x.v, one, options_of(x)), part)
    assert_right(x, Result(part.out, part.lse, part.max_logits))


def readers(rows: int, count: int, first: int | None = None) -> np.ndarray:
    """Causal documents of 128 rows, and ``count`` queries that see all keys, from ``first`` on or at the end."""
    first = rows - count if first is None else first
    parts = [(0, first), (first + count, rows)]
    documents = [[a, min(a + 128, end)] for start, end in parts for a in range(start, end, 128)]
    return np.array([*([a, b, a, b, 1] for a, b in documents), [first, first + count, 0, rows, 0]])


def split_of(backend: FfaBackend) -> list[ForwardSplits]:
    """Those of the calls so far."""
    return [key[-1] for key in backend._forward._prepared if key[-1] is not None]


@each_dtype
@pytest.mark.parametrize(
    "heads,dims,count", [((8, 8), (128, 128), 64), ((8, 1), (64, 64), 40), ((6, 2), (192, 128), 300)]
)
def test_long_tiles_beside_short_ones(dtype, heads, dims, count):
    for seed, first in enumerate((None, 1_000)):
        x = make_inputs(seed, readers(6_000, count, first), 6_000, 6_000, heads, dims, dtype=dtype)
        backend, want = FfaBackend(), dense(x, torch.float64)
        got = [backend.forward_final(Operands(x.q, x.k, x.v, x.slices, options_of(x, bool(i)))) for i in (1, 0, 0)]
        (splits, *_) = split_of(backend)
        assert splits.tiles < -(-6_000 // 16) and splits.parts > 1
        for out, lse, most in got:
            assert_right(x, Result(out, lse, most), allowed_error(x, want), want, note=f"seed {seed}")
        assert torch.equal(got[1][0], got[2][0]) and torch.equal(got[1][1], got[2][1])
        ((workspace, *_),) = backend._forward._workspaces.values()
        assert not workspace[:4096].any(), "counters must be back at zero"


def test_long_tiles_with_options_and_stages():
    x = make_inputs(7, readers(5_000, 70), 5_000, 5_000, (8, 2), (128, 128), softcap=20.0, sink_shape=(3, 8))
    backend = FfaBackend()
    got = backend.forward_final(Operands(x.q, x.k, x.v, x.slices, options_of(x), x.sink))
    assert split_of(backend)
    assert_right(x, Result(*got))
    x = make_inputs(8, readers(5_000, 70), 5_000, 5_000, (8, 2), (128, 128))
    out = torch.zeros(5_000, 8, 128, device=DEVICE)
    part = Partial(out, torch.full((5_000, 8), NEG_INF, device=DEVICE))
    rows = x.slices.array
    for one in (rows[:-1], rows[-1:]):
        backend.forward(Operands(x.q, x.k, x.v, type(x.slices)(one), options_of(x)), part)
    assert_right(x, Result(part.out, part.lse, part.max_logits))


@pytest.mark.whole_gpu
def test_margin_leaves_multiprocessors_free():
    """With all but one of them left free, the same work takes many times as long."""
    x = make_inputs(5, masks.causal(8_192), 8_192, 8_192, (16, 2), (128, 128))

    def milliseconds(margin: int) -> float:
        times = []
        for _ in range(3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            attend(x, False, sm_margin=margin)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return min(times)

    count = torch.cuda.get_device_properties(0).multi_processor_count
    milliseconds(0), milliseconds(count - 1)
    assert milliseconds(count - 1) > 10 * milliseconds(0)
