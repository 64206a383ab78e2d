# SPDX-License-Identifier: Apache-2.0
"""torchrun with whole lines: ``python -m magi_attention.tools.launch.torchrun`` takes what ``torchrun`` takes.

torchrun follows the files of its ranks, one thread for each file, and passes on what it finds behind a prefix. A rank
that writes a line in pieces, as Python does under PYTHONUNBUFFERED, gets a prefix in the middle of the line, and what
it printed before may come in the middle of its traceback.
"""

from __future__ import annotations

import re
import sys
import threading
from typing import TextIO

from magi_attention.tools.launch.failure import OF_TORCH, TRACEBACK

PREFIX = re.compile(r"^\[rank \d+\]: ")  # by LINE_PREFIX of ``failure.py``
MOST_HELD = 500  # lines of a traceback; a longer one goes on in pieces


class WholeLines:
    """Passes text on to ``stream`` line by line, a traceback in one piece. Each thread has a line of its own.

    ``lock``: streams that end in one pipe share it.
    """

    def __init__(self, stream: TextIO, lock: threading.Lock):
        self._stream = stream
        self._lock = lock
        self._begun: dict[int, str] = {}  # by thread: a line without its end
        self._traceback: dict[int, list[str]] = {}  # by thread: lines up to the one that names the error

    def write(self, text: str) -> int:
        thread = threading.get_ident()
        with self._lock:
            begun = self._begun.pop(thread, "")
            line = begun + (PREFIX.sub("", text) if begun else text)
            if line.endswith("\n"):
                self._pass_on(thread, line)
            else:
                self._begun[thread] = line
        return len(text)

    def _pass_on(self, thread: int, line: str) -> None:
        words = OF_TORCH.sub("", PREFIX.sub("", line))
        if thread not in self._traceback and not words.startswith(TRACEBACK):
            self._stream.write(line)
            return
        held = self._traceback.setdefault(thread, [])
        held.append(line)
        if (words[0] != " " and len(held) > 1) or len(held) == MOST_HELD:
            self._stream.write("".join(self._traceback.pop(thread)))
            self._stream.flush()

    def flush(self) -> None:
        self._stream.flush()

    def finish(self) -> None:
        """Ends the lines that nobody will go on with."""
        with self._lock:
            for lines in self._traceback.values():
                self._stream.write("".join(lines))
            for line in self._begun.values():
                self._stream.write(f"{line}\n" if line else "")
            self._traceback.clear()
            self._begun.clear()
        self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def main() -> None:
    lock = threading.Lock()
    streams = [WholeLines(sys.stdout, lock), WholeLines(sys.stderr, lock)]
    # before torch is imported: its loggers keep the stream that they find
    sys.stdout, sys.stderr = streams  # type: ignore[assignment]
    from torch.distributed.run import main as run

    try:
        run()
    finally:
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        for stream in streams:
            stream.finish()


if __name__ == "__main__":
    main()
