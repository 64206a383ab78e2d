# SPDX-License-Identifier: Apache-2.0
"""Launches that must not overlap follow one another on a device, whichever streams they are on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Succession:
    """Such launches of one device, with events from ``make_event()``.

    Those captured in a CUDA graph are in the order of the capture; a replay does not look at those outside.
    """

    def __init__(self, make_event: Callable[[], Any] = torch.cuda.Event) -> None:
        self._make_event = make_event
        self._stream = 0
        self.end: Any = None  # of the last one: an event; None before the first

    @contextmanager
    def next(self, address: int, is_capturing: bool, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
        """What is launched inside follows the last one. ``address`` is that of its stream, the current one unless
        ``stream`` is given."""
        if is_capturing:
            yield
            return
        if self.end is not None and self._stream != address:
            self.end.wait(stream)
        try:
            yield
        finally:  # what was launched before an error is to be followed, too
            end = self._make_event()
            end.record(stream)
            self._stream, self.end = address, end
