# SPDX-License-Identifier: Apache-2.0
"""Waiting for a gloo operation: within a time limit, with an eye on ranks that fail meanwhile."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from magi_attention.comm.transport.failure import SLICE_S, Failure, FailureBoard
from magi_attention.errors import PeerFailureError, PlanMismatchError

_LOST_CONNECTION = ("onnection", "Broken pipe", "reset by peer", "pair closure", "pair.cc")
_GROUP_TIMEOUT = re.compile(r"Timed out waiting (\d+)ms")  # the group's own limit, shorter than this package's


class HostWork:
    """A gloo operation. Waits in slices and looks for failed ranks in between."""

    def __init__(self, work: dist.Work, what: str, board: FailureBoard, limit: Callable[[], float], keep: tuple):
        self._work, self._what, self._board = work, what, board
        self._limit = limit  # seconds; asked by those alone who have to wait
        self._keep: tuple | None = keep  # the tensors must live until the operation ends

    def is_completed(self) -> bool:
        return self._keep is None or self._work.is_completed()

    def wait(self) -> None:
        if self._keep is None:
            return
        start, left = time.monotonic(), SLICE_S
        while True:
            try:
                self._work.wait(timedelta(seconds=max(min(SLICE_S, left), 0.001)))
                self._keep = None
                return
            except RuntimeError as exc:
                if "Operation timed out!" not in str(exc):
                    limit = _GROUP_TIMEOUT.search(str(exc))
                    if limit is not None:
                        self._fail_late(int(limit[1]) / 1000, exc)
                    if not any(word in str(exc) for word in _LOST_CONNECTION):
                        raise
                    self._fail_lost(exc)
            limit_s = self._limit()
            self._look(time.monotonic() - start, limit_s)
            left = limit_s - (time.monotonic() - start)

    def _look(self, waited_s: float, limit_s: float) -> None:
        """Between slices: raises if a peer failed or the time is over."""
        try:
            failure = self._board.peer_failure()
            if failure is not None:
                self._raise(failure)
            self._board.look_around()
            if waited_s < limit_s:
                return
        except (OSError, RuntimeError) as exc:
            if isinstance(exc, (PeerFailureError, PlanMismatchError)):
                raise
            self._raise_store(exc)
        missing = self._roll_call()
        if self._work.is_completed():
            return
        text = self._late_text(limit_s, missing) + "raise timeout_s if ranks may be this far apart."
        self._board.report(text, "late")
        raise PeerFailureError(text)

    def _roll_call(self) -> list[int]:
        """Ranks that are silent or behind; raises if one has reported a failure."""
        try:
            failure, missing = self._board.roll_call()
        except (OSError, RuntimeError) as exc:
            self._raise_store(exc)
        if failure is not None:
            self._raise(failure)
        return missing

    def _late_text(self, limit_s: float, missing: list[int]) -> str:
        who = f"{self._board.names(missing)} did not arrive" if missing else "it did not finish on any rank"
        return (
            f"After {limit_s:g} s in {self._where}, {who}.{self._board.about(missing)} Check that every rank runs and "
            "calls the same operations in the same order; "
        )

    @property
    def _where(self) -> str:
        stage = self._board.progress.stage
        return f"{self._what} of {stage}" if stage else self._what

    def _fail_late(self, limit_s: float, exc: RuntimeError) -> NoReturn:
        """The time limit of the process group itself is over, at which gloo gives its connections up."""
        self._look_around()
        text = self._late_text(limit_s, self._roll_call())
        text += "give init_process_group a longer timeout if ranks may be this far apart."
        self._board.lost = text
        self._board.report(text, "late")
        raise PeerFailureError(text) from exc

    def _look_around(self) -> None:
        try:
            self._board.look_around()
        except (OSError, RuntimeError) as exc:
            self._raise_store(exc)

    def _fail_lost(self, exc: RuntimeError) -> NoReturn:
        """A connection broke: finds out whose, by a roll call among those still there."""
        reason = str(exc).splitlines()[0].split("] ", 1)[-1].split(". This is")[0]
        self._look_around()
        try:
            failure, silent = self._board.roll_call()
        except (OSError, RuntimeError) as store_exc:
            self._raise_store(store_exc)
        if failure is not None:
            self._board.lost = f"A connection was lost in {self._where} ({reason}), because {failure.text}"
            self._raise(failure)
        who = self._board.names(silent) if silent else "a rank"
        text = (
            f"The connection to {who} was lost in {self._where} ({reason}).{self._board.about(silent)} Look at the log "
            "of that rank."
        )
        self._board.lost = text
        self._board.report(text, "lost")
        raise PeerFailureError(text) from exc

    def _raise(self, failure: Failure) -> NoReturn:
        self._board.is_down = True
        raise failure.error(self._where)

    def _raise_store(self, exc: Exception) -> NoReturn:
        self._board.is_down = True
        self._board.lost = (
            f"In {self._where} the store of the process group could not be reached "
            f"({str(exc).splitlines()[0]}). The process that hosts it, mostly global rank 0, has ended or its network "
            "is gone; look at its log."
        )
        raise PeerFailureError(self._board.lost) from exc
