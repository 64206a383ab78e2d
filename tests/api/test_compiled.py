# SPDX-License-Identifier: Apache-2.0
"""A model around calc_attn and the rows of a key, compiled without graph breaks: as without, on one rank and two."""

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

TOTAL = 90  # which chunks of 8 on two ranks pad to 96


class Layer(torch.nn.Module):
    """Projections, attention over the sequence of all ranks, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(16, 32)

    def forward(self, x, key, sink):
        q, k, v = self.qkv(x).view(-1, 4, 8).split([2, 1, 1], 1)
        out, meta = api.calc_attn(q, k, v, key, sink=sink, return_max_logits=True)
        return out.reshape(-1, 16).relu() + x, meta.lse, meta.max_logits


class Model(torch.nn.Module):
    """Everything that a key has; the weight makes gradients differ between ranks."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer, self.weight = Layer(), torch.nn.Parameter(torch.tensor(1.0 + rank))

    def forward(self, x, key, sink, cu):
        mine = api.dispatch(x * self.weight, key, pad_value=2.0)
        out, *statistics = self.layer(mine, key, sink)
        places = api.get_position_ids(key)
        turned = api.roll(out.sin(), -1, 0, key) + api.roll_simple(mine, 3, 0, key)
        turned = api.roll(turned.t(), 1, 1, key).t() * places[:, None]
        turned = turned + api.get_position_ids(key, cu)[:, None] + api.get_labels(places, key, cu, depth=2)[:, None]
        whole = api.undispatch(turned, key), api.undispatch(mine.exp(), key, is_partial_grad=True)
        return *whole, *statistics, places


def make_key(group, bounds: list[list[int]], degree: int):
    ranges = AttnRanges.from_ranges(bounds)
    config = api.DistAttnConfig(
        dispatch_config=api.DispatchConfig(chunk_size=8),
        overlap_config=api.OverlapConfig(degree=degree, min_chunk_size=8),
    )
    return api.magi_attn_flex_key(ranges, ranges, "causal", TOTAL, TOTAL, 2, 1, 8, 0, group, dist_attn_config=config)


def differences(group, degree: int, rank: int = 0) -> list[float]:
    """Between compiled and plain, for all results and gradients, under two masks."""
    torch.manual_seed(0)
    model, x = Model(rank), torch.randn(TOTAL, 16, requires_grad=True)
    sink = torch.randn(2, 2, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = []
    for bounds in ([[0, 40], [40, TOTAL]], [[0, TOTAL]]):
        key, cu = make_key(group, bounds, degree), torch.tensor([0, bounds[0][1], TOTAL], dtype=torch.int32)
        results = []
        for run in (model, compiled):
            model.zero_grad(set_to_none=True)
            x.grad = sink.grad = None
            got = run(x, key, sink, cu)
            (got[0].cos().sum() + (got[1] * (1 + rank)).sum() + got[2].square().sum()).backward()
            assert got[0].shape == got[1].shape == (TOTAL, 16) and not any(y.requires_grad for y in got[3:])
            grads = [*(p.grad for p in model.parameters()), x.grad, sink.grad]
            results.append([t.detach().double() for t in (*got, *grads)])
        found += [float((a - b).abs().max()) for a, b in zip(*results)]
    return found


@pytest.mark.parametrize("degree", [0, 1])
def test_on_one_rank(degree):
    assert max(differences(SingleTransport(), degree)) == 0


def on_two_ranks(rank: int, world: int) -> float:
    worst = 0.0
    for degree, hide_tail in ((0, "0"), (2, "1")):  # with one stage: many_masks_on_two_ranks
        os.environ["MAGI_ATTENTION_BWD_HIDE_TAIL_REDUCE"] = hide_tail
        worst = max(worst, *differences(dist.group.WORLD, degree, rank))
    return worst


def graphs_of_many_masks(group, degree: int, masks: int = 10) -> int:
    """How often a model is compiled for so many masks; torch gives up after eight."""
    torch._dynamo.reset()
    compiled_graphs = []

    def backend(graph, examples):
        compiled_graphs.append(graph)
        return aot_eager(graph, examples)

    torch.manual_seed(0)
    model, x = Model(0), torch.randn(TOTAL, 16)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for i in range(masks):
        cut = 20 + 3 * i
        key, cu = make_key(group, [[0, cut], [cut, TOTAL]], degree), torch.tensor([0, cut, TOTAL], dtype=torch.int32)
        results = []
        for run in (model, compiled):
            model.zero_grad(set_to_none=True)
            got = run(x, key, None, cu)
            got[0].square().sum().backward()
            results.append([*(y.detach() for y in got), model.layer.qkv.weight.grad.clone()])
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


def test_wrong_rows_and_a_key_that_was_cleared():
    group = SingleTransport()
    key = make_key(group, [[0, TOTAL]], 1)
    layer = torch.compile(Layer(), fullgraph=True, backend="aot_eager")
    rows = torch.compile(lambda x, key: api.dispatch(x, key) * 2, fullgraph=True, backend="aot_eager")
    x = torch.ones(TOTAL, 16)
    layer(x, key, None)
    with pytest.raises(AssertionError, match="dispatch"):
        rows(torch.zeros(TOTAL + 1, 2), key)
    assert rows(x, key).sum() == 2 * 16 * TOTAL
    api.clear_cache(group)
    for use in (lambda: layer(x, key, None), lambda: rows(x, key)):
        with pytest.raises(UnknownKeyError, match="does not exist"):
            use()
