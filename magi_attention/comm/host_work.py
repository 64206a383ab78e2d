# SPDX-License-Identifier: Apache-2.0
"""Waiting for a gloo operation: within a time limit, with an eye on ranks that fail meanwhile."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from magi_attention.comm.failure import SLICE_S, FailureBoard
from magi_attention.errors import PeerFailureError

_LOST_CONNECTION = ("onnection", "Broken pipe", "reset by peer", "pair closure", "imed out", "pair.cc")


class HostWork:
    """A gloo operation. Waits in slices and looks for failed ranks in between."""

    def __init__(self, work: dist.Work, what: str, board: FailureBoard, timeout_s: float, keep: tuple):
        self._work, self._what, self._board, self._timeout_s = work, what, board, timeout_s
        self._keep: tuple | None = keep  # the tensors must live until the operation ends

    def is_completed(self) -> bool:
        return self._keep is None or self._work.is_completed()

    def wait(self) -> None:
        if self._keep is None:
            return
        start = time.monotonic()
        while True:
            left = self._timeout_s - (time.monotonic() - start)
            try:
                self._work.wait(timedelta(seconds=max(min(SLICE_S, left), 0.001)))
                self._keep = None
                return
            except RuntimeError as exc:
                if "Operation timed out!" not in str(exc):
                    if not any(word in str(exc) for word in _LOST_CONNECTION):
                        raise
                    self._fail_lost(exc)
            self._look(time.monotonic() - start)

    def _look(self, waited_s: float) -> None:
        """Between slices: raises if a peer failed or the time is over."""
        try:
            failure = self._board.peer_failure()
            if failure is not None:
                self._raise(failure)
            if waited_s < self._timeout_s:
                return
            failure, missing = self._board.roll_call(1.25 * SLICE_S, len(self._board.ranks) - 1)
        except (OSError, RuntimeError) as exc:
            if isinstance(exc, PeerFailureError):
                raise
            self._raise_store(exc)
        if failure is not None:
            self._raise(failure)
        if self._work.is_completed():
            return
        who = f"{self._board.names(missing)} did not arrive" if missing else "it did not finish on any rank"
        text = (
            f"After {self._timeout_s:g} s in {self._what}, {who}. Check that every rank runs and calls the "
            "same operations in the same order; raise timeout_s if ranks may be this far apart."
        )
        self._board.report(text, "late")
        raise PeerFailureError(text)

    def _fail_lost(self, exc: RuntimeError) -> None:
        """A connection broke: finds out whose, by a roll call among those still there."""
        reason = str(exc).splitlines()[0].split("] ", 1)[-1].split(". This is")[0]
        try:
            num_others = len(self._board.ranks) - 1
            failure, silent = self._board.roll_call(1.25 * SLICE_S, num_others)
        except (OSError, RuntimeError) as store_exc:
            self._raise_store(store_exc)
        if failure is not None:
            self._board.lost = f"A connection was lost in {self._what} ({reason}), because {failure}"
            self._raise(failure)
        who = self._board.names(silent) if silent else "a rank"
        text = (
            f"The connection to {who} was lost in {self._what} ({reason}). Look at the log of that rank: "
            "its process has most likely ended or been killed (out of memory?)."
        )
        self._board.lost = text
        self._board.report(text, "lost")
        raise PeerFailureError(text) from exc

    def _raise(self, failure: str) -> None:
        self._board.is_down = True
        raise PeerFailureError(
            f"Another rank failed while this one waited in {self._what}: {failure.rstrip('. ')}. Fix "
            "the cause on that rank; this error is only its echo."
        )

    def _raise_store(self, exc: Exception) -> None:
        self._board.is_down = True
        self._board.lost = (
            f"In {self._what} the store of the process group could not be reached "
            f"({str(exc).splitlines()[0]}). The process that hosts it, mostly global rank 0, has ended; "
            "look at its log."
        )
        raise PeerFailureError(self._board.lost) from exc
