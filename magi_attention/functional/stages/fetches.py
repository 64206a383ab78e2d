# SPDX-License-Identifier: Apache-2.0
"""Keys and values that are on their way to the kernels of one pass."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from magi_attention.functional.runtime import AttnCall
from magi_attention.functional.stages.comm import Handle


class Fetches:
    """The rows of k and v that other ranks send in one pass of one call, stage by stage.

    One stage travels ahead of the kernels, or all of them with ``is_all_at_once``. ``following`` are the fetches of
    the next head chunk. They begin before the last kernel of this pass, when nothing of this pass travels any more,
    so that two chunks are never on their way at a time.
    """

    def __init__(
        self, call: AttnCall, k: torch.Tensor, v: torch.Tensor, stages: Iterable[int], is_all_at_once: bool
    ) -> None:
        self.following: Fetches | None = None
        self._call, self._rows, self._is_all_at_once = call, (k, v), is_all_at_once
        self._waiting, self.have_started = list(stages), False
        self._under_way: dict[int, tuple[Handle[list[torch.Tensor]], float]] = {}

    @classmethod
    def of_forward(cls, call: AttnCall, k: torch.Tensor, v: torch.Tensor) -> Fetches:
        runtime = call.runtime
        return cls(call, k, v, range(len(runtime.comms)), runtime.policy.prefetch_all)

    @classmethod
    def of_backward(cls, call: AttnCall, k: torch.Tensor, v: torch.Tensor, has_tail: bool = False) -> Fetches:
        """``has_tail``: the rows of the last stage are here."""
        return cls(call, k, v, range(len(call.runtime.comms) - has_tail), False)

    @property
    def are_under_way(self) -> bool:
        """Do rows travel, of this pass or the following one?"""
        return bool(self._under_way) or (self.following is not None and self.following.are_under_way)

    def start(self) -> None:
        """Begins, unless that is done."""
        if self.have_started:
            return
        self.have_started = True
        self._fetch_next()
        while self._waiting and self._is_all_at_once:
            self._fetch_next()

    def start_following(self) -> None:
        """Does nothing where no rank reads a row of another."""
        if self.following is not None and not self._call.runtime.is_local:
            self.following.start()

    def take(self, stage: int) -> list[torch.Tensor]:
        """The rows (k, v) of ``stage``, when they have arrived; the next stage sets out."""
        handle, start = self._under_way.pop(stage)
        rows = handle.wait()
        self._call.record("comm", stage, start)
        self._fetch_next()
        return rows

    def _fetch_next(self) -> None:
        if self._waiting:
            stage = self._waiting.pop(0)
            call, start = self._call, time.perf_counter()
            self._under_way[stage] = call.runtime.comms[stage].fetch(*self._rows, call.prepared.exchange), start
