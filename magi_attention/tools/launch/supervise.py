# SPDX-License-Identifier: Apache-2.0
"""Runs a ``LaunchPlan``: node commands together with their output merged, or steps one after another."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO

from magi_attention.errors import LaunchError
from magi_attention.tools.launch.failure import FailureReport, describe_code
from magi_attention.tools.launch.node import REFUSED, STOPPED
from magi_attention.tools.launch.plan import LaunchPlan, RenderedFile, Step
from magi_attention.tools.launch.textfile import write_private

OTHERS_GRACE_S = 5.0  # for the other nodes, whose last lines may tell more about a failure
REFUSED_GRACE_S = 1.0  # where a node did not even start, they have less to tell
_PREFIX = re.compile(rb"\[(rank|node) \d+\]:")


@dataclass
class Outcome:
    """How a plan ended: ``exit_code`` 0 or that of the first node that failed, and a sentence. ``last_words`` are the
    last lines of the rank that failed first, where one is known. ``output_error`` is what kept its lines from standard
    output, from some line on."""

    exit_code: int
    reason: str
    is_stopped: bool = False
    is_clean: bool = True  # every node ended by itself; else something may be left of it
    last_words: tuple[str, ...] = ()
    output_error: OSError | None = None


@dataclass
class _Node:
    number: int
    step: Step
    process: subprocess.Popen
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=30))
    report: FailureReport = field(default_factory=FailureReport)
    refusal: str = ""
    is_over: bool = False
    killed_at: float | None = None  # when its end by a signal was seen, while its output was still open


def write_files(files: tuple[RenderedFile, ...]) -> None:
    for file in files:
        try:
            write_private(file.path, file.text)
        except OSError as error:
            raise LaunchError(f"{file.path} cannot be written ({error.strerror}); free space there.") from None


def run_steps(plan: LaunchPlan, timeout_s: float, report: Callable[[str], None]) -> list[str]:
    """Runs the steps one after another and returns what each printed.

    Raises:
        LaunchError: a step failed; with its command and last lines.
    """
    outputs = []
    for step in plan.steps:
        report(step.label)
        try:
            done = subprocess.run(
                step.argv,
                env={**os.environ, **step.environment},
                input=step.stdin,  # and then its end
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
            )
            printed = done.stdout.decode("utf-8", "replace")
        except OSError as error:
            raise LaunchError(
                f"{step.argv[0]} cannot be started ({error.strerror}), which was to {step.label}; install it or "
                "choose another engine."
            ) from None
        except subprocess.TimeoutExpired:
            raise LaunchError(f"{step.text()} had not ended after {timeout_s:g} s ({step.label}).") from None
        is_tolerated = bool(step.tolerated) and step.tolerated.lower() in printed.lower()
        if done.returncode != 0 and not is_tolerated:
            words = " ".join(printed.split())[-600:] or "it printed nothing"
            raise LaunchError(f"{step.label}: `{step.text()}` ended with code {done.returncode}: {words}")
        outputs.append(printed)
    return outputs


class Supervisor:
    """Starts the nodes of a plan and stays until the last one is gone. Lines without a prefix of their own get that
    of their node; all go to ``log`` and to ``show``."""

    def __init__(self, plan: LaunchPlan, log: BinaryIO, show: Callable[[bytes], None], grace_s: float):
        self._plan, self._log, self._show, self._grace_s = plan, log, show, grace_s
        self._lines: queue.SimpleQueue[tuple[_Node, bytes | None]] = queue.SimpleQueue()
        self._nodes: list[_Node] = []
        self._open = 0  # nodes whose output has not ended
        self._first: _Node | None = None  # the first that failed
        self._asked_at: float | None = None  # when all were asked to stop
        self._stop_at: float | None = None
        self._is_clean = True
        self._disk_error = ""

    def run(self) -> Outcome:
        """Runs to the end. Ctrl-C, SIGTERM or SIGHUP stops all nodes, a second one at once; the outcome says so.

        Raises:
            LaunchError: a command could not be started; the others were stopped.
        """
        previous = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
        refused, is_stopped = None, False
        try:
            try:
                for number, step in enumerate(self._plan.steps):
                    self._start(number, step)
            except LaunchError as error:
                refused, self._stop_at = error, 0.0
            while self._open:
                try:
                    self._follow()
                except KeyboardInterrupt:
                    if is_stopped:
                        self._kill()
                    is_stopped, self._stop_at = True, 0.0
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        if refused:
            raise refused
        # A signal ended the runner before it could tidy up, or a connection was lost (255 of ssh).
        if any(n.process.returncode < 0 or n.process.returncode == 255 for n in self._nodes):
            self._is_clean = False
        if is_stopped:
            return Outcome(STOPPED, "It was stopped before its end.", True, self._is_clean)
        if self._disk_error:
            return Outcome(1, self._disk_error, is_clean=self._is_clean)
        if self._first is None:
            return Outcome(0, "")
        cause = self._cause(self._first)
        words = () if cause.refusal else tuple(cause.report.last_words())
        return Outcome(abs(cause.process.returncode), self._sentence(cause), False, self._is_clean, words)

    def _start(self, number: int, step: Step) -> None:
        try:
            # In a session of its own Ctrl-C reaches only this process, which then stops the nodes in good order.
            # Its standard input stays open: its end tells the node that the launcher is gone.
            process = subprocess.Popen(
                step.argv,
                env={**os.environ, **step.environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"{step.label}: {step.argv[0]} cannot be started ({error.strerror}).") from None
        node = _Node(number, step, process)
        self._nodes.append(node)
        self._open += 1
        threading.Thread(target=self._read, args=(node,), daemon=True).start()
        if step.stdin:  # in a thread: it may not fit into the pipe, and nobody may come to read it
            threading.Thread(target=_write_all, args=(process.stdin.fileno(), step.stdin), daemon=True).start()

    def _read(self, node: _Node) -> None:
        for line in node.process.stdout:
            self._lines.put((node, line))
        self._lines.put((node, None))

    def _follow(self) -> None:
        """Takes lines until every node has ended; after the first failure the others get a moment."""
        while self._open:
            self._keep_time()
            self._look_for_killed()
            try:
                node, line = self._lines.get(timeout=0.2)
            except queue.Empty:
                continue
            if line is not None:
                self._take(node, line)
            else:
                self._end(node)

    def _look_for_killed(self) -> None:
        """A runner that was killed could not end its ranks, which may hold its output open for as long as they live."""
        for node in self._nodes:
            if node.is_over or (node.process.poll() or 0) >= 0:
                continue
            if node.killed_at is None:
                node.killed_at = time.monotonic()
            elif time.monotonic() - node.killed_at > self._grace_s:
                self._end(node)

    def _end(self, node: _Node) -> None:
        if node.is_over:
            return
        node.is_over = True
        self._open -= 1
        if node.process.wait() != 0 and self._first is None:
            self._first = node
            grace = REFUSED_GRACE_S if node.refusal else OTHERS_GRACE_S
            self._stop_at = self._stop_at or time.monotonic() + grace

    def _keep_time(self) -> None:
        """Asks all to stop once it is time to: by the end of their input, then SIGTERM, then SIGKILL."""
        now = time.monotonic()
        if self._asked_at is None:
            if self._stop_at is not None and now >= self._stop_at:
                self._asked_at = now
                for node in self._nodes:
                    with contextlib.suppress(BrokenPipeError):
                        node.process.stdin.close()
            return
        # why the runner's own grace comes first: it has to end torchrun, which has to end the ranks
        waited = now - self._asked_at
        if waited > 2 * self._grace_s + 4:
            self._kill()
        elif waited > self._grace_s + 2:
            for node in self._nodes:
                node.process.terminate()

    def _kill(self) -> None:
        for node in self._nodes:
            if node.process.poll() is None:
                self._is_clean = False
                node.process.kill()
            node.process.wait()
        self._open = 0  # why not wait for the end of the output: what was left running may hold it open

    def _take(self, node: _Node, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\n")
        node.tail.append(text)
        is_for_log = node.report.take(text)  # torchrun's account of a failure is long; the outcome tells it
        if "]: refused: " in text:
            node.refusal = text.partition("]: refused: ")[2]
        if not line.endswith(b"\n"):  # the last words of a node must not run into those of another
            line += b"\n"
        if not _PREFIX.match(line):
            line = f"[node {node.number}]: ".encode() + line
        if self._asked_at is None and not is_for_log:  # what comes while all are stopping is for the log, too
            self._show(line)
        if self._disk_error:
            return
        try:
            self._log.write(line)
            self._log.flush()
        except OSError as error:
            name = getattr(self._log, "name", "the log")
            self._disk_error = f"{name} cannot be written ({error.strerror}), so the run was stopped; free space."

    def _cause(self, first: _Node) -> _Node:
        """The node whose failure tells most: one that refused, then one with a named rank, then the first."""
        failed = [n for n in self._nodes if n.process.returncode not in (0, STOPPED)]
        for wanted in ([n for n in failed if n.refusal], [first] if first.report.sentence else []):
            if wanted:
                return wanted[0]
        return next((n for n in failed if n.report.sentence), first)

    def _sentence(self, node: _Node) -> str:
        if node.refusal and node.process.returncode == REFUSED:
            return node.refusal
        if node.report.sentence:
            others = [n for n in self._nodes if n is not node and n.report.sentence]
            rest = "".join(f"; {n.report.sentence} on {n.step.label}" for n in others)
            return f"R{node.report.sentence[1:]} on {node.step.label}{rest}."
        lines = [line.strip() for line in node.tail if line.strip()]
        last = f": {' '.join(lines[-3:])[-600:]}" if lines else " and printed nothing."
        ending = describe_code(node.process.returncode)
        return f"{node.step.label[0].upper()}{node.step.label[1:]} ended with {ending}{last}"


def _write_all(descriptor: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # why: the command is gone, which the supervisor sees
        while data:
            data = data[os.write(descriptor, data) :]


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
