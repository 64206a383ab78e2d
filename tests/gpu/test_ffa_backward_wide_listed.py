# SPDX-License-Identifier: Apache-2.0
"""Units that are listed, in steps of 80 queries: the tests of narrow steps once more."""

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
    listed,
    pytestmark,
    ranges_on_the_host,
    test_a_graph_and_another_stream_read_the_same_list,
    test_a_plan_of_other_shapes_gives_nan,
    test_rows_with_delta_given_and_without_out,
    test_the_last_kernel_waits_for_what_is_missing,
    workspaces,
)
from test_ffa_backward_wide import wide_steps  # noqa: F401

from magi_attention.testing import masks
from magi_attention.testing.uneven import WAYS


@pytest.mark.parametrize("dims", ((128, 128), (96, 80)), ids=str)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bf16", "fp16"))
def test_right_and_the_same_every_time(listed, dims, dtype):  # noqa: F811
    for seed in range(6):
        x = inputs(seed, documents(seed, kind=seed % 4), dims, dtype)
        dout = make_dout(x, seed)
        got = differentiate(x, dout)
        if has_132_multiprocessors():
            assert listed()[1] > 0
        assert_grads(x, got, truth(x, dout), (seed, dims))
        assert_same(differentiate(x, dout), got, dtype, seed)


def test_ways_to_split(listed):  # noqa: F811
    """Which they are differs from narrow steps; that tiles are cut, split by heads and left whole does not."""
    found = set()
    for name, (lengths, kind, heads, *_) in WAYS.items():
        slices = masks.varlen([0, *np.cumsum(lengths).tolist()], kind).array
        x = make_inputs(1, slices, sum(lengths), sum(lengths), heads, (128, 128), torch.bfloat16, DEVICE)
        dout = make_dout(x, 1)
        got = differentiate(x, dout)
        slots, units = listed()
        tiles = -(-sum(lengths) // 128)
        found.add((slots // heads[1], units // heads[1] - tiles))  # tiles that are split, units more than tiles
        assert_grads(x, got, truth(x, dout), name)
        assert_same(differentiate(x, dout), got, torch.bfloat16, name)
        assert_grads(x, differentiate(x, dout, sm_margin=20), truth(x, dout), (name, "fewer multiprocessors"))
    if has_132_multiprocessors():
        # A cut leaves one unit more, a tile that is split by heads three.
        assert any(0 < more < 3 * split for split, more in found), found
        assert any(0 < split and more == 3 * split for split, more in found), found


# With 132 SMs the last round of 16 tiles of 20 heads is split without a list.
@pytest.mark.parametrize(
    "total, heads, is_listed", ((3700, (40, 10), True), (2048, (80, 20), False)), ids=("10 heads", "20 heads")
)
def test_one_round_or_two(listed, total, heads, is_listed):  # noqa: F811
    for kind in (0, 1):
        x = make_inputs(7, documents(7, 3, kind, total), total, total, heads, (128, 128), torch.bfloat16, DEVICE)
        dout = make_dout(x, 7)
        got = differentiate(x, dout)
        if has_132_multiprocessors():
            assert (listed()[1] > 0) == is_listed
        assert_grads(x, got, truth(x, dout), kind)
        assert_same(differentiate(x, dout), got, torch.bfloat16, kind)


def test_unseen_rows():
    lengths, kind, heads, *_ = WAYS["two tiles cut, and the two shortest by heads"]
    slices = masks.varlen([0, *np.cumsum(lengths).tolist()], kind).array[1:]
    x = make_inputs(2, slices, sum(lengths), sum(lengths), heads, (128, 128), torch.bfloat16, DEVICE)
    dout = make_dout(x, 2)
    want = differentiate(x, dout)
    assert_grads(x, want, truth(x, dout))
    sees, is_seen = seen(x)
    for t, rows in ((x.q, ~sees), (dout, ~sees), (x.k, ~is_seen), (x.v, ~is_seen)):
        t[rows] = float("nan")
    assert_same(differentiate(x, dout), want, x.q.dtype)
