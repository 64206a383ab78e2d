# SPDX-License-Identifier: Apache-2.0
"""A model around calc_attn, compiled without graph breaks: the same numbers as without, on one rank and on two."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.debugging import aot_eager

from magi_attention import api
from magi_attention.comm.transport.base import SingleTransport
from magi_attention.common.ranges import AttnRanges
from magi_attention.errors import UnknownKeyError
from magi_attention.testing.spawn import run_processes

TOTAL = 96


class Layer(torch.nn.Module):
    """Projections, attention over the sequence of all ranks, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(16, 32)

    def forward(self, x, key, sink):
        q, k, v = self.qkv(x).view(-1, 4, 8).split([2, 1, 1], 1)
        out, meta = api.calc_attn(q, k, v, key, sink=sink, return_max_logits=True)
        return out.reshape(-1, 16).relu() + x, meta.lse, meta.max_logits


def make_key(group, bounds: list[list[int]], degree: int):
    ranges = AttnRanges.from_ranges(bounds)
    config = api.DistAttnConfig(
        dispatch_config=api.DispatchConfig(chunk_size=8),
        overlap_config=api.OverlapConfig(degree=degree, min_chunk_size=8),
    )
    return api.magi_attn_flex_key(ranges, ranges, "causal", TOTAL, TOTAL, 2, 1, 8, 0, group, dist_attn_config=config)


def differences(group, degree: int) -> list[float]:
    """Between compiled and plain, for out, lse, max_logits and gradients, under two masks."""
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(TOTAL, 16)
    sink = torch.randn(2, 2, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = []
    for bounds in ([[0, 40], [40, TOTAL]], [[0, TOTAL]]):
        key = make_key(group, bounds, degree)
        results = []
        for run in (layer, compiled):
            layer.zero_grad(set_to_none=True)
            sink.grad = None
            got = run(api.dispatch(x, key), key, sink)
            (got[0].square().sum() + got[1].square().sum()).backward()
            assert not got[2].requires_grad
            grads = [layer.qkv.weight.grad, layer.qkv.bias.grad, sink.grad]
            results.append([t.detach().clone() for t in (*got, *grads)])
        found += [float((a - b).abs().max()) for a, b in zip(*results)]
    return found


@pytest.mark.parametrize("degree", [0, 1])
def test_on_one_rank(degree):
    assert max(differences(SingleTransport(), degree)) == 0


def on_two_ranks(rank: int, world: int) -> float:
    worst = 0.0
    for degree, hide_tail in ((0, "0"), (1, "0"), (2, "1")):
        os.environ["MAGI_ATTENTION_BWD_HIDE_TAIL_REDUCE"] = hide_tail
        worst = max(worst, *differences(dist.group.WORLD, degree))
    return worst


def graphs_of_many_masks(group, degree: int, masks: int = 14) -> int:
    """How often a model is compiled for so many masks; torch gives up after eight."""
    torch._dynamo.reset()
    compiled_graphs = []

    def backend(graph, examples):
        compiled_graphs.append(graph)
        return aot_eager(graph, examples)

    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(TOTAL, 16)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for i in range(masks):
        key = make_key(group, [[0, 20 + 3 * i], [20 + 3 * i, TOTAL]], degree)
        local = api.dispatch(x, key)
        results = []
        for run in (layer, compiled):
            layer.zero_grad(set_to_none=True)
            got = run(local, key, None)
            got[0].square().sum().backward()
            results.append([got[0].detach(), got[1], got[2], layer.qkv.weight.grad.clone()])
        assert all(torch.equal(a, b) for a, b in zip(*results)), i
    return len(compiled_graphs)


def test_a_model_is_compiled_once_for_all_masks():
    assert graphs_of_many_masks(SingleTransport(), 1) == 2  # for one, and then for any


def many_masks_on_two_ranks(rank: int, world: int) -> list[int]:
    """With and without keys of the last stage that the forward keeps, as many as the mask says."""
    counts = []
    for degree, hide_tail in ((1, "0"), (2, "1")):
        os.environ["MAGI_ATTENTION_BWD_HIDE_TAIL_REDUCE"] = hide_tail
        counts.append(graphs_of_many_masks(dist.group.WORLD, degree))
    return counts


def two_ranks(rank: int, world: int) -> tuple[float, list[int]]:
    return on_two_ranks(rank, world), many_masks_on_two_ranks(rank, world)


def test_on_two_ranks():
    for worst, (plain, with_tail) in run_processes(2, two_ranks):
        assert worst == 0
        assert plain == 2 and with_tail <= 4  # none kept, and one more for any number


def test_a_key_that_was_never_made_is_missed():
    made = make_key(SingleTransport(), [[0, TOTAL]], 1)
    key = dataclasses.replace(made, _manager=[], _facts=None)
    compiled = torch.compile(Layer(), fullgraph=True, backend="aot_eager")
    with pytest.raises(UnknownKeyError, match="does not exist"):
        compiled(torch.randn(TOTAL, 16), key, None)


def test_a_key_that_was_cleared_is_missed():
    group = SingleTransport()
    key = make_key(group, [[0, TOTAL]], 1)
    compiled = torch.compile(Layer(), fullgraph=True, backend="aot_eager")
    x = torch.randn(TOTAL, 16)
    compiled(x, key, None)
    api.clear_cache(group)
    with pytest.raises(UnknownKeyError, match="does not exist"):
        compiled(x, key, None)
