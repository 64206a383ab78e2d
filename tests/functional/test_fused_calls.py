# SPDX-License-Identifier: Apache-2.0
"""Attention in one launch, without GPUs: in which order a call launches, and what it waits for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

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


def test_calls_in_a_graph_neither_wait_nor_record() -> None:
    """They are in the order of the capture; the next call outside follows the last one outside."""
    spy = Spy()
    stream_order = StreamOrder(spy.make_event, lambda: spy.stream_now)
    assert stream_order.enter(7, is_capturing=False) == 5
    spy.said.clear()
    assert stream_order.enter(8, is_capturing=True) == 0 and spy.said == []
    spy.stream_now = 8
    assert stream_order.enter(8, is_capturing=False) == 5 and spy.said == ["wait 8"]
