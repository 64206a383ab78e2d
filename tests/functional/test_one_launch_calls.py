# SPDX-License-Identifier: Apache-2.0
"""Attention in one launch, without GPUs: in which order a call launches, and what it waits for."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from magi_attention.functional.one_launch import OneLaunch, _pace, _Shapes
from magi_attention.kernels.ffa_remote import RemoteGrads
from magi_attention.native.succession import Succession


class Spy:
    """Backend, boxes and launches in one: writes down what is asked of it, and on which stream."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.stream_now = 7
        self.runtime = SimpleNamespace(stream=lambda device: self.stream_now)
        self.group = self
        self.forward = SimpleNamespace(push=self.note("push"))
        self.backward = SimpleNamespace(push=self.note("push_again"))
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
        remote.push((1, 2), self.stream_now)
        self.said.append(f"kernel {self.stream_now}")

    def backward_remote(self, dout, q, k, v, out, lse, remote, *rest):
        remote.push((1, 2), self.stream_now)
        self.said.append(f"kernel {self.stream_now}")
        return RemoteGrads(q, 3, 4, q, None)


def test_calls_on_several_streams_follow_one_another(monkeypatch) -> None:
    """All calls of a group use the same boxes, in the same order on every rank."""
    spy = Spy()
    one = object.__new__(OneLaunch)
    one.part = SimpleNamespace(slices=None)
    monkeypatch.setattr(one, "_of", lambda q, k, v: (spy, k, v), raising=False)
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


def test_pace() -> None:
    """Rows at the speed of a push, flops of a pair, and heads as many as the kernel works on at a time."""
    shapes = _Shapes(torch.device("cpu"), torch.bfloat16, 16, 2, (64, 64), (128, 128))
    part = SimpleNamespace(slot_rows=np.array([128, 512]), total_keys=2**18)
    pace = _pace(part, shapes)
    assert pace.slots.tolist() == pytest.approx([1e-5 + rows * 512 / 2.2e11 for rows in (128, 512)])
    assert pace.pair == 256 / 5e12 and pace.pair_backward == 640 / 4.3e12
    assert (pace.heads, pace.section_heads) == (8, 8)  # keys and values of one kv head are 64 MiB
    part.total_keys = 0
    assert _pace(part, shapes).section_heads == 16
