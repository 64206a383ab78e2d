# SPDX-License-Identifier: Apache-2.0
"""Dispatch, undispatch, roll and position ids inside a compiled model: as they are without, on one rank and two."""

from __future__ import annotations

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


def make_key(group, cut: int):
    ranges = AttnRanges.from_ranges([[0, cut], [cut, TOTAL]])
    config = api.DistAttnConfig(dispatch_config=api.DispatchConfig(chunk_size=8))
    return api.magi_attn_flex_key(ranges, ranges, "causal", TOTAL, TOTAL, 2, 1, 8, 0, group, dist_attn_config=config)


def whole(x, w, key, cu):
    """A model with everything in it; the weight makes gradients differ between ranks."""
    mine = api.dispatch(x * w, key, pad_value=2.0)
    places = api.get_position_ids(key)
    turned = api.roll(mine.sin(), -1, 0, key) + api.roll_simple(mine, 3, 0, key)
    turned = api.roll(turned.t(), 1, 1, key).t() * places[:, None]
    turned = turned + api.get_position_ids(key, cu)[:, None] + api.get_labels(places, key, cu, depth=2)[:, None]
    return api.undispatch(turned, key), api.undispatch(mine.exp(), key, is_partial_grad=True), places


def differences(group, compiled, cut: int, rank: int) -> float:
    """Between compiled and plain, in results and gradients."""
    key, found = make_key(group, cut), []
    torch.manual_seed(cut)
    x = torch.randn(TOTAL, 3)
    for run in (whole, compiled):
        leaf, w = x.clone().requires_grad_(), torch.tensor(1.0 + rank, requires_grad=True)
        a, b, places = run(leaf, w, key, torch.tensor([0, cut, TOTAL], dtype=torch.int32))
        (a.cos().sum() + (b * (1 + rank)).sum()).backward()
        found.append((a.detach(), b.detach(), places.float(), leaf.grad, w.grad))
    assert found[0][0].shape == (TOTAL, 3) and found[0][2].dtype == torch.float32
    return max(float((p - q).abs().max()) for p, q in zip(*found))


def many_masks(group, rank: int) -> tuple[float, int]:
    """The largest difference, and how often the model is compiled."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, examples):
        graphs.append(graph)
        return aot_eager(graph, examples)

    compiled = torch.compile(whole, fullgraph=True, backend=backend)
    return max(differences(group, compiled, cut, rank) for cut in range(10, 80, 6)), len(graphs)


def test_on_one_rank():
    worst, graphs = many_masks(SingleTransport(), 0)
    assert worst < 1e-5 and graphs == 2  # for one mask, and then for any


def on_two_ranks(rank: int, world: int) -> tuple[float, int]:
    return many_masks(dist.group.WORLD, rank)


def test_on_two_ranks():
    for worst, graphs in run_processes(2, on_two_ranks):
        assert worst < 1e-5 and graphs == 2


def test_wrong_rows_and_dropped_keys_are_sentences():
    group = SingleTransport()
    key = make_key(group, 40)
    compiled = torch.compile(lambda x, key: api.dispatch(x, key) * 2, fullgraph=True, backend="aot_eager")
    with pytest.raises(AssertionError, match="dispatch"):
        compiled(torch.zeros(TOTAL + 1, 2), key)
    assert compiled(torch.ones(TOTAL, 2), key).sum() == 2 * 2 * TOTAL
    api.clear_cache(group)
    with pytest.raises(UnknownKeyError, match="does not exist"):
        compiled(torch.zeros(TOTAL, 2), key)
