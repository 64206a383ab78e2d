# SPDX-License-Identifier: Apache-2.0
"""Launches that must not overlap follow one another on a device, whichever streams they are on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class StreamOrder:
    """Such launches of one device, with events from ``make_event()``: one for all, or with ``keeps_ends`` a new one for
    each, because somebody may wait for ``end`` later.

    Those captured in a CUDA graph are in the order of the capture; a replay does not look at those outside.
    """

    def __init__(
        self,
        make_event: Callable[[], Any] = torch.cuda.Event,
        current: Callable[[], Any] = torch.cuda.current_stream,
        keeps_ends: bool = False,
    ) -> None:
        self._make_event, self._current, self._keeps_ends = make_event, current, keeps_ends
        self._address, self._stream = 0, None  # of the last one
        self.end: Any = None  # of the last one: an event; None before the first

    def next(
        self, address: int, is_capturing: bool, stream: torch.cuda.Stream | None = None
    ) -> AbstractContextManager[None]:
        """What is launched inside follows the last one. ``address`` is that of its stream, the current one unless
        ``stream`` is given."""
        return nullcontext() if is_capturing else _Next(self, address, stream)

    def enter(self, address: int, is_capturing: bool) -> int:
        """As ``next``, for launches that record their end themselves: the address of the event for that, 0 for none.
        After launches that failed, ``exit`` records it."""
        if is_capturing:
            return 0
        self.wait_previous(address, None)
        if self.end is None:
            self.exit()  # torch makes an event when it records it first
        return self.end.cuda_event

    def wait_previous(self, address: int, stream: torch.cuda.Stream | None) -> None:
        """Puts the stream behind the last one."""
        if self._stream is None or self._address != address:
            # Asked for here alone: that unpacks as long as a launch, and every layer of a model passes by.
            stream = self._current() if stream is None else stream
            if self.end is not None:
                self.end.wait(stream)
            self._address, self._stream = address, stream

    def exit(self) -> None:
        """The stream has been given all of it."""
        if self.end is None or self._keeps_ends:
            self.end = self._make_event()
        self.end.record(self._stream)


class _Next(AbstractContextManager[None]):
    """A class, because a generator costs twice as much in every layer of a model."""

    def __init__(self, stream_order: StreamOrder, address: int, stream: torch.cuda.Stream | None) -> None:
        self._stream_order, self._address, self._stream = stream_order, address, stream

    def __enter__(self) -> None:
        self._stream_order.wait_previous(self._address, self._stream)

    def __exit__(self, *_: object) -> None:  # what was launched before an error is to be followed, too
        self._stream_order.exit()
