# SPDX-License-Identifier: Apache-2.0
"""The verbs: up, run, status, logs, down. Each looks at the files, asks an engine for a plan and carries it out."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from magi_attention.env import secrets
from magi_attention.errors import LaunchError
from magi_attention.tools.launch import processes, provenance, rollcall, session
from magi_attention.tools.launch.engines import docker, engine_of
from magi_attention.tools.launch.node import check_command
from magi_attention.tools.launch.plan import LaunchPlan
from magi_attention.tools.launch.session import Run, Session
from magi_attention.tools.launch.spec import LaunchSpec, check_name, check_spec
from magi_attention.tools.launch.supervise import Outcome, Supervisor, run_steps, write_files
from magi_attention.tools.launch.textfile import open_private

STEP_TIMEOUT_S = 60.0
IMAGE_TIMEOUT_S = 1800.0  # an image may have to be pulled
QUEUE_GRACE_S = 60.0  # a queue may not show a job at once
LEFT_QUEUE = "not in the queue"
Report = Callable[[str], None]


def plan_up(spec: LaunchSpec, name: str) -> LaunchPlan:
    return engine_of(spec.engine).up(spec, check_name(name))


def up(spec: LaunchSpec, name: str, report: Report, is_implicit: bool = False) -> Session:
    """Makes the session and what its runs need; nothing is left of it if that fails.

    Raises:
        LaunchError: with the command that failed.
    """
    made = session.make_session(name, spec, is_implicit)
    try:
        run_steps(plan_up(spec, name), IMAGE_TIMEOUT_S if spec.container.image else STEP_TIMEOUT_S, report)
    except (LaunchError, KeyboardInterrupt):
        made.state = session.DOWN
        session.save_session(made)
        raise
    return made


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def with_command(spec: LaunchSpec, command: Sequence[str]) -> LaunchSpec:
    """``spec`` that runs ``command``, or its own without one; on this machine with a port that is free now."""
    spec = dataclasses.replace(spec, command=tuple(command) or spec.command)
    if not spec.command:
        raise LaunchError("There is nothing to run; give a script, as in `magi run train.py -- --steps 10`.")
    if spec.engine == "local" and spec.rendezvous.port is None:
        spec = dataclasses.replace(spec, rendezvous=dataclasses.replace(spec.rendezvous, port=free_port()))
    return check_spec(spec)


def check_here(spec: LaunchSpec) -> None:
    """``LaunchError`` if what is to be run is not there; on other machines the nodes see to it themselves."""
    if spec.engine == "local":
        check_command(spec.command, has_same_python=not spec.python and "PYTHONPATH" not in spec.environment)
        if spec.rendezvous.address:
            rollcall.find_address(spec.rendezvous.address, 0)


def plan_run(made: Session, command: Sequence[str]) -> LaunchPlan:
    return engine_of(made.spec.engine).run(with_command(made.spec, command), session.next_target(made))


def run(made: Session, command: Sequence[str], report: Report, show: bool = True) -> tuple[Run, Outcome]:
    """Runs ``command`` on every rank of the session and waits for it; a queue only gets it submitted. What the ranks
    print goes to the log and, with ``show``, to standard output.

    Raises:
        LaunchError: it could not be started.
    """
    spec = with_command(made.spec, command)
    check_here(spec)
    engine = engine_of(spec.engine)
    with session.locked(made):
        target = session.next_target(made)
        plan = engine.run(spec, target)
        hide = secrets.hider(spec.environment)
        facts = provenance.facts([hide(secrets.shown_argument(word)) for word in sys.argv])
        facts.update(command=list(spec.command), plan=hide(plan.text()))
        facts.update(nodes=spec.nodes, world_size=spec.world_size)
        facts["image"] = _image(spec)
        current = session.start_run(made, target, facts)
        try:
            write_files(plan.files)
            if engine.IS_QUEUE:
                answer = run_steps(plan, STEP_TIMEOUT_S, report)[-1].strip()
                current.data["job"] = answer
                session.end_run(current, session.SUBMITTED, None, "")
                return current, Outcome(0, f"Submitted: {answer}")
            terminal = Terminal() if show else None
            outcome = _supervise(plan, current, spec.grace_s, terminal or (lambda line: None))
            outcome.output_error = terminal and terminal.error
        except LaunchError as error:
            session.end_run(current, session.FAILED, None, str(error))
            raise
        if not outcome.is_clean:
            try:
                run_steps(engine.leftovers(spec, target), STEP_TIMEOUT_S, report)
            except LaunchError as error:
                outcome.reason += f" Tidying up failed, `magi down {made.name}` tries again: {error}"
        state = session.STOPPED if outcome.is_stopped else session.FAILED if outcome.exit_code else session.DONE
        session.end_run(current, state, outcome.exit_code, outcome.reason)
        return current, outcome


def _image(spec: LaunchSpec) -> dict[str, str] | None:
    """The image and, where this machine knows it, its digest."""
    if not spec.container.image:
        return None
    known = provenance.output_of(docker.image_digest(spec).argv) if spec.engine == "docker" else None
    return {"name": spec.container.image, "digest": known or "unknown here"}


class Terminal:
    """Standard output for the lines of a run. Once it is full or its reader is gone, which ``error`` tells, the run
    goes on without it: the log has it all."""

    def __init__(self) -> None:
        self.error: OSError | None = None

    def __call__(self, line: bytes) -> None:
        if self.error or sys.stdout is None:
            return
        try:
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
        except OSError as error:
            self.error = error


def _supervise(plan: LaunchPlan, current: Run, grace_s: float, show: Callable[[bytes], None]) -> Outcome:
    try:
        log = open(open_private(current.folder / "output.log"), "wb")
    except OSError as error:
        raise LaunchError(f"{current.folder / 'output.log'} cannot be made ({error.strerror}).") from None
    try:
        return Supervisor(plan, log, show, grace_s).run()
    finally:
        try:
            log.close()
        except OSError:
            pass  # why: a full disk, which the outcome tells


# ---- looking --------------------------------------------------------------------------------------------


def refresh(made: Session) -> list[Run]:
    """The runs as they are now: asks the queue, and ends on this machine what a dead launcher left."""
    engine, runs = engine_of(made.spec.engine), session.read_runs(made)
    for current in runs:
        if current.state == session.LOST and current.data["state"] != session.LOST:
            ended = processes.stop_marked(current.target.run_id, made.spec.grace_s)
            left = f"; {len(ended)} processes that it left here were ended" if ended else ""
            session.end_run(current, session.LOST, None, f"Its launcher ended without a word{left}.")
        elif current.state == session.SUBMITTED and engine.IS_QUEUE:
            _ask_queue(engine, made.spec, current)
    return runs


def _ask_queue(engine: Any, spec: LaunchSpec, current: Run) -> None:
    step = engine.status(spec, current.target)
    answer = provenance.output_of(step.argv, STEP_TIMEOUT_S)
    if answer is None:
        current.data["queue"] = f"unknown, `{step.text()}` failed"
        return
    current.data["queue"] = ", ".join(sorted({line for line in answer.splitlines() if line})) or LEFT_QUEUE
    code_file = current.folder / "exit_code"
    text = code_file.read_text().strip() if code_file.exists() else ""
    if text:  # it is empty for a moment before the job writes it
        code = int(text)
        session.end_run(current, session.FAILED if code else session.DONE, code, "")
    elif current.data["queue"] in ("Succeeded", "Failed"):
        is_done = current.data["queue"] == "Succeeded"
        session.end_run(current, session.DONE if is_done else session.FAILED, int(not is_done), "")
    elif current.data["queue"] == LEFT_QUEUE and time.time() - current.data["started"] > QUEUE_GRACE_S:
        session.end_run(current, session.FAILED, None, "It left the queue without a result; its log may say why.")


def describe(made: Session, runs: Sequence[Run]) -> dict[str, Any]:
    """A session as plain values, for tables and JSON."""
    rows = []
    for current in runs:
        data = current.data
        seconds = (data.get("ended") or time.time()) - data["started"]
        row = {"run": current.target.run, "state": current.state, "seconds": round(seconds, 1)}
        row.update(command=data["command"], exit_code=data.get("exit_code"), reason=data.get("reason") or "")
        # What the queue says only matters as long as the run is its own.
        queue = data.get("queue", "") if current.state == session.SUBMITTED else ""
        rows.append({**row, "queue": queue, "folder": current.target.folder})
    spec = made.spec
    facts = {"session": made.name, "state": made.state, "engine": spec.engine, "nodes": spec.nodes}
    return {**facts, "ranks_per_node": spec.ranks_per_node, "folder": str(made.folder), "runs": rows}


# ---- ending ---------------------------------------------------------------------------------------------


def plan_down(made: Session, runs: Sequence[Run]) -> LaunchPlan:
    """What `down` runs: for a queue all runs, because finished objects stay there, else those not known to be over."""
    engine, over = engine_of(made.spec.engine), (session.DONE, session.FAILED, session.STOPPED)
    targets = [r.target for r in runs if engine.IS_QUEUE or r.state not in over]
    return engine.down(made.spec, made.name, targets)


def down(made: Session, report: Report, remove: bool = False) -> None:
    """Stops what runs in the session and frees what it holds; again does nothing more."""
    for current in session.read_runs(made):
        if current.state == session.RUNNING and current.data["launcher"]["pid"] != os.getpid():
            _stop_launcher(current, made.spec.grace_s, report)
    runs = session.read_runs(made)
    if made.state == session.UP or any(r.state in (session.LOST, session.SUBMITTED) for r in runs):
        run_steps(plan_down(made, runs), STEP_TIMEOUT_S, report)
    for current in runs:
        if current.state in (session.LOST, session.SUBMITTED) and not current.data.get("exit_code"):
            session.end_run(current, session.STOPPED, None, current.data.get("reason") or "Ended by `magi down`.")
    if remove:
        shutil.rmtree(made.folder)
    elif made.state != session.DOWN:
        made.state = session.DOWN
        session.save_session(made)


def _stop_launcher(current: Run, grace_s: float, report: Report) -> None:
    """Asks the launcher of a run on this machine to stop, then ends it."""
    pid = current.data["launcher"]["pid"]
    report(f"stop run {current.target.run}, whose launcher is process {pid}")
    # why so long: it has to end its nodes and then whatever they left, which takes time on a busy machine
    deadline = time.monotonic() + 3 * grace_s + 60
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        while time.monotonic() < deadline:
            if processes.start_time(pid) != current.data["launcher"]["start_time"]:
                return
            time.sleep(0.1)
        deadline = time.monotonic() + 5
