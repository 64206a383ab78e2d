# SPDX-License-Identifier: Apache-2.0
"""Operations that must not overlap, over streams: which waits for which."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from magi_attention.comm.transport import streams
from magi_attention.comm.transport.streams import OrderedStreams
from magi_attention.native.stream_order import StreamOrder


@pytest.fixture
def world(monkeypatch):
    """``said`` is what happens; ``current`` and ``side`` are streams, ``is_capturing`` a switch."""
    world = SimpleNamespace(said=[], is_capturing=False, side=SimpleNamespace(cuda_stream=9))
    world.current = SimpleNamespace(cuda_stream=7)
    events = iter("abcdefgh")

    def make_event():
        name = next(events)
        return SimpleNamespace(
            name=name,
            wait=lambda stream: world.said.append(f"{stream.cuda_stream} waits for {name}"),
            record=lambda stream: world.said.append(f"{stream.cuda_stream} records {name}"),
        )

    @contextmanager
    def behind_current(stream):
        world.said.append(f"{stream.cuda_stream} behind {world.current.cuda_stream}")
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: world.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: world.is_capturing)
    monkeypatch.setattr(streams, "behind_current", behind_current)
    world.ordered_streams = OrderedStreams(torch.device("cuda"))
    world.ordered_streams._stream_order = StreamOrder(make_event, keeps_ends=True)
    world.ordered_streams._side = SimpleNamespace(on=lambda device: world.side)
    return world


def test_each_follows_the_last_one(world) -> None:
    for is_beside in (False, False, True, True, False):
        with world.ordered_streams.next(is_beside) as ordered:
            world.said.append(f"work on {ordered.stream}")
        assert (ordered.work is None) == (not is_beside)
    assert world.said == [
        *("work on 7", "7 records a", "work on 7", "7 records b"),
        *("9 waits for b", "9 behind 7", "work on 9", "9 records c"),
        *("9 behind 7", "work on 9", "9 records d"),
        *("7 waits for d", "work on 7", "7 records e"),
    ]


def test_whoever_started_it_waits_for_its_own(world) -> None:
    with world.ordered_streams.next(True) as first:
        pass
    with world.ordered_streams.next(True):
        pass
    assert first.work.name == "a"  # not for what came after it


def test_what_was_launched_before_an_error_is_followed_too(world) -> None:
    with pytest.raises(RuntimeError), world.ordered_streams.next(False):
        raise RuntimeError
    with world.ordered_streams.next(True):
        pass
    assert "9 waits for a" in world.said


def test_a_capture_stays_on_its_stream(world) -> None:
    with world.ordered_streams.next(True):
        pass
    world.is_capturing = True
    said = list(world.said)
    with world.ordered_streams.next(True) as ordered:
        pass
    assert (ordered.stream, ordered.work) == (7, None) and world.said == said
