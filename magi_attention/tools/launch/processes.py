# SPDX-License-Identifier: Apache-2.0
"""Processes of a run, found by a variable in their environment, so that none escapes by changing its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

MARK = "MAGI_RUN_ID"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def marked_processes(run_id: str, proc: Path = Path("/proc")) -> list[int]:
    """Process ids of this user's processes that belong to the run, without this process and those above it.

    The mark of a whole run is its id; that of what node k started is ``<id>/<k>``, which the id finds too.
    """
    if not proc.is_dir():
        return []  # no Linux: what ends by itself has to do
    own = _ancestors(os.getpid(), proc)
    wanted = f"{MARK}={run_id}".encode()
    found = []
    for folder in proc.iterdir():
        if not folder.name.isdecimal() or int(folder.name) in own:
            continue
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            if any(v == wanted or v.startswith(wanted + b"/") for v in variables):
                if not is_zombie(int(folder.name), proc):
                    found.append(int(folder.name))
        except OSError:  # why: it ended, or is another user's
            continue
    return sorted(found)


def _stat(pid: int, proc: Path) -> list[str]:
    """Fields of /proc/<pid>/stat from the state on; the name before them may hold blanks."""
    return (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()


def is_zombie(pid: int, proc: Path = Path("/proc")) -> bool:
    return _stat(pid, proc)[0] == "Z"


def start_time(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Clock ticks after boot when the process started, by which a reused number is told apart; None if it ended.
    Without /proc 0 for any living process."""
    if not proc.is_dir():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        return 0
    try:
        fields = _stat(pid, proc)
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _ancestors(pid: int, proc: Path) -> set[int]:
    found = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            pid = int(_stat(pid, proc)[1])
        except OSError:
            break
    return found


def stop_marked(run_id: str, grace_s: float) -> list[int]:
    """Ends all processes of the run: SIGTERM, after ``grace_s`` SIGKILL. Returns those that it had to signal."""
    touched = set(_signal_all(marked_processes(run_id), signal.SIGTERM))
    deadline = time.monotonic() + grace_s
    while (left := marked_processes(run_id)) and time.monotonic() < deadline:
        time.sleep(0.05)
    while left:
        touched.update(_signal_all(left, signal.SIGKILL))
        time.sleep(0.05)
        left = marked_processes(run_id)
        if time.monotonic() > deadline + 10:
            break  # in the kernel, as on a dead network disk: nobody can end it
    return sorted(touched)


def _signal_all(pids: list[int], number: signal.Signals) -> list[int]:
    reached = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            reached.append(pid)
    return reached


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent ends (Linux)."""
    prctl = _prctl()
    if prctl:
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> Callable[[], None]:
    """A ``preexec_fn``: the process gets SIGTERM when the thread that started it ends (Linux)."""
    prctl = _prctl()  # why here: after the fork nothing should be loaded any more

    def ask() -> None:
        if prctl:
            prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    return ask


def _prctl() -> Callable[..., int] | None:
    """Where there is no prctl the sweep by mark has to do."""
    return getattr(ctypes.CDLL(None), "prctl", None)
