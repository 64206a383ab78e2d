# SPDX-License-Identifier: Apache-2.0
"""Do all ranks of a group mean the same? Asked once for each use of a plan, before any data moves.

A *use* is a string that names what a rank is about to do (a plan, and what of a call may not differ between ranks);
a *record* says the same in words, label by label. ``agree`` returns at once if the group has agreed on the use before.
Else all ranks bring their records to the store of the group, the last to arrive compares them, and either all go on or
all raise ``PlanMismatchError``. No GPU takes part, so neither the device nor NCCL has to wait for anything.

Keys of the store, below the failure board's prefix of the group's life and epoch:

``use/<r>``       number of rank r's comparison, and its record; written over by the next one
``use/count``     every rank adds 1 when its record is there, the last adds 1 more when it has compared, and 2**32 more
                  for records that differ. So comparison n of W ranks is over at n * (W + 1), and one number tells all
``use/differ``    the sentence of the last difference
``use/read``      how many ranks have read such a sentence

A comparison costs each rank one ``set`` and at least two ``add``; the last to arrive also reads the records.

Ranks stay in step, because what a rank remembers depends on nothing but the comparisons of its group: uses are kept by
value, not with plans or keys (which each rank drops when its own memory is full), the last ``MAX_KNOWN`` of them;
a failure of the group, after which its ranks meet anew, empties the memory of all.

One rank may be at its first use of a plan while others use one that they know. They do not come to the comparison. The
rank that waits asks after ``_ASK_S`` where the others are: one that has begun more collectives than this rank has gone
past, which is the same mistake. Both raise then, over gloo. A host that waits for NCCL hears nothing; the rank that has
found out raises, and its launcher ends the job.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

from magi_attention.comm.transport.failure import FailureBoard
from magi_attention.errors import PeerFailureError, PlanMismatchError

MAX_KNOWN = 4096
_ASK_S = 3.0
_READ_S = 10.0
_DIFFER = 1 << 32

Record = dict[str, str]
Judge = Callable[[Sequence[Record]], str]
"""A sentence on records, in rank order, that differ."""


class KnownUses(dict[str, None]):
    """The uses on which a group has agreed, the last ``MAX_KNOWN`` of them. A dict, since every call asks."""

    def add(self, uses: Sequence[str]) -> None:
        for use in uses:
            self[use] = None
        while len(self) > MAX_KNOWN:
            del self[next(iter(self))]


class ConsistencyCheck:
    """Comparisons of one group as rank ``rank`` sees them; ``known`` are the uses on which it has agreed."""

    def __init__(self, board: FailureBoard, rank: int) -> None:
        self._board, self._rank, self._world = board, rank, len(board.ranks)
        self.known = KnownUses()
        self._number = self._num_differences = 0
        board.at_resume.append(self._forget)

    def _forget(self) -> None:
        self.known.clear()
        self._number = self._num_differences = 0

    def compare(self, uses: Sequence[str], record: Record, judge: Judge, stage: str, timeout_s: float) -> None:
        """Returns when all ranks have brought an equal record, and knows ``uses`` from then on.

        Raises:
            PlanMismatchError: on every rank, with the sentence of ``judge``.
            PeerFailureError: names ranks that did not come within ``timeout_s``, or that failed.
        """
        board, store = self._board, self._board.store
        self._number += 1
        store.set(board.key(f"use/{self._rank}"), json.dumps([self._number, record]))
        count, goal = board.key("use/count"), self._number * (self._world + 1)
        found = store.add(count, 1)
        if found % _DIFFER == goal - 1:
            found = store.add(count, self._judge(judge))
        start = time.monotonic()
        while found % _DIFFER < goal:
            self._wait(time.monotonic() - start, stage, timeout_s)
            found = store.add(count, 0)
        if found // _DIFFER > self._num_differences:
            self._num_differences = found // _DIFFER
            text = store.get(board.key("use/differ")).decode()
            self._let_all_read()
            raise PlanMismatchError(text)
        self.known.add(uses)

    def _let_all_read(self) -> None:
        """The host of the store, mostly global rank 0, is about to raise, which may end it and the store with it."""
        store, key = self._board.store, self._board.key("use/read")
        num_read, deadline = store.add(key, 1), time.monotonic() + _READ_S
        if self._board.ranks[self._rank] == 0:
            while num_read < self._world * self._num_differences and time.monotonic() < deadline:
                time.sleep(0.001)
                num_read = store.add(key, 0)

    def _texts(self, ranks: Sequence[int]) -> list[bytes]:
        """What these ranks, which have brought something, brought last."""
        store, keys = self._board.store, [self._board.key(f"use/{r}") for r in ranks]
        # in one message where the store can do that (a file cannot)
        return store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]

    def _judge(self, judge: Judge) -> int:
        """What to add to the count, when all are here."""
        texts = self._texts(range(self._world))
        if len(set(texts)) == 1:
            return 1
        self._board.store.set(self._board.key("use/differ"), judge([json.loads(text)[1] for text in texts]))
        return 1 + _DIFFER

    def _missing(self) -> list[int]:
        """Ranks that have not come to this comparison."""
        store, everyone = self._board.store, range(self._world)
        there = [r for r in everyone if store.check([self._board.key(f"use/{r}")])] if self._number == 1 else everyone
        numbers = {r: json.loads(text)[0] for r, text in zip(there, self._texts(there))}
        return [r for r in everyone if numbers.get(r) != self._number]

    def _wait(self, waited_s: float, stage: str, timeout_s: float) -> None:
        time.sleep(min(max(waited_s / 4, 5e-5), 0.25))
        if waited_s < 1:
            return
        board = self._board
        failure = board.peer_failure()
        if failure is not None:
            board.is_down = True
            raise failure.error(stage)
        if waited_s > _ASK_S:
            board.ask()
            missing = self._missing()
            past = [r for r in board.ahead() if r in missing]
            if past:
                self._raise_past(past, stage)
        if waited_s > timeout_s:
            missing = self._missing()
            text = (
                f"After {timeout_s:g} s in {stage}, where ranks compare plans at their first use, "
                f"{board.names(missing)} did not arrive.{board.about(missing, stage)} Check that every rank runs and "
                "calls the same operations in the same order."
            )
            board.report(text, "late")
            raise PeerFailureError(text)

    def _raise_past(self, past: list[int], stage: str) -> None:
        board = self._board
        text = (
            f"The ranks of this group hold different plans, or call in different orders: {board.name(self._rank)} is "
            f"at the first use of a plan, in {stage}, and {board.names(past)} went on to exchange data without it, as "
            f"for a plan that was used before.{board.about(past, stage)} Make the plan (or key) from the same mask and "
            "configuration on every rank of the group; a data loader must give all of them the same batch."
        )
        board.report(text, "differs")
        raise PlanMismatchError(text)
