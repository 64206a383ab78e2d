# SPDX-License-Identifier: Apache-2.0
"""Events on the lanes of all ranks: each lane does one thing at a time, in the order of the calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
COMPUTE, LINK, NETWORK = LANES = ("compute", "link", "network")


@dataclass(frozen=True)
class Outcome:
    """One direction of one layer, seconds: ``ends`` (ranks,) when each rank is done, ``busy`` (ranks,) for each kind of
    work how long it takes. ``seconds`` is that of the last rank, ``exposed`` what of it no rank's kernels take."""

    ends: Floats
    busy: dict[str, Floats]

    @property
    def seconds(self) -> float:
        return float(self.ends.max())

    @property
    def exposed(self) -> float:
        return self.seconds - float(self.busy[COMPUTE].max())


class Lanes:
    """The lanes of ``ranks`` ranks; times are float64 ``(ranks,)``, seconds from a common start."""

    def __init__(self, ranks: int) -> None:
        self._free = {lane: np.zeros(ranks) for lane in LANES}
        self._busy = {lane: np.zeros(ranks) for lane in LANES}

    def run(self, lane: str, ready: Floats | float, seconds: Floats | float, counts_as: str | None = None) -> Floats:
        """When each rank is done with what takes ``seconds``, on a lane that is free and not before ``ready``. Nothing
        waits for what takes no time. ``counts_as`` another lane's work what only keeps this one busy."""
        free, work = self._free[lane], np.broadcast_to(np.asarray(seconds, dtype=np.float64), self._free[lane].shape)
        end: Floats = np.where(work > 0, np.maximum(free, ready) + work, free)
        self._free[lane] = end
        self._busy[counts_as or lane] = self._busy[counts_as or lane] + work
        return np.where(work > 0, end, np.broadcast_to(np.asarray(ready, dtype=np.float64), end.shape))

    def free(self, lane: str) -> Floats:
        return self._free[lane]

    def in_order_of_arrival(self, work: Sequence[tuple[Floats, Floats]]) -> Floats:
        """Runs pairs of (arrival, seconds) on the compute lane, on each rank those first that arrive first."""
        arrivals = np.stack([arrival for arrival, _ in work])
        seconds = np.stack([seconds for _, seconds in work])
        order = np.argsort(arrivals, axis=0, kind="stable")
        for arrival, piece in zip(np.take_along_axis(arrivals, order, 0), np.take_along_axis(seconds, order, 0)):
            self.run(COMPUTE, arrival, piece)
        return self.free(COMPUTE)

    def outcome(self, *ends: Floats) -> Outcome:
        """What has happened; a rank is done with the last of ``ends`` and of its kernels."""
        done = self.free(COMPUTE)
        for end in ends:
            done = np.maximum(done, end)
        return Outcome(done, dict(self._busy))
