# SPDX-License-Identifier: Apache-2.0
"""Work lists in m-blocks of 80 queries: the tests of m-blocks of 64 once more."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from backward_oracle import assert_grads, assert_same, make_dout, seen, truth
from forward_oracle import make_inputs
from test_ffa_backward_split import (  # noqa: F401
    DEVICE,
    differentiate,
    documents,
    has_132_multiprocessors,
    inputs,
    list_counts,
    pytestmark,
    ranges_on_the_host,
    test_a_graph_and_another_stream_read_the_same_list,
    test_a_plan_of_other_shapes_gives_nan,
    test_rows_with_delta_given_and_without_out,
    test_the_last_kernel_waits_for_what_is_missing,
    workspaces,
)
from test_ffa_backward_wide import m_blocks_of_80  # noqa: F401

from magi_attention.testing import masks
from magi_attention.testing.uneven import SPLIT_CASES


@pytest.mark.parametrize("dims", ((128, 128), (96, 80)), ids=str)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bf16", "fp16"))
def test_right_and_the_same_every_time(list_counts, dims, dtype):  # noqa: F811
    for seed in range(6):
        x = inputs(seed, documents(seed, kind=seed % 4), dims, dtype)
        dout = make_dout(x, seed)
        got = differentiate(x, dout)
        if has_132_multiprocessors():
            assert list_counts()[1] > 0
        assert_grads(x, got, truth(x, dout), (seed, dims))
        assert_same(differentiate(x, dout), got, dtype, seed)


def test_kinds_of_splits(list_counts):  # noqa: F811
    """Which they are differs from m-blocks of 64; that tiles are split by queries, by heads and left whole does not."""
    found = set()
    for name, (lengths, kind, heads, *_) in SPLIT_CASES.items():
        slices = masks.varlen([0, *np.cumsum(lengths).tolist()], kind).array
        x = make_inputs(1, slices, sum(lengths), sum(lengths), heads, (128, 128), torch.bfloat16, DEVICE)
        dout = make_dout(x, 1)
        got = differentiate(x, dout)
        partials, work_tiles = list_counts()
        tiles = -(-sum(lengths) // 128)
        found.add((partials // heads[1], work_tiles // heads[1] - tiles))  # tiles that are split, further work tiles
        assert_grads(x, got, truth(x, dout), name)
        assert_same(differentiate(x, dout), got, torch.bfloat16, name)
        assert_grads(x, differentiate(x, dout, sm_margin=20), truth(x, dout), (name, "fewer multiprocessors"))
    if has_132_multiprocessors():
        # A split by queries makes one work tile more, a split by heads three.
        assert any(0 < more < 3 * split for split, more in found), found
        assert any(0 < split and more == 3 * split for split, more in found), found


# With 132 SMs the last wave of 16 tiles of 20 heads is split without a list.
@pytest.mark.parametrize(
    "total, heads, has_work_list", ((3700, (40, 10), True), (2048, (80, 20), False)), ids=("10 heads", "20 heads")
)
def test_one_wave_or_two(list_counts, total, heads, has_work_list):  # noqa: F811
    for kind in (0, 1):
        x = make_inputs(7, documents(7, 3, kind, total), total, total, heads, (128, 128), torch.bfloat16, DEVICE)
        dout = make_dout(x, 7)
        got = differentiate(x, dout)
        if has_132_multiprocessors():
            assert (list_counts()[1] > 0) == has_work_list
        assert_grads(x, got, truth(x, dout), kind)
        assert_same(differentiate(x, dout), got, torch.bfloat16, kind)


def test_unseen_rows():
    lengths, kind, heads, *_ = SPLIT_CASES["two tiles by queries, and the two shortest by heads"]
    slices = masks.varlen([0, *np.cumsum(lengths).tolist()], kind).array[1:]
    x = make_inputs(2, slices, sum(lengths), sum(lengths), heads, (128, 128), torch.bfloat16, DEVICE)
    dout = make_dout(x, 2)
    want = differentiate(x, dout)
    assert_grads(x, want, truth(x, dout))
    sees, is_seen = seen(x)
    for t, rows in ((x.q, ~sees), (dout, ~sees), (x.k, ~is_seen), (x.v, ~is_seen)):
        t[rows] = float("nan")
    assert_same(differentiate(x, dout), want, x.q.dtype)
