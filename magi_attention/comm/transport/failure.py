# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a torch.distributed group tell each other that one of them failed.

The board lives in the store through which the group was made. In normal operation nothing is written or
read: only a rank that has waited for about a second looks at it. Keys, below ``magi/<life>/<epoch>/``:

``alarm``      set once anything below is worth reading; the only key that waiting ranks poll
``fail/<r>``   rank r failed: ``own|text``, ``differs|text`` (it holds another plan than others, see
               ``consistency.py``), ``lost|text`` (a connection broke) or ``late|text`` (it gave up waiting for
               another rank)
``at/<r>``     position of rank r, the number of collectives begun; written only when asked by the alarm
``resume/<r>`` position of rank r when it first used the group again after a failure
``meet/<n>/<r>`` rank r is at the n-th meeting of hosts
``waits/<r>``  rank r waited in vain, outside messages of the group, and for whom: ranks, with commas between
``own/<name>`` what others leave for one another (``private_store``)
``who``, without an epoch: ``who/<r>`` says how to read the progress of rank r (see ``progress.py``)

What an error says of a rank that did not arrive is what is known: its answer, or what its page of progress shows. A
cause such as lack of memory is named only where that rank reported it.

*Life* counts how often this process has made a board on this store, so that a group which is destroyed and
made again in the same store starts clean. *Epoch* counts handled failures. After a failure (its own or a
peer's) a rank's board is down. The next collective of that rank first meets all others at ``resume``: if all
have begun the same number of collectives, the group is still in step, the epoch advances and work goes on; if
not, messages of different steps would be mixed, and ``PeerFailureError`` asks for a new process group. So it
does, at once, when a connection is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch.distributed as dist

from magi_attention.comm.transport.progress import Progress, Sighting, describe, look
from magi_attention.comm.transport.waits import Awaited, chain_of_waits
from magi_attention.errors import PeerFailureError, PlanMismatchError

SLICE_S = 1.0
ROLL_CALL_S = 10.0  # for all others to answer; a rank on a busy machine is slow and not gone
LAST_ANSWER_S = 1.25 * SLICE_S  # for the last one, once all but it have answered
POLL_S = 0.02
_KINDS = ("own", "differs", "lost", "late")  # causes first


class Failure(NamedTuple):
    """What another rank reported."""

    text: str
    is_mismatch: bool = False

    def error(self, waiting_in: str) -> PeerFailureError | PlanMismatchError:
        """For a rank that waits and has nothing to do with it; of plans that differ every rank is told alike."""
        if self.is_mismatch:
            return PlanMismatchError(self.text)
        return PeerFailureError(
            f"Another rank failed while this one waited in {waiting_in}: {self.text.rstrip('. ')}. Fix the cause on "
            "that rank; this error is only its echo."
        )


def describe_error(exc: BaseException, stage: str) -> str:
    where = f" in {stage}" if stage else ""
    return f"{type(exc).__name__}{where}: {exc}"[:2000]


class FailureBoard:
    """The board of one process group as rank ``rank`` sees it; ``position`` counts collectives begun."""

    def __init__(self, store, rank: int, ranks: Sequence[int], position: Callable[[], int]):
        self._store = store
        self._rank = rank
        self.ranks = tuple(ranks)
        self._position = position
        self._life = store.add(f"magi/life/{rank}", 1)
        self._epoch = 0
        self._meetings = 0
        self.is_down = False
        self.at_resume: list[Callable[[], None]] = []  # what must not outlive a failure is forgotten there
        self.lost: str | None = None  # why no message can pass any more, if so
        self.progress = Progress()
        self._last_seen: dict[int, Sighting] = {}
        store.set(self._who(rank), self.progress.address)

    # -- keys ---------------------------------------------------------------------------------------------
    @property
    def store(self):
        return self._store

    def key(self, name: str, epoch: int | None = None) -> str:
        return f"magi/{self._life}/{self._epoch if epoch is None else epoch}/{name}"

    def _who(self, rank: int) -> str:
        return f"magi/{self._life}/who/{rank}"

    @property
    def private_store(self):
        """Part of the store for other uses of the group."""
        return dist.PrefixStore(self.key("own"), self._store)

    def _has(self, name: str) -> bool:
        return self._store.check([self.key(name)])

    def _read(self, name: str) -> str | None:
        return self._store.get(self.key(name)).decode() if self._has(name) else None

    def _write(self, name: str, text: str) -> None:
        self._store.set(self.key(name), text)

    def name(self, rank: int) -> str:
        """``rank 2``, with the global rank where it differs."""
        return f"rank {rank}" if self.ranks[rank] == rank else f"rank {rank} (global rank {self.ranks[rank]})"

    def names(self, ranks: Sequence[int]) -> str:
        return ", ".join(self.name(r) for r in ranks)

    # -- knowing of others --------------------------------------------------------------------------------
    def look_around(self) -> None:
        """Remembers what others are at, because a process that has ended shows nothing any more."""
        for rank in range(len(self.ranks)):
            if rank != self._rank:
                self._look(rank)

    def _look(self, rank: int) -> Sighting | None:
        who = self._who(rank)
        seen = look(self._store.get(who).decode()) if self._store.check([who]) else None
        if seen is not None and seen.is_alive:
            self._last_seen[rank] = seen
        return seen

    def about(self, ranks: Sequence[int], call: str = "") -> str:
        """Sentences on what is known of ``ranks``, of three at most, each beginning with a space."""
        text = ""
        for rank in list(ranks)[:3]:
            try:
                seen, answer = self._look(rank), self._read(f"at/{rank}")
            except (OSError, RuntimeError):
                return text  # why: the store is gone, and with it what it knew
            if seen is None and answer is not None:
                text += f" {self.name(rank).capitalize()} has answered: it waits{answer.partition('|')[2]}."
            else:
                text += " " + describe(self.name(rank), seen, self._last_seen.get(rank), self.progress, call)
        return text

    def ahead(self) -> list[int]:
        """Ranks that have begun more collectives than this one, as far as is known."""
        own, found = self._position(), []
        for rank in range(len(self.ranks)):
            if rank == self._rank:
                continue
            seen, answer = self._look(rank), self._read(f"at/{rank}")
            has_seen = seen is not None and seen.is_alive and seen.collectives > self.progress.collectives
            if has_seen or (answer is not None and _position_in(answer) > own):
                found.append(rank)
        return found

    def ask(self) -> int:
        """Asks all ranks that wait for their position, says its own and returns it."""
        self._write("alarm", "1")
        return self._answer()

    def _answer(self) -> int:
        own, stage = self._position(), self.progress.stage
        self._write(f"at/{self._rank}", f"{own}|" + (f" in {stage}" if stage else ""))
        return own

    # -- failing ------------------------------------------------------------------------------------------
    def report(self, text: str, kind: str = "own") -> None:
        """Tells all others; ``kind`` is own, differs, lost or late. Never raises, because it runs while another error
        is on its way up."""
        self.is_down = True
        try:
            if self._has(f"fail/{self._rank}"):  # the first failure is the cause
                return
            self._write(f"fail/{self._rank}", f"{kind}|{text}")
            self._write("alarm", "1")
        except Exception:
            # why: the store is gone with its host; peers notice the closed connection instead
            return

    def peer_failure(self) -> Failure | None:
        """What the other ranks reported, causes first; None if nobody did. Answers a roll call on the way."""
        if not self._has("alarm"):
            return None
        self._answer()
        found = []
        for r in range(len(self.ranks)):
            text = None if r == self._rank else self._read(f"fail/{r}")
            if text is not None:
                kind, _, text = text.partition("|")
                found.append((_KINDS.index(kind), r, text))
        if not found:
            return None
        found.sort()
        if _KINDS[found[0][0]] == "differs":
            return Failure(found[0][2], is_mismatch=True)
        causes = [f for f in found if f[0] == 0] or found[:1]
        failure = " ".join(f"{self.name(r)} failed: {text}" for _, r, text in causes)
        if any(_KINDS[kind] == "lost" for kind, _, _ in found):
            self.lost = failure
        return Failure(failure)

    def roll_call(self) -> tuple[Failure | None, list[int]]:
        """Asks all ranks for their position and waits for the answers, at most ``ROLL_CALL_S``, and no longer than
        ``LAST_ANSWER_S`` for a single one. Returns (failure reported by a peer, or None; ranks that are silent or
        behind)."""
        own = self.ask()
        deadline = time.monotonic() + ROLL_CALL_S
        others = [r for r in range(len(self.ranks)) if r != self._rank]
        while True:
            failure = self.peer_failure()
            if failure is not None:
                return failure, []
            positions = {r: self._read(f"at/{r}") for r in others}
            missing = [r for r, at in positions.items() if at is None or _position_in(at) < own]
            if len(missing) <= 1:
                deadline = min(deadline, time.monotonic() + LAST_ANSWER_S)
            if not missing or time.monotonic() > deadline:
                return None, missing
            time.sleep(POLL_S)

    def follow(self, awaited: Awaited, stage: str, timeout_s: float) -> tuple[list[int], str]:
        """Says that this rank waits for ``awaited`` in vain, and gives others ``timeout_s`` to say the same.

        Returns:
            Who waits for whom, from one of ``awaited`` on; the last one has said nothing. And what is known of that
            one.
        """
        deadline, said = time.monotonic() + timeout_s, []
        while True:
            if (now := awaited()) != said:
                said = now
                self._write(f"waits/{self._rank}", ",".join(map(str, said)))
            chain, is_known = chain_of_waits(said, self._awaited_by, self._has_left)
            if is_known or time.monotonic() > deadline:
                end = chain[-1]
                failure = self._read(f"fail/{end}")
                about = "" if failure is None else f" It reported: {failure.partition('|')[2].rstrip('. ')}."
                return chain, about or self.about([end], stage)
            time.sleep(POLL_S)

    def _awaited_by(self, rank: int) -> list[int] | None:
        told = self._read(f"waits/{rank}")
        return None if told is None else [int(r) for r in told.split(",")]

    def gone(self) -> list[int]:
        """Other ranks that have failed or ended, as far as is known, and not because they waited for a rank."""
        others = [rank for rank in range(len(self.ranks)) if rank != self._rank]
        reports = {rank: self._read(f"fail/{rank}") or "" for rank in others}
        return [r for r in others if reports[r].partition("|")[0] not in ("lost", "late") and self._has_left(r)]

    def has_ended(self, rank: int) -> bool:
        """Is it known that its process has ended?"""
        seen = self._look(rank)
        return seen is not None and not seen.is_alive

    def raise_ended(self, awaited: Sequence[int], stage: str) -> None:
        """``PeerFailureError`` if processes of ``awaited`` ranks have ended, which will not come to ``stage``."""
        ended = [rank for rank in awaited if self.has_ended(rank)]
        if not ended:
            return
        names = self.names(ended)
        self.lost = (
            f"{names[0].upper()}{names[1:]} ended before {stage}.{self.about(ended, stage)} Look at the log of that "
            "rank; make a new process group to go on."
        )
        self.report(self.lost, "lost")
        raise PeerFailureError(self.lost)

    def _has_left(self, rank: int) -> bool:
        """Has it reported a failure of any kind, or ended?"""
        return self._has(f"fail/{rank}") or self.has_ended(rank)

    def meet(self, stage: str, timeout_s: float) -> None:
        """Returns when all ranks are at the same meeting; ``PeerFailureError`` names those who are not in time, or who
        failed."""
        if self.lost is not None:
            raise PeerFailureError(f"This process group is broken; make a new one. {self.lost}")
        self._meetings += 1
        place = f"meet/{self._meetings}"
        everyone = range(len(self.ranks))
        self._write(f"{place}/{self._rank}", "1")
        deadline, pause = time.monotonic() + timeout_s, 1e-4
        while True:
            missing = [r for r in everyone if not self._has(f"{place}/{r}")]
            failure = self.peer_failure()  # also if nobody is missing: they may have gone since
            if failure is not None:
                self.is_down = True
                raise failure.error(stage)
            if not missing:
                break
            if pause == POLL_S:  # for others that wait, too
                self.raise_ended(missing, stage)
            if time.monotonic() > deadline:
                text = (
                    f"After {timeout_s:g} s in {stage}, {self.names(missing)} did not arrive."
                    f"{self.about(missing, stage)} Look at the log of that rank; make a new process group to go on."
                )
                self.report(text, "late")
                raise PeerFailureError(text)
            time.sleep(pause)
            pause = min(2 * pause, POLL_S)
        if self._meetings > 1:  # everybody has left the one before
            self._store.delete_key(self.key(f"meet/{self._meetings - 1}/{self._rank}"))

    # -- going on afterwards ------------------------------------------------------------------------------
    def resume(self, timeout_s: float) -> None:
        """Meets all ranks after a failure; returns when the group may be used again, else
        ``PeerFailureError``."""
        if self.lost is not None:
            raise PeerFailureError(f"This process group is broken; make a new one. {self.lost}")
        own = self._position()
        self._write(f"resume/{self._rank}", str(own))
        deadline = time.monotonic() + timeout_s
        everyone = range(len(self.ranks))
        while missing := [r for r in everyone if not self._has(f"resume/{r}")]:
            self.raise_ended(missing, "its return to this process group after a failure")
            if time.monotonic() > deadline:
                raise PeerFailureError(
                    f"This process group had a failure and {self.names(missing)} did not come back to it "
                    f"within {timeout_s:g} s. Make a new process group, or let every rank handle the failure."
                )
            time.sleep(POLL_S)
        positions = {r: int(self._read(f"resume/{r}") or 0) for r in everyone}
        if len(set(positions.values())) > 1:
            listing = ", ".join(f"{self.name(r)}: {n}" for r, n in positions.items())
            raise PeerFailureError(
                "After a failure the ranks of this process group have begun different numbers of collectives "
                f"({listing}), so their messages would be mixed up. Destroy it and make a new process group."
            )
        for name in (f"fail/{self._rank}", f"at/{self._rank}", f"resume/{self._rank}"):
            if self._epoch > 0:  # why the epoch before: peers may still be reading this one
                self._store.delete_key(self.key(name, self._epoch - 1))
        self._epoch += 1
        self.is_down = False
        for forget in self.at_resume:
            forget()


def _position_in(answer: str) -> int:
    return int(answer.partition("|")[0])
