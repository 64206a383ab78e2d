# SPDX-License-Identifier: Apache-2.0
"""Reading the merged log of a run: by rank, by node, by pattern, and as it grows."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from magi_attention.errors import LaunchError
from magi_attention.tools.launch.plan import Step
from magi_attention.tools.launch.spec import LaunchSpec

_RANK = re.compile(r"^\[rank (\d+)\]: ?")
_ERROR_BYTES = 2000  # of what a command that failed wrote last
_NODE = re.compile(r"^\[node (\d+)\]: ?")


@dataclass(frozen=True)
class Selection:
    """Which lines are wanted; a node has its own lines and those of its ranks."""

    rank: int | None = None
    node: int | None = None
    ranks_per_node: int = 1
    pattern: re.Pattern[str] | None = None

    def has(self, line: str) -> bool:
        rank, node = _RANK.match(line), _NODE.match(line)
        if self.rank is not None and (rank is None or int(rank[1]) != self.rank):
            return False
        if self.node is not None:
            of = int(node[1]) if node else int(rank[1]) // self.ranks_per_node if rank else None
            if of != self.node:
                return False
        return self.pattern is None or self.pattern.search(line) is not None


def make_selection(rank: int | None, node: int | None, spec: LaunchSpec, grep: str | None) -> Selection:
    """``LaunchError`` for a rank or node that the run of ``spec`` has not, and where ``grep`` is no regular
    expression."""
    if node is not None and not 0 <= node < spec.nodes:
        raise LaunchError(f"--node is {node}; the run has nodes 0 to {spec.nodes - 1}.")
    first, behind = (0, spec.world_size) if node is None else (n * spec.ranks_per_node for n in (node, node + 1))
    if rank is not None and not first <= rank < behind:
        of = "the run" if node is None else f"node {node}"
        raise LaunchError(f"--rank is {rank}; {of} has ranks {first} to {behind - 1}.")
    try:
        pattern = re.compile(grep) if grep else None
    except re.error as error:
        raise LaunchError(f"--grep {grep!r} is no regular expression ({error}).") from None
    return Selection(rank, node, spec.ranks_per_node, pattern)


def select(lines: Iterator[str], selection: Selection) -> Iterator[str]:
    return (line for line in lines if selection.has(line))


def lines_of(step: Step) -> Iterator[str]:
    """What a command prints, as it does; ``LaunchError`` if it fails."""
    with tempfile.TemporaryFile() as errors:  # why no pipe: nobody reads it before the end, and a full one stops it
        try:
            process = subprocess.Popen(step.argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
        except OSError as error:
            raise LaunchError(f"{step.argv[0]} cannot be started ({error.strerror}).") from None
        try:
            for line in process.stdout:
                yield line.decode("utf-8", "replace").rstrip("\n")
            if process.wait() != 0:
                errors.seek(max(errors.seek(0, os.SEEK_END) - _ERROR_BYTES, 0))
                words = errors.read().decode("utf-8", "replace").strip()
                raise LaunchError(f"`{step.text()}` failed: {words}")
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def read_lines(path: Path, is_running: Callable[[], bool] | None = None, poll_s: float = 0.2) -> Iterator[str]:
    """The lines of a log without their ends; with ``is_running`` also those that still come while it is true."""
    try:
        with path.open("rb") as file:
            pending = b""
            while True:
                was_running = is_running is not None and is_running()
                while chunk := file.read(1 << 16):
                    *lines, pending = (pending + chunk).split(b"\n")
                    yield from (line.decode("utf-8", "replace") for line in lines)
                if not was_running:
                    break
                time.sleep(poll_s)
            if pending:
                yield pending.decode("utf-8", "replace")
    except FileNotFoundError:
        raise LaunchError(f"There is no log yet at {path}.") from None
