# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of a group are: what each began last, and whether its process lives.

Every rank keeps 4 KiB of memory up to date (a memfd), which costs less than a microsecond a call. Nobody reads it in
normal operation. A rank that has waited in vain for another one of the same host opens that memory through ``/proc``,
so it can say "rank 1 is alive and has not made this call" although rank 1 answers nobody. There is no message, no
thread and no file that could be left over. What is read may be torn between two writes, so it serves for sentences
only, never for decisions about data.

Nothing can be known this way about a rank on another host or in another PID namespace (``look`` returns None).
"""

from __future__ import annotations

import json
import mmap
import os
import time
import weakref
from dataclasses import dataclass
from time import monotonic_ns

_SIZE, _NAME_BYTES = 4096, 64
_COLLECTIVES, _STAGE, _BEGAN, _ENDED = range(4)  # int64 fields; times are CLOCK_MONOTONIC, the same for all of a host
_MAX_NAMES = _SIZE // _NAME_BYTES - 1


class Progress:
    """This rank's page of one group. ``address`` tells other processes of the host how to read it."""

    def __init__(self) -> None:
        fd = -1
        try:
            fd = os.memfd_create("magi_progress")
            os.ftruncate(fd, _SIZE)
        except (AttributeError, OSError):
            # why: no such call on this system; the page is private then and others learn nothing from it
            fd = -1
        self._page = mmap.mmap(fd, _SIZE)
        self._view = memoryview(self._page).cast("q")
        self._names: dict[str, int] = {}
        self._inside: tuple[int, int] | None = None  # index of the name of the call that this rank is in; its begin
        self.address = json.dumps([_host(), os.getpid(), _started(os.getpid()), fd]) if fd >= 0 else ""
        if fd >= 0:
            weakref.finalize(self, os.close, fd)

    @property
    def collectives(self) -> int:
        """How many collectives this rank has begun through this package."""
        return self._view[_COLLECTIVES]

    @property
    def stage(self) -> str:
        """The call that this rank is in, or nothing."""
        return "" if self._inside is None else _name_at(self._page, self._inside[0])

    def count(self) -> None:
        self._view[_COLLECTIVES] += 1

    def begin(self, stage: str) -> tuple[int, int] | None:
        """Enters a call; returns what ``end`` wants: the call around it, or None."""
        view, before = self._view, self._inside
        index = self._names.get(stage)
        if index is None:
            index = self._add_name(stage)
        view[_STAGE] = index
        view[_BEGAN] = now = monotonic_ns()
        view[_ENDED] = 0
        self._inside = (index, now)
        return before

    def end(self, before: tuple[int, int] | None) -> None:
        self._inside = before
        if before is None:
            self._view[_ENDED] = monotonic_ns()
        else:
            self._view[_STAGE], self._view[_BEGAN] = before

    def _add_name(self, stage: str) -> int:
        index = len(self._names) % _MAX_NAMES  # names are few; of more, old ones are written over
        for other in [name for name, known in self._names.items() if known == index]:
            del self._names[other]
        self._names[stage] = index
        start = _NAME_BYTES * (index + 1)
        self._page[start : start + _NAME_BYTES] = stage.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        return index


@dataclass(frozen=True)
class Sighting:
    """What was seen of a process at ``at`` (seconds of ``time.monotonic``). Times are seconds before that."""

    at: float
    is_alive: bool
    collectives: int = 0
    stage: str = ""  # the last call, or nothing
    began_ago: float = 0.0
    ended_ago: float | None = None  # None: it is inside


def look(address: str) -> Sighting | None:
    """Reads the page of another process; None if nothing can be known of it."""
    if not address:
        return None
    host, pid, started, fd = json.loads(address)
    if host != _host():
        return None
    now = time.monotonic()
    try:
        if _started(pid) != started:
            return Sighting(now, is_alive=False)
        file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)
        try:
            page = os.pread(file, _SIZE, 0)
        finally:
            os.close(file)
    except OSError:
        return Sighting(now, is_alive=False) if _started(pid) != started else None
    fields = memoryview(page)[:64].cast("q")
    began, ended = fields[_BEGAN], fields[_ENDED]
    if not began:
        return Sighting(now, True, fields[_COLLECTIVES])
    ended_ago = max(0.0, now - ended / 1e9) if ended else None
    return Sighting(
        now, True, fields[_COLLECTIVES], _name_at(page, fields[_STAGE]), max(0.0, now - began / 1e9), ended_ago
    )


def describe(name: str, seen: Sighting | None, last: Sighting | None, own: Progress, call: str = "") -> str:
    """A sentence on rank ``name``. ``seen`` is now, ``last`` when it was last seen alive; ``call`` is what this rank
    waits in, by default its present call."""
    call = call or own.stage or "this call"
    if seen is None:
        return f"Nothing is known of {name}: it runs on another host, or ended before its first call on this group."
    name = name[0].upper() + name[1:]
    if seen.is_alive:
        return f"{name} is alive and {_activity(seen, own, call)}."
    if last is None:
        return f"{name} is gone: its process has ended."
    ago, then = _seconds(seen.at - last.at), _activity(last, own, call, "had")
    return f"When last seen, {ago} ago, {name[0].lower()}{name[1:]} {then}; its process has ended since."


def _activity(seen: Sighting, own: Progress, call: str, has: str = "has") -> str:
    """``has`` is "had" for what was some time ago."""
    was, back = ("is", "ago") if has == "has" else ("was", "before")
    if not seen.stage:
        return f"{has} made no call on this group yet"
    if seen.ended_ago is None:
        inside = f"{seen.stage}, which it began {_seconds(seen.began_ago)} {back}"
        if seen.collectives > own.collectives:
            return f"{was} further on, in {inside}"
        return f"{was} in {'the same call, ' * (seen.stage == call)}{inside}"
    last = f"its last call on this group was {seen.stage}, which ended {_seconds(seen.ended_ago)} {back}"
    if seen.collectives > own.collectives:
        return f"{was} further on; {last}"
    if seen.collectives == own.collectives and seen.stage == call:
        return f"{has} left this call; {last}"
    return f"{has} not begun {call}; {last}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _name_at(page, index: int) -> str:
    start = _NAME_BYTES * (index + 1)
    return bytes(page[start : start + _NAME_BYTES]).rstrip(b"\0").decode(errors="replace")


def _host() -> str:
    """Where process numbers mean the same: this boot of this machine, and the PID namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> int:
    """When a process started, in ticks since boot, which tells it from a later one of that number; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
