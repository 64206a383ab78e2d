# SPDX-License-Identifier: Apache-2.0
"""Handles of operations under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from magi_attention.comm.transport.streams import is_waitable, wait_for
from magi_attention.errors import ArgumentTypeError, UsedTwiceError


class GeneralWork:
    """One interface for whatever says that an operation is done: None (done already), anything with
    ``wait()`` such as a ``dist.Work``, a CUDA stream or event, or a list of these."""

    def __init__(self, work: Any = None):
        self.work = work

    def wait(self) -> None:
        """Orders the current CUDA stream after streams, events and NCCL operations; blocks the host for the
        rest."""
        for item in self._items():
            wait_for(item)

    def is_completed(self) -> bool:
        return all(item.is_completed() if hasattr(item, "is_completed") else item.query() for item in self._items())

    def _items(self) -> list:
        if self.work is None:
            return []
        items = list(self.work) if isinstance(self.work, (list, tuple)) else [self.work]
        for item in items:
            if not is_waitable(item):
                raise ArgumentTypeError(f"{item!r} cannot be waited for; pass a work, a CUDA stream or an event.")
        return items


class WorkWithPostProcessFn:
    """A group collective under way. ``wait_post_process`` waits, finishes and returns the output; once.

    With ``async_op=False`` the wait has happened in the constructor.
    """

    def __init__(
        self,
        work: Any = None,
        post_process_fn: Callable[..., Any] | None = None,
        async_op: bool = False,
    ):
        self.work: GeneralWork | None = work if isinstance(work, GeneralWork) else GeneralWork(work)
        self.post_process_fn = post_process_fn
        self.async_op = async_op
        self._is_used = False
        if not async_op:
            self.work.wait()

    def is_completed(self) -> bool:
        return self.work is None or self.work.is_completed()

    def wait_post_process(self, *args: Any) -> Any:
        """Waits (on CUDA: orders the current stream), runs the last step and returns ``output`` or
        ``(output, lse)``. ``args`` may repeat the output buffers that the collective was started with."""
        if self._is_used:
            raise UsedTwiceError("This handle was waited for before; every group collective is finished once.")
        self._is_used = True
        work, post, self.work, self.post_process_fn = self.work, self.post_process_fn, None, None
        if self.async_op and work is not None:
            work.wait()
        if post is None:
            return args[0] if len(args) == 1 else args
        return post(*args)
