# SPDX-License-Identifier: Apache-2.0
"""Do all ranks of a group mean the same? Asked in every call that exchanges data by a plan, before any data moves.

A *use* names what a rank is about to do: a plan, and what of a call may not differ between ranks. A *record* says the
same in words, label by label. Two ways ask, by the device of what is about to travel.

**Messages**, for tensors of a CPU (and of any device where every call is to be checked). Each call begins with an
exchange of one number, a digest of its use. Equal numbers are agreement. If they differ, the ranks exchange records,
and all raise ``PlanMismatchError``: nothing else has travelled, so the group goes on. A rank that is gone breaks its
connections, so the others name it at once.

**The store** of the group, for tensors of a GPU, where the host must not wait for other ranks in every call. A use that
the group has not seen is compared by ``ConsistencyCheck.compare``: ranks bring records, the last one to arrive compares
them, and no GPU has to answer. Uses that are known go into a rolling checksum of all calls, which the ranks compare
every ``_INTERVAL`` calls without a wait: whoever brings the last checksum sees whether they differ.

Keys of the store, below the failure board's prefix of the group's life and epoch:

``use/<r>``       number of rank r's comparison, and its record; written over by the next one
``use/count``     every rank adds 1 when its record is there, the last adds 1 more when it has compared, and 2**32 more
                  for records that differ. So comparison n of W ranks is over at n * (W + 1), and one number tells all
``use/differ``    the sentence of the last difference
``use/read``      how many ranks have read such a sentence
``calls/<n>``     sum of the checksums of interval n, and 2**48 for every rank that has added its own
``calls/by/<r>``  rank r's last interval, and its checksum

A comparison costs each rank one ``set`` and at least two ``add``; the last to arrive also reads the records.

Ranks stay in step, because what a rank remembers depends on nothing but the calls of its group: uses are kept by value,
not with plans or keys (which each rank drops when its own memory is full), the last ``MAX_KNOWN`` of them; a failure of
the group, after which its ranks meet anew, empties the memory of all.

One rank may be at its first use of a plan while others use one that they know. They do not come to the comparison in
the store. The rank that waits asks after ``_ASK_S`` where the others are: one that has begun more collectives than this
rank, and has not come to this comparison, has gone past, which is the same mistake. The rank that has found out raises,
and its launcher ends the job.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from magi_attention.comm.transport.failure import FailureBoard
from magi_attention.errors import PeerFailureError, PlanMismatchError

_log = logging.getLogger("magi_attention.comm")

MAX_KNOWN = 4096
_ASK_S = 3.0
_READ_S = 10.0
_DIFFER = 1 << 32
_INTERVAL = 32
_ONE_RANK = 1 << 48
_DECLINED = 0
_FAILURE = "failure"
CALLS = "calls before"  # the label of what ranks have called up to a comparison

Record = dict[str, str]
Judge = Callable[[Sequence[Record]], str]
"""A sentence on records, in rank order, that differ."""


class Messages(Protocol):
    """What a comparison by messages needs from a group of ranks. Both are collective and block the host."""

    def gather_tokens(self, token: int) -> list[int]: ...

    def all_gather_object(self, obj: object) -> list: ...


@dataclass(frozen=True)
class Use:
    """What a rank is about to do with a plan.

    ``name`` says what is the same in all calls alike. ``varying`` may change from call to call, and may not differ
    between ranks. ``record()`` has both in words. Whoever knows ``name`` knows ``also``. ``stage`` is the call.
    """

    name: str
    make_record: Callable[[str], Record]  # from ``stage``
    judge: Judge
    stage: str
    varying: str = ""
    also: tuple[str, ...] = ()

    def record(self) -> Record:
        return self.make_record(self.stage)

    @cached_property
    def encoded(self) -> bytes:
        return f"{self.name}\0{self.varying}".encode()

    @cached_property
    def _digest(self) -> int:
        return _digest_of(self.name, self.varying)

    def token(self, is_known: bool, seed: str) -> int:
        """A number that ranks which mean the same have in common. ``seed`` is of this call alone."""
        if not is_known:
            return _digest_of(json.dumps(self.record()), seed)
        return _digest_of(self.name, self.varying, seed) if seed else self._digest

    def of(self, stage: str) -> Use:
        """The same in another call, which is known with this one."""
        return replace(self, name=f"{self.name} {stage}", stage=stage, also=())


def _digest_of(*words: str) -> int:
    """63 bits, and never ``_DECLINED``."""
    return int.from_bytes(hashlib.blake2b("\0".join(words).encode(), digest_size=8).digest(), "little") >> 1 or 1


def agree_by_messages(transport: Messages, known: KnownUses, use: Use, seed: str) -> None:
    """Returns when all ranks have told an equal use; ``PlanMismatchError`` on every rank if they differ."""
    is_known = use.name in known
    tokens = transport.gather_tokens(use.token(is_known, seed))
    if any(token != tokens[0] for token in tokens):
        record = use.record() | ({"dropout": seed} if seed else {})
        records = transport.all_gather_object(record)
        failures = [f"rank {r} failed: {told[_FAILURE]}" for r, told in enumerate(records) if _FAILURE in told]
        if failures:
            raise PeerFailureError(
                f"Another rank failed before anything was sent in {use.stage}: {' '.join(failures).rstrip('. ')}. Fix "
                "the cause on that rank; this error is only its echo. The group goes on."
            )
        if any(other != record for other in records):
            raise PlanMismatchError(use.judge(records))
    if not is_known:
        known.add((use.name, *use.also))


def decline_by_messages(transport: Messages, text: str) -> None:
    """Takes the part of a rank that cannot make the call, and says why: the others raise, and the group goes on."""
    transport.gather_tokens(_DECLINED)
    transport.all_gather_object({_FAILURE: text})


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
        self._num_calls = self._checksum = 0
        self._can_follow = True
        board.at_resume.append(self._forget)

    def _forget(self) -> None:
        self.known.clear()
        self._number = self._num_differences = 0
        self._num_calls = self._checksum = 0

    def compare(self, use: Use, timeout_s: float) -> None:
        """Returns when all ranks have brought an equal record, and knows ``use`` from then on.

        Raises:
            PlanMismatchError: on every rank, with the sentence of ``use.judge``.
            PeerFailureError: names ranks that did not come within ``timeout_s``, or that failed.
        """
        board, store, stage, judge = self._board, self._board.store, use.stage, use.judge
        self._number += 1
        record = use.record() | {CALLS: f"{self._num_calls} (checksum {self._checksum:08x})"}
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
        self.known.add((use.name, *use.also))

    def follow(self, use: Use) -> None:
        """A call by a use that is known: every ``_INTERVAL`` of them the ranks compare what they have called so far.

        Raises:
            PlanMismatchError: on the last rank to come to an interval, if the ranks have called differently. Others
                raise when they come to their next one.
        """
        self._checksum = zlib.crc32(use.encoded, self._checksum)
        self._num_calls += 1
        if self._num_calls % _INTERVAL == 0 and self._can_follow:
            try:
                self._compare_calls(use)
            except (OSError, RuntimeError) as exc:
                if isinstance(exc, (PeerFailureError, PlanMismatchError)):
                    raise
                self._can_follow = False  # why: ranks that end first may take the store with them
                _log.warning("The store of this group is gone, so its ranks compare their calls no more: %s", exc)

    def _compare_calls(self, use: Use) -> None:
        board, store, interval = self._board, self._board.store, self._num_calls // _INTERVAL
        key = board.key(f"calls/{interval}")
        store.set(board.key(f"calls/by/{self._rank}"), json.dumps([interval, self._checksum]))
        failure = board.peer_failure()
        if failure is not None and failure.is_mismatch:
            board.is_down = True
            raise failure.error(use.stage)
        total = store.add(key, _ONE_RANK + self._checksum)
        if total // _ONE_RANK < self._world:
            return
        store.delete_key(key)
        if total % _ONE_RANK == self._world * self._checksum:
            return
        told = [json.loads(text) for text in self._texts(range(self._world), "calls/by")]
        # Ranks at a later interval have written over what they told of this one.
        odd = [r for r, (number, checksum) in enumerate(told) if number == interval and checksum != self._checksum]
        who = board.names(odd) if odd else "another rank"
        text = (
            f"The ranks of this group have called differently within their last {_INTERVAL} calls: {who} used other "
            f"plans, or called in another order, than {board.name(self._rank)}. Results since then are wrong. All "
            "ranks of a context-parallel group need the same batches in the same order, so seed and shard the data "
            "loader by data-parallel rank."
        )
        board.report(text, "differs")
        raise PlanMismatchError(text)

    def _let_all_read(self) -> None:
        """The host of the store, mostly global rank 0, is about to raise, which may end it and the store with it."""
        store, key = self._board.store, self._board.key("use/read")
        num_read, deadline = store.add(key, 1), time.monotonic() + _READ_S
        if self._board.ranks[self._rank] == 0:
            while num_read < self._world * self._num_differences and time.monotonic() < deadline:
                time.sleep(0.001)
                num_read = store.add(key, 0)

    def _texts(self, ranks: Sequence[int], place: str = "use") -> list[bytes]:
        """What these ranks, which have brought something, brought last."""
        store, keys = self._board.store, [self._board.key(f"{place}/{r}") for r in ranks]
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
        """Ranks that have not come to this comparison. A rank may be at the next one already."""
        store, everyone = self._board.store, range(self._world)
        there = [r for r in everyone if store.check([self._board.key(f"use/{r}")])] if self._number == 1 else everyone
        numbers = {r: json.loads(text)[0] for r, text in zip(there, self._texts(there))}
        return [r for r in everyone if numbers.get(r, 0) < self._number]

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
            ahead = board.ahead()  # why first: a rank that comes in between goes on, and is not missing
            missing = self._missing()
            past = [r for r in ahead if r in missing]
            if past:
                self._raise_past(past, stage)
            board.raise_ended(missing, stage)
        if waited_s > timeout_s:
            missing = self._missing()
            text = (
                f"After {timeout_s:g} s in {stage}, where ranks compare plans at their first use, "
                f"{board.names(missing)} did not arrive.{board.about(missing, stage)} Check that every rank runs and "
                "calls the same operations in the same order; give init_process_group a longer timeout if ranks may be "
                "this far apart."
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
