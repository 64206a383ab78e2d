# SPDX-License-Identifier: Apache-2.0
"""Repeated calls of the public function on a Hopper GPU: launched by native code, with the same bits."""

from __future__ import annotations

import pytest
import torch
from forward_oracle import make_inputs

from magi_attention.errors import UnsupportedError
from magi_attention.functional.flex_flash_attn import flex_flash_attn_func
from magi_attention.kernels.ffa import custom_ops
from magi_attention.native import loader
from magi_attention.testing import masks

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_HOPPER, reason="needs a GPU of compute capability 9.0 (H100, H200)"),
]
KNOWN = flex_flash_attn_func.known_calls


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    for name in custom_ops.WATCHED:
        monkeypatch.delenv(name, raising=False)
    try:
        loader.load_host()
    except UnsupportedError as error:
        pytest.skip(str(error))
    KNOWN.forget()
    yield
    KNOWN.forget()


def test_a_repeated_call_is_known_and_has_the_same_bits():
    x = make_inputs(0, masks.varlen([0, 100, 300], 1), 300, 300, (8, 2), (128, 128), device="cuda")
    q, k, v, ranges = x.q.detach(), x.k.detach(), x.v.detach(), x.ranges
    want, meta = flex_flash_attn_func(q, k, v, *ranges, return_max_logits=True)
    for _ in range(3):
        got, again = KNOWN.find(q, k, v, *ranges, return_max_logits=True)
        assert torch.equal(got, want) and torch.equal(again.lse, meta.lse)
        assert torch.equal(again.max_logits, meta.max_logits)
    k.copy_(v)  # other values, not another call
    got, _ = KNOWN.find(q, k, v, *ranges, return_max_logits=True)
    KNOWN.forget()
    want, _ = flex_flash_attn_func(q, k, v, *ranges, return_max_logits=True)
    assert torch.equal(got, want)
    ranges[0][0, 1] -= 1
    assert KNOWN.find(q, k, v, *ranges, return_max_logits=True) is None


def test_streams_and_graphs_take_the_usual_way():
    x = make_inputs(0, masks.causal(300), 300, 300, (8, 2), (128, 128), device="cuda")
    q, k, v, ranges = x.q.detach(), x.k.detach(), x.v.detach(), x.ranges
    want, _ = flex_flash_attn_func(q, k, v, *ranges)
    assert KNOWN.find(q, k, v, *ranges) is not None and KNOWN.find(q.requires_grad_(), k, v, *ranges) is None
    q = q.detach()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert KNOWN.find(q, k, v, *ranges) is None
        flex_flash_attn_func(q, k, v, *ranges)
        assert KNOWN.find(q, k, v, *ranges) is not None and len(KNOWN) == 2
    torch.cuda.current_stream().wait_stream(side)
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        found.append(KNOWN.find(q, k, v, *ranges))
        got, _ = flex_flash_attn_func(q, k, v, *ranges)
    assert found == [None] and len(KNOWN) == 2
    graph.replay()
    assert torch.equal(got, want)
