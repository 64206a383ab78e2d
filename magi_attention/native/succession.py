# SPDX-License-Identifier: Apache-2.0
"""Launches that must not overlap follow one another on a device, whichever streams they are on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Succession:
    """Such launches of one device. ``make_event()`` gives what the current stream can record and wait for.

    Those captured in a CUDA graph are in the order of the capture; a replay does not look at those outside.
    """

    def __init__(self, make_event: Callable[[], Any] = torch.cuda.Event) -> None:
        self._make_event = make_event
        self._last: tuple[int, Any] | None = None  # stream and end of the last one

    @contextmanager
    def next(self, stream: int, is_capturing: bool) -> Iterator[None]:
        """What is launched inside, on the current stream, whose address is ``stream``, follows the last one."""
        if is_capturing:
            yield
            return
        last = self._last
        if last is not None and last[0] != stream:
            last[1].wait()
        yield
        event = self._make_event() if last is None else last[1]
        event.record()
        self._last = (stream, event)
