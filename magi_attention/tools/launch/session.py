# SPDX-License-Identifier: Apache-2.0
"""Sessions are folders: <home>/sessions/<name>/ holds session.json and runs/<number>/ with run.json and logs.

No daemon: whoever looks reads the files, and what they say of a launcher is checked against the process itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from magi_attention.env import launch as env
from magi_attention.errors import LaunchError
from magi_attention.tools.launch import processes
from magi_attention.tools.launch.plan import Target
from magi_attention.tools.launch.spec import LaunchSpec, check_name
from magi_attention.tools.launch.textfile import write_private
from magi_attention.tools.launch.toml import build

UP, DOWN = "up", "down"
# States of a run. ``lost``: its launcher is gone without having written how it ended.
RUNNING, SUBMITTED, DONE, FAILED, STOPPED, LOST = "running", "submitted", "done", "failed", "stopped", "lost"
# Kept while a run lasts and then given up, so that how it ended can be written to a disk that it filled.
RESERVE, RESERVE_BYTES = "reserve", 2**17


@dataclass
class Session:
    """``folder`` holds everything; ``state`` is up or down; ``is_implicit`` if a run made it for itself."""

    name: str
    folder: Path
    spec: LaunchSpec
    state: str = UP
    is_implicit: bool = False
    created: float = field(default_factory=time.time)


def sessions_folder() -> Path:
    return Path(env.magi_home()).expanduser().absolute() / "sessions"


def write_json(path: Path, data: Any) -> None:
    """Replaces the file in one step, so that a reader never sees half of it."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        write_private(part, json.dumps(data, indent=1) + "\n")
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise LaunchError(f"{path} cannot be written ({error.strerror}); free space, or set MAGI_HOME.") from None


def make_session(name: str, spec: LaunchSpec, is_implicit: bool = False) -> Session:
    """A new session, or one that was down.

    Raises:
        LaunchError: it is up already, or its folder cannot be written.
    """
    folder = sessions_folder() / check_name(name)
    if (folder / "session.json").exists() and read_session(name).state == UP:
        raise LaunchError(f"Session {name} is up already; `magi down {name}` ends it, or choose another --name.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)  # the spec may hold secrets for the ranks, and logs what they print
        folder.chmod(0o700)
        (folder / "runs").mkdir(exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"The session folder {folder} cannot be made ({error.strerror}); make it writable, or set MAGI_HOME to "
            "a folder that is."
        ) from None
    session = Session(name, folder, spec, is_implicit=is_implicit)
    save_session(session)
    return session


def save_session(session: Session) -> None:
    data = {"state": session.state, "is_implicit": session.is_implicit, "created": session.created}
    write_json(session.folder / "session.json", {**data, "spec": dataclasses.asdict(session.spec)})


def read_session(name: str) -> Session:
    """``LaunchError`` if there is none of that name."""
    folder = sessions_folder() / check_name(name)
    try:
        data = json.loads((folder / "session.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LaunchError(f"There is no session {name} in {folder.parent}; `magi status` lists them.") from None
    except (OSError, ValueError) as error:
        raise LaunchError(f"{folder / 'session.json'} cannot be read ({error}); remove {folder}.") from None
    spec = build(LaunchSpec, data["spec"], str(folder / "session.json"))
    return Session(name, folder, spec, data["state"], data["is_implicit"], data["created"])


def list_sessions() -> list[Session]:
    """All of them, oldest first."""
    folders = sessions_folder().glob("*/session.json")
    return sorted((read_session(path.parent.name) for path in folders), key=lambda s: s.created)


@contextlib.contextmanager
def locked(session: Session) -> Iterator[None]:
    """One run at a time in a session; the lock goes with the process that holds it."""
    with open(session.folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LaunchError(
                f"Session {session.name} is running something already; wait for it (`magi status {session.name}`), "
                "stop it with Ctrl-C where it was started, or use another --name."
            ) from None
        yield


# ---- runs -----------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One run as its run.json tells it. ``exit_code`` and ``reason`` are set once it has ended."""

    target: Target
    state: str
    data: dict[str, Any]

    @property
    def folder(self) -> Path:
        return Path(self.target.folder)


def next_target(session: Session) -> Target:
    """The next run of the session; nothing is written."""
    numbers = [int(p.name) for p in (session.folder / "runs").glob("*") if p.name.isdecimal()]
    run = f"{max(numbers, default=0) + 1:03d}"
    folder = session.folder / "runs" / run
    run_id, token = f"{session.name}-{run}-{secrets.token_hex(3)}", secrets.token_hex(16)
    return Target(session.name, run, run_id, str(folder), _node_folder(session, run), token)


def _node_folder(session: Session, run: str) -> str:
    """Where nodes write: the same place if they are this machine, else below their own home folders."""
    if session.spec.engine in ("local", "docker") or env.is_magi_home_set():
        return str(session.folder / "runs" / run)
    return f"~/.magi/sessions/{session.name}/runs/{run}"


def start_run(session: Session, target: Target, facts: dict[str, Any]) -> Run:
    """Makes the folder and its run.json; the launcher is this process."""
    try:
        Path(target.folder).mkdir(parents=True)
    except OSError as error:
        raise LaunchError(f"{target.folder} cannot be made ({error.strerror}); free space, or set MAGI_HOME.") from None
    own = os.getpid()
    launcher = {"pid": own, "start_time": processes.start_time(own), "boot": _boot_id()}
    recorded = dataclasses.asdict(dataclasses.replace(target, token=""))
    data = {"target": recorded, "state": RUNNING, "started": time.time(), "launcher": launcher}
    run = Run(target, RUNNING, {**data, **facts})
    try:
        (run.folder / RESERVE).write_bytes(b"0" * RESERVE_BYTES)
    except OSError as error:
        raise LaunchError(f"{target.folder} has no room ({error.strerror}); free space, or set MAGI_HOME.") from None
    save_run(run)
    return run


def save_run(run: Run) -> None:
    write_json(run.folder / "run.json", {**run.data, "state": run.state})


def end_run(run: Run, state: str, exit_code: int | None, reason: str) -> None:
    (run.folder / RESERVE).unlink(missing_ok=True)
    run.state = state
    run.data.update(ended=time.time(), exit_code=exit_code, reason=reason)
    save_run(run)


def read_runs(session: Session) -> list[Run]:
    """All runs, oldest first; one whose launcher is gone has the state ``lost``, in memory only."""
    runs = []
    for path in sorted((session.folder / "runs").glob("*/run.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise LaunchError(f"{path} cannot be read ({error}); remove its folder.") from None
        state = data["state"]
        if state == RUNNING and not _is_alive(data["launcher"]):
            state = LOST
        runs.append(Run(Target(**data["target"]), state, data))
    return runs


def find_run(session: Session, number: str | None) -> Run:
    """The run of that number, the latest without; ``LaunchError`` if there is none."""
    runs = read_runs(session)
    if number is not None:
        runs = [r for r in runs if r.target.run.lstrip("0") == number.lstrip("0")]
    if not runs:
        raise LaunchError(f"Session {session.name} has no run{f' {number}' if number else ''} yet.")
    return runs[-1]


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def _is_alive(launcher: dict[str, Any]) -> bool:
    """Does the launcher still run? False on another machine or after a reboot, too."""
    return launcher["boot"] == _boot_id() and processes.start_time(launcher["pid"]) == launcher["start_time"]
