# SPDX-License-Identifier: Apache-2.0
"""Runs ``kernels.fa4.precompile`` in several processes, each with a share of the shapes."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from magi_attention.errors import BuildError
from magi_attention.kernels.fa4.precompile import Shape, as_argument, environment_of


class Done(NamedTuple):
    """A shape whose kernels are in the folder, ``compiled`` of them new."""

    shape: Shape
    compiled: int


class _Job(NamedTuple):
    process: subprocess.Popen[str]
    shapes: Sequence[Shape]
    errors: IO[str]


def compile_all(
    shapes: Sequence[Shape], capability: tuple[int, int], num_sms: int, folder: Path, jobs: int
) -> Iterator[Done]:
    """Compiles what is not in ``folder`` yet and says of each shape that it is done. A process takes 1 GB.

    Raises:
        BuildError: a process failed; the text has its last words. The others are stopped.
    """
    shares = [share for first in range(jobs) if (share := shapes[first::jobs])]
    environment = {**os.environ, **environment_of(capability, num_sms), "MAGI_ATTENTION_FFA_FA4_CACHE_DIR": str(folder)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    said: queue.Queue[tuple[_Job, str | None]] = queue.Queue()
    running = [_start(share, environment) for share in shares]
    try:
        for job in running:
            threading.Thread(target=_listen, args=(job, said), daemon=True).start()
        left = len(running)
        while left:
            job, line = said.get()
            if line is not None:
                words = json.loads(line)
                yield Done(job.shapes[words["index"]], words["compiled"])
                continue
            left -= 1
            if job.process.wait():
                job.errors.seek(0)
                raise BuildError(f"FlashAttention-4 did not compile for {capability}:\n{job.errors.read()[-3000:]}")
    finally:
        for job in running:
            job.process.kill()
            job.process.wait()
            job.errors.close()


def _start(shapes: Sequence[Shape], environment: dict[str, str]) -> _Job:
    errors = tempfile.TemporaryFile("w+", errors="replace")
    command = [sys.executable, "-m", "magi_attention.kernels.fa4.precompile", *map(as_argument, shapes)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
    return _Job(process, shapes, errors)


def _listen(job: _Job, said: queue.Queue[tuple[_Job, str | None]]) -> None:
    assert job.process.stdout is not None
    for line in job.process.stdout:
        if line.startswith("{"):  # else a word of a library
            said.put((job, line))
    said.put((job, None))


__all__ = ["Done", "compile_all"]
