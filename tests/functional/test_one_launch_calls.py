# SPDX-License-Identifier: Apache-2.0
"""Attention in one launch, without GPUs: in which order a call launches, and what it waits for."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from magi_attention.common.slices import SliceTable
from magi_attention.functional.one_launch import OneLaunch, _leads, _Shapes
from magi_attention.kernels import Grads
from magi_attention.native.succession import Succession


class Spy:
    """Backend, boxes and launches in one: writes down what is asked of it, and on which stream."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.stream_now = 7
        self.runtime = SimpleNamespace(stream=lambda device: self.stream_now)
        self.remote = self
        self.group = self
        self.events_made = 0
        self._succession = Succession(self.make_event, lambda: self.stream_now)

    def make_event(self) -> SimpleNamespace:
        self.events_made += 1
        return SimpleNamespace(record=self.note("record"), wait=self.note("wait"))

    def note(self, what: str):
        return lambda *args: self.said.append(f"{what} {self.stream_now}")

    def __getattr__(self, name: str):
        return self.note(name)

    def in_succession(self, stream: int):
        return self._succession.next(stream, is_capturing=False)

    def forward_remote(self, q, k, v, remote, *rest):
        remote.push()
        self.said.append(f"kernel {self.stream_now}")

    def backward_remote(self, dout, q, k, v, out, lse, remote, *rest):
        remote.push()
        self.said.append(f"kernel {self.stream_now}")
        return Grads(q, k, v)


def test_calls_on_several_streams_follow_one_another(monkeypatch) -> None:
    """All calls of a group use the same boxes, in the same order on every rank."""
    spy = Spy()
    one = object.__new__(OneLaunch)
    one.part = SimpleNamespace(slices=None)
    monkeypatch.setattr(one, "_of", lambda q, k, v: spy, raising=False)
    x = torch.zeros(4, 2, 8)
    for stream, is_forward in ((7, True), (7, False), (8, True), (8, False)):
        spy.stream_now = stream
        if is_forward:
            one.forward(spy, x, x, x, None, None)
        else:
            one.backward(spy, x, x, x, x, x, x, None, None)
    push = {7: ("push 7", "push_again 7"), 8: ("push 8", "push_again 8")}
    wanted = []
    for stream in (7, 8):
        calls = [[push[stream][0], f"kernel {stream}", f"release {stream}"]]
        calls.append([push[stream][1], f"kernel {stream}", f"reduce {stream}"])
        for call in calls:
            first_here = ["wait 8"] if stream == 8 and call is calls[0] else []
            wanted += [f"check {stream}", *first_here, *call, f"record {stream}"]
    assert spy.said == wanted and spy.events_made == 1  # recorded anew, which does not change what waits already


def test_a_rank_whose_queries_see_nothing_leads_with_nothing() -> None:
    shapes = _Shapes(torch.device("cpu"), torch.bfloat16, 8, 2, (64, 64), (128, 128))
    part = SimpleNamespace(rows_received=0, total_keys=512, slices=SliceTable(np.zeros((0, 5), dtype=np.int64)))
    assert _leads(part, shapes) == (0.0, 0.0)
    part.rows_received, part.slices = 128, SliceTable(np.array([[0, 64, 384, 512, 0]]))
    assert _leads(part, shapes) == (1.0, 1.0)  # there is less to do than to wait for
