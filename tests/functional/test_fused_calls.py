# SPDX-License-Identifier: Apache-2.0
"""Attention in one launch, without GPUs: in which order a call launches, and what it waits for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from magi_attention.functional.one_launch.nodes import NodeFusedAttention
from magi_attention.functional.one_launch.nvlink import FusedAttention
from magi_attention.kernels.ffa.peer_kv import FusedLaunch, RemoteGrads
from magi_attention.kernels.types import BackwardOperands, Operands
from magi_attention.native.stream_order import StreamOrder


class Spy:
    """Backend, buffers and launches in one: writes down what is asked of it, and on which stream."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.stream_now = 7
        self.runtime = SimpleNamespace(stream=lambda device: self.stream_now)
        self.group = self
        self.forward, self.backward = "put", "put_again"
        self.events_made = 0
        self._stream_order = StreamOrder(self.make_event, lambda: self.stream_now)
        self.fails_at = ""

    def make_event(self) -> SimpleNamespace:
        self.events_made += 1
        return SimpleNamespace(record=self.note("record"), wait=self.note("wait"), cuda_event=5)

    def note(self, what: str):
        return lambda *args: self.say(what, args)

    def say(self, what: str, given: tuple = ()) -> None:
        self.said.append(f"{what} {self.stream_now}")
        if what == self.fails_at:
            raise ValueError(what)
        if what == "reduce":
            assert given[-2:] == (5, self.stream_now), "the event to be recorded, and the stream"

    def __getattr__(self, name: str):
        return self.note(name)

    def enter(self, stream: int) -> int:
        return self._stream_order.enter(stream, is_capturing=False)

    def exit_early(self, event: int) -> None:
        assert event == 5
        self._stream_order.exit()

    def forward_fused(self, x, remote, event):
        assert event == 5
        return self.fused(remote, None)

    def backward_fused(self, x, remote):
        return self.fused(remote, RemoteGrads(x.q, x.k, x.v, 3, 4, x.q))

    def fused(self, remote, result) -> FusedLaunch:
        return FusedLaunch(None, lambda: (self.say(remote), self.say("kernel"))[1], (), "", result, None)


def one_launch(spy: Spy, monkeypatch) -> FusedAttention:
    one = object.__new__(FusedAttention)
    one.part = SimpleNamespace(slices=None)
    monkeypatch.setattr(one, "_of", lambda x: (spy, x), raising=False)
    return one


def run(one: FusedAttention, spy: Spy, is_forward: bool) -> None:
    x = torch.zeros(4, 2, 8)
    if is_forward:
        one.forward(spy, Operands(x, x, x, None, None))
    else:
        one.backward(spy, BackwardOperands(x, x, x, x, x, x, None, None))


def test_calls_on_several_streams_follow_one_another(monkeypatch) -> None:
    """All calls of a group use the same buffers, in the same order on every rank."""
    spy = Spy()
    one = one_launch(spy, monkeypatch)
    for stream, is_forward in ((7, True), (7, False), (8, True), (8, False)):
        spy.stream_now = stream
        run(one, spy, is_forward)
    wanted = []
    for stream in (7, 8):
        first_here = {7: ["record 7"], 8: ["wait 8"]}[stream]  # so torch makes the event; the end of the last call
        wanted += [f"check {stream}", *first_here, *[f"{x} {stream}" for x in ("put", "kernel")]]
        wanted += [f"check {stream}", *[f"{x} {stream}" for x in ("put_again", "kernel", "reduce")]]
    assert spy.said == wanted and spy.events_made == 1  # recorded anew, which does not change what waits already


@pytest.mark.parametrize("is_forward, fails_at", ((True, "kernel"), (False, "kernel"), (False, "reduce")))
def test_what_was_launched_before_an_error_is_followed(is_forward, fails_at, monkeypatch) -> None:
    spy = Spy()
    one = one_launch(spy, monkeypatch)
    run(one, spy, True)
    spy.fails_at = fails_at
    with pytest.raises(ValueError, match=fails_at):
        run(one, spy, is_forward)
    assert spy.said[-2:] == [f"{fails_at} 7", "record 7"]
    spy.fails_at, spy.stream_now = "", 8
    run(one, spy, True)
    assert spy.said[-4:-2] == ["check 8", "wait 8"]


@pytest.mark.parametrize("deterministic", [False, True])
def test_over_nodes_rows_are_sent_right_before_the_kernel(deterministic, monkeypatch) -> None:
    """When all else is made, and behind the deterministic kernel before."""
    said: list[str] = []

    def note(what: str, *_: object) -> None:
        said.append(what)

    @contextmanager
    def turn() -> Iterator[None]:
        said.append("turn")
        yield
        said.append("end of turn")

    def fused(result: object, turn: Any = None) -> FusedLaunch:
        said.append("ready")
        return FusedLaunch(None, lambda: note("kernel"), (), "", result, None, turn)

    q = torch.zeros(4, 2, 8)
    grads = RemoteGrads(q, q, q, 3, 4, q)
    backend = SimpleNamespace(
        forward_fused=lambda x, keys: fused((q, q, None)),
        backward_fused=lambda x, keys: fused(grads, turn() if deterministic else None),
    )
    verbs = {x: partial(note, x) for x in ("copy_in", "start", "run", "finish")}
    exchange = SimpleNamespace(cast=SimpleNamespace(**verbs), reduce=SimpleNamespace(**verbs))
    launches = SimpleNamespace(exchange=exchange, forward=None, backward=None, add=partial(note, "add"))
    one = object.__new__(NodeFusedAttention)
    one._group = SimpleNamespace(
        check=note, check_if_done=note, ordered=lambda is_beside: nullcontext(SimpleNamespace(stream=7))
    )
    monkeypatch.setattr(one, "_of", lambda x: (launches, x), raising=False)
    assert one.forward(backend, Operands(q, q, q, None, None))[0] is q
    place = (said.index("copy_in"), said.index("kernel"))
    assert said[place[0] : place[1] + 2] == ["copy_in", "ready", "start", "kernel", "finish"]
    said.clear()
    assert one.backward(backend, BackwardOperands(q, q, q, q, q, q, None, None)).dk is q
    kernel = ["turn", "start", "kernel", "end of turn"] if deterministic else ["start", "kernel"]
    begin, end = said.index("copy_in"), said.index("add")
    assert said[begin : end + 3] == ["copy_in", "ready", *kernel, "run", "add", "finish", "finish"]


def test_calls_in_a_graph_neither_wait_nor_record() -> None:
    """They are in the order of the capture; the next call outside follows the last one outside."""
    spy = Spy()
    stream_order = StreamOrder(spy.make_event, lambda: spy.stream_now)
    assert stream_order.enter(7, is_capturing=False) == 5
    spy.said.clear()
    assert stream_order.enter(8, is_capturing=True) == 0 and spy.said == []
    spy.stream_now = 8
    assert stream_order.enter(8, is_capturing=False) == 5 and spy.said == ["wait 8"]
