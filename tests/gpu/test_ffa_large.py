# SPDX-License-Identifier: Apache-2.0
"""A million tokens, and tensors of more than 2**31 elements: offsets must be computed in 64 bits."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from forward_oracle import Result, assert_right, make_inputs
from test_ffa_forward import attend, explicit_backend  # noqa: F401
from test_ffa_forward import pytestmark as on_hopper

from magi_attention.errors import UnsupportedError
from magi_attention.native.abi import KEY_BLOCK_SIZES
from magi_attention.testing import masks

pytestmark = [*on_hopper, pytest.mark.whole_gpu]

TOKENS, DOCUMENT = 1_000_000, 1_250


def need_memory(gigabytes: int) -> None:
    torch.cuda.empty_cache()  # what torch keeps in reserve counts as taken
    free = torch.cuda.mem_get_info()[0] // 10**9
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes} GB of free GPU memory, there are {free}")


def test_a_million_tokens():
    """q and out have 2.56e9 elements. Documents at both ends and in the middle are compared with dense attention."""
    need_memory(45)
    cuts = list(range(0, TOKENS + 1, DOCUMENT))
    x = make_inputs(0, masks.varlen(cuts, 1), TOKENS, TOKENS, (20, 2), (128, 128))
    assert x.q.numel() > 2**31
    got = attend(x, False)
    for first in (0, TOKENS // 2, TOKENS - DOCUMENT):
        rows = slice(first, first + DOCUMENT)
        part = replace(x, q=x.q[rows], k=x.k[rows], v=x.v[rows], slices=masks.causal(DOCUMENT))
        assert_right(part, Result(got.out[rows], got.lse[rows], None))
    assert not got.lse.isinf().any() and not got.out[::1000].isnan().any()


def test_more_keys_than_the_kernel_counts():
    """The limit is that of the kernel, whose key blocks have the size that its head dim allows."""
    tokens = 65_535 * max(KEY_BLOCK_SIZES) + 1
    x = make_inputs(2, type(masks.full(1))([[0, 1, 0, 5, 0]]), 1, tokens, (1, 1), (8, 8))
    with pytest.raises(UnsupportedError, match=f"{tokens} keys are more than the ") as refused:
        attend(x, False)
    most = int(re.search(r"more than the (\d+)", str(refused.value))[1])
    assert most % 65_535 == 0 and most // 65_535 in KEY_BLOCK_SIZES
    tokens = most + 1
    x = replace(x, k=x.k[:tokens], v=x.v[:tokens])
    with pytest.raises(UnsupportedError, match=f"{tokens} keys are more than the {most}"):
        attend(x, False)
    last = slice(tokens - 6, tokens - 1)
    most = type(x.slices)([[0, 1, 0, 5, 0], [0, 1, last.start, last.stop, 0]])
    got = attend(replace(x, k=x.k[:-1], v=x.v[:-1], slices=most), False)
    ends = replace(x, k=torch.cat([x.k[:5], x.k[last]]), v=torch.cat([x.v[:5], x.v[last]]), slices=masks.full(1))
    ends.slices = type(x.slices)([[0, 1, 0, 10, 0]])
    assert_right(ends, Result(got.out, got.lse, None))
    whole = type(x.slices)([[0, 1, 0, tokens - 1, 0]])
    got = attend(replace(x, k=x.k[:-1], v=x.v[:-1], slices=whole), False)
    scores = x.k[:-1, 0].double() @ x.q[0, 0].double() * x.scale
    assert (got.lse[0, 0] - scores.logsumexp(0)).abs() < 1e-4


def test_one_long_row_of_keys():
    """64 queries over a million keys that have more than 2**31 elements; compared over slices of the keys."""
    need_memory(45)
    heads = 18
    x = make_inputs(1, masks.full(64), 64, TOKENS, (heads, heads), (128, 128))
    assert x.k.numel() > 2**31
    x = replace(x, slices=type(x.slices)([[0, 64, TOKENS - 3_000, TOKENS, 1]]))
    got = attend(x, False)
    tail = slice(TOKENS - 3_000, TOKENS)
    part = replace(x, k=x.k[tail], v=x.v[tail], slices=type(x.slices)([[0, 64, 0, 3_000, 1]]))
    assert_right(part, Result(got.out, got.lse, None))
    whole = replace(x, slices=type(x.slices)([[0, 64, 0, TOKENS, 0]]))
    got = attend(whole, False)
    for head in (0, heads - 1):
        scores = x.q[:, head].double() @ x.k[:, head].double().T * x.scale
        lse = scores.logsumexp(1)
        out = (scores - lse[:, None]).exp() @ x.v[:, head].double()
        assert (got.lse[:, head] - lse).abs().max() < 1e-4
        assert (got.out[:, head] - out).abs().max() < 1e-4
