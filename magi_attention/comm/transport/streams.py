# SPDX-License-Identifier: Apache-2.0
"""CUDA streams and events of the communication layer; no other file of it makes one or waits for one.

An NCCL operation runs on a stream of its process group. It begins after what the current stream was given before it was
started, and ``wait`` puts the current stream behind it, so kernels that are launched in between run beside it. Tensors
that an operation uses are referenced until its ``wait`` and belong to the stream that is current at both ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from magi_attention.native.stream_order import StreamOrder


def is_waitable(item: Any) -> bool:
    """Is it a stream, an event or anything with ``wait()``?"""
    return isinstance(item, torch.cuda.Stream) or hasattr(item, "wait")


def wait_for(item: Any) -> None:
    """Puts the current stream behind a stream, an event or an NCCL operation; blocks the host for anything else."""
    if isinstance(item, torch.cuda.Stream):
        torch.cuda.current_stream(item.device).wait_stream(item)
    elif isinstance(item, torch.cuda.Event):
        torch.cuda.current_stream().wait_event(item)
    else:
        item.wait()


class SideStream:
    """A stream per device for operations that depend on others, so that the current stream need not wait for these."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def on(self, device: torch.device) -> torch.cuda.Stream | None:
        """The stream of ``device``; None on a CPU."""
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


@contextmanager
def behind_current(stream: torch.cuda.Stream) -> Iterator[None]:
    """Work inside goes to ``stream``, which begins after what the current stream was given so far.

    Tensors made inside may be used by the current stream after ``wait_for(stream)``; when they are freed, their memory
    goes to later work of ``stream``, which this function orders behind that use.
    """
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


@dataclass
class OrderedStream:
    """``stream``: address of the CUDA stream to work on; ``work``: what to wait for afterwards, None if that is the
    current stream."""

    stream: int
    work: torch.cuda.Event | None = None


class OrderedStreams:
    """Operations of one device that must not overlap, on the stream that is current or beside it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._side, self._stream_order = device, SideStream(), StreamOrder(keeps_ends=True)

    @contextmanager
    def next(self, is_beside: bool) -> Iterator[OrderedStream]:
        """Work inside follows that of all blocks before, and what the current stream was given so far.

        While a graph is captured all work is on the stream of the capture: events of other streams are no part of it.
        """
        current = torch.cuda.current_stream(self._device)
        if torch.cuda.is_current_stream_capturing():
            yield OrderedStream(current.cuda_stream)
            return
        side = self._side.on(self._device) if is_beside else None
        stream = current if side is None else side
        ordered = OrderedStream(stream.cuda_stream)
        with self._stream_order.next(ordered.stream, False, stream):
            with nullcontext() if side is None else behind_current(side):
                yield ordered
        ordered.work = self._stream_order.end if is_beside else None
