# SPDX-License-Identifier: Apache-2.0
"""In deterministic mode, or where the first writer stores: what the first call of a mask makes is kept for the next.

The other tests of these orders call most masks several times, so that they meet both; here is which call makes it,
and that calls which make it every time stand other work beside them, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from backward_oracle import assert_grads, assert_same, make_dout, options_of, truth, watch_backwards
from forward_oracle import Inputs, make_inputs
from long_kernels import beside_long_kernels
from places import in_a_process
from test_ffa_backward import (  # noqa: F401
    DEVICE,
    explicit_backend_in_poisoned_memory,
    forward,
    pytestmark,
)
from test_ffa_backward_deterministic import CASES, assert_same_bits

from magi_attention.common.plan_cache import PlanCache
from magi_attention.kernels.ffa import backward as ffa_backward
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.ffa.plans import DEVICE_PLANS, KEPT_ORDERS, Kept, PlanShape, RangePlans, table_plan
from magi_attention.kernels.types import BackwardOperands, Grads
from magi_attention.native import abi
from magi_attention.native.planner.schedule import BwdSchedule, Split
from magi_attention.testing import masks

MANY = (1337, (96, 24))  # on 132 multiprocessors two work tiles for each, so that tiles may be split
MODES = {
    "deterministic, 64": BwdSchedule(64, 0),
    "deterministic, 80": BwdSchedule(80, 0),
    "deterministic, halves of the heads": BwdSchedule(64, 2),
    "deterministic, split tiles": BwdSchedule(80, 0, split=Split(1, 5, 2)),
    "deterministic, direct store": BwdSchedule(80, 0, direct_dq_store=True),
    "deterministic, by document": BwdSchedule(64, 0, by_document=True),
    "first writer, 64": BwdSchedule(64, 0, first_writer=True),
    "first writer, 80": BwdSchedule(80, 0, first_writer=True),
    "first writer, direct store": BwdSchedule(64, 0, first_writer=True, direct_dq_store=True),
}


class Calls:
    """Backwards of one mask by one schedule, and how each was launched."""

    def __init__(self, x: Inputs, schedule: BwdSchedule, monkeypatch=None) -> None:
        self.x, self.dout, self.ffa = x, make_dout(x), FfaBackend()
        self.out, self.lse = forward(x, self.ffa)
        self.options = replace(options_of(x), deterministic=not schedule.first_writer)
        self.launches: list[abi.FfaBwdParams] = []
        if monkeypatch is not None:
            monkeypatch.setattr(ffa_backward, "select_schedule", lambda *_: schedule)
            watch_backwards(monkeypatch, self.launches.append)

    def __call__(self) -> Grads:
        x = self.x
        return self.ffa.backward_final(
            BackwardOperands(self.dout, x.q, x.k, x.v, self.out, self.lse, x.slices, self.options)
        )

    def assert_as(self, got: Grads, want: Grads, note: object) -> None:
        if self.options.deterministic:
            assert_same_bits(got, want, note)
        else:
            assert_same(got, want, self.x.q.dtype, note)

    @property
    def is_made(self) -> list[tuple[bool, bool]]:
        """For each launch, whether it had an order and whether that was made before."""
        return [(bool(p.order), bool(p.order_is_made)) for p in self.launches]


def make_calls(name: str, mode: str, monkeypatch, dim: int = 128) -> Calls:
    total, heads = MANY
    x = make_inputs(0, CASES[name](total), total, total, heads, (dim, dim), device=DEVICE)
    return Calls(x, MODES[mode], monkeypatch)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_made_by_the_first_call(name, mode, monkeypatch):
    calls = make_calls(name, mode, monkeypatch)
    want = truth(calls.x, calls.dout)
    first = calls()
    assert_grads(calls.x, first, want, (name, mode))
    ((kept,),) = (k.orders.values(KEPT_ORDERS) for k in calls.x.slices.cache.values(DEVICE_PLANS) if k.orders)
    made = kept.words.clone()
    for n in range(4):
        again = calls()
        calls.assert_as(again, first, (name, mode, n))
        assert_grads(calls.x, again, want, (name, mode, n))
    assert calls.is_made == [(True, False)] + 4 * [(True, True)]
    assert torch.equal(kept.words, made), "later calls only read it"


@pytest.mark.parametrize("dim", (64, 256))
@pytest.mark.parametrize("mode", ("deterministic, 64", "first writer, 64"))
def test_other_head_dims(dim, mode, monkeypatch):
    for name in CASES:
        calls = make_calls(name, mode, monkeypatch, dim)
        first, want = calls(), truth(calls.x, calls.dout)
        for n in range(3):
            again = calls()
            calls.assert_as(again, first, (name, n))
            assert_grads(calls.x, again, want, (name, n))
        assert calls.is_made == [(True, False)] + 3 * [(True, True)]


@pytest.mark.parametrize("mode", ("deterministic, 80", "first writer, 64"))
def test_another_stream_and_graphs(mode, monkeypatch):
    """Each stream has one. A graph reads that of the stream on which it was captured, or makes it at each replay."""
    calls = make_calls("documents", mode, monkeypatch)
    first, beside = calls(), torch.cuda.Stream()
    for has_list in (False, True):
        torch.cuda.synchronize()
        if has_list:
            with torch.cuda.stream(beside):
                calls.assert_as(calls(), first, (mode, "stream"))
            torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=beside):
            got = calls()
        assert calls.is_made[-1] == (has_list, has_list)
        for n in range(5):
            for grad in (got.dq, got.dk, got.dv):
                grad.fill_(float("nan"))
            graph.replay()
            calls.assert_as(got, first, (mode, "graph", has_list, n))
    assert calls.is_made == [(True, False), (False, False), (True, False), (True, True)]


@pytest.mark.parametrize("mode", ("deterministic, 64", "first writer, 80"))
def test_a_plan_of_other_shapes_gives_nan(mode, monkeypatch):
    calls = make_calls("causal", mode, monkeypatch)
    shape = PlanShape(328, 328, calls.ffa.library.backward_tile(128, 128), is_transposed=True)
    wrong = table_plan(masks.causal(328), shape, calls.x.q.device)
    kept = Kept(wrong, wrong.data_ptr(), PlanCache())
    monkeypatch.setattr(RangePlans, "plan", lambda *_: kept)
    for _ in range(3):
        got = calls()
        for name in ("dq", "dk", "dv"):
            assert getattr(got, name).isnan().all(), name
    assert calls.is_made == [(True, False), (True, True), (True, True)]


def made_every_time(rank: int, world: int, mode: str) -> bool:
    """Beside long kernels, as calls whose order was kept are in the other tests."""
    Kept.order_of = lambda *_: None
    schedule: BwdSchedule = MODES[mode]
    choose: Callable = lambda *_: schedule  # noqa: E731
    ffa_backward.select_schedule = choose
    for name, make in CASES.items():
        for dim in (64, 128, 256) if schedule.block_m == 64 else (128,):
            calls = Calls(make_inputs(3, make(700), 700, 700, (8, 2), (dim, dim), device=DEVICE), schedule)
            torch.cuda.synchronize()
            first = calls()
            for n in beside_long_kernels():
                calls.assert_as(calls(), first, (name, dim, n))
    return True


@pytest.mark.parametrize("mode", ("deterministic, 64", "deterministic, 80", "first writer, 64"))
def test_made_every_time_beside_other_work(mode):
    """In a process of its own: where CTAs once waited in a circle, nothing but its end helped."""
    assert in_a_process(made_every_time, mode)
