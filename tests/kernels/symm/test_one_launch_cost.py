# SPDX-License-Identifier: Apache-2.0
"""What a layer in one launch costs the host, in calls of functions: these can be counted without a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from remote_case import ROWS, remote_backend, remote_keys

from magi_attention.comm.transport.base import SingleTransport
from magi_attention.comm.transport.consistency import Use
from magi_attention.common.plan_cache import PlanCache
from magi_attention.common.slices import SliceTable
from magi_attention.functional.calls.first_use import BACKWARD, FORWARD, judge
from magi_attention.functional.dist_attn import dist_attn
from magi_attention.functional.one_launch.base import LAUNCHES, PreparedFused, _layout
from magi_attention.functional.one_launch.nvlink import FusedAttention
from magi_attention.functional.runtime import AttnPolicy, AttnRuntime, Prepared
from magi_attention.kernels import AttnOptions, default_registry
from magi_attention.meta.planner import build_plan
from magi_attention.native.stream_order import StreamOrder

pytestmark = pytest.mark.usefixtures("planner")

# Twice what it was when this was written, as that depends on the versions of torch and Python. To prepare anything anew
# unpacks thousands.
MOST = {"forward": 170, "backward": 260}


def stand_in() -> SimpleNamespace:
    """Prepared launches that launch nothing."""
    stream_order = StreamOrder(lambda: SimpleNamespace(record=lambda stream: None, cuda_event=1), object)
    nothing = lambda *_: None  # noqa: E731
    return SimpleNamespace(
        forward=remote_keys(), backward=remote_keys(), check=nothing, reduce=nothing,
        group=SimpleNamespace(enter=lambda s: stream_order.enter(s, False)), is_current=lambda: True,
    )  # fmt: skip


def layer_in_one_launch(monkeypatch):
    """A function of q, k, v that goes the way of a layer on a GPU, up to the launches."""
    ffa, launches, one = remote_backend(), stand_in(), object.__new__(FusedAttention)
    one.part = SimpleNamespace(slices=launches.forward.mask.slices)
    one.cache, one._wire, one._transport = PlanCache(), None, None
    plan = build_plan(SliceTable(np.array([[0, ROWS, 0, ROWS, 1]])), ROWS, 1)
    runtime = AttnRuntime(plan, SingleTransport(0), default_registry(), AttnPolicy())
    use = Use("call", lambda stage: {}, judge, FORWARD)
    fused = PreparedFused(one, ffa)
    prepared = Prepared(use, use.of(BACKWARD), ffa, ffa, fused, False, None, *[AttnOptions(0.25)] * 4)

    def prepare(q, k, v, *rest) -> Prepared:
        one.cache.get(LAUNCHES, _layout(q, k, v), lambda: launches)
        return prepared

    monkeypatch.setattr(runtime, "_prepare", prepare)
    return lambda q, k, v: dist_attn(q, k, v, runtime)[0]


def calls_of(function) -> int:
    """Calls of functions, by the interpreter's own count."""
    count = 0

    def profile(frame, event, argument) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_few_calls_for_a_layer(monkeypatch) -> None:
    layer = layer_in_one_launch(monkeypatch)
    q, k, v = (torch.zeros(ROWS, heads, 16, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
    grad, made = torch.zeros_like(q), []
    for _ in range(3):  # the first prepares
        found = {
            "forward": calls_of(lambda: made.append(layer(q, k, v))),
            "backward": calls_of(lambda: torch.autograd.grad(made.pop(), (q, k, v), grad)),
        }
    print(found)
    assert all(found[name] <= most for name, most in MOST.items()), found
