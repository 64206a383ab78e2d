# SPDX-License-Identifier: Apache-2.0
"""torchrun with whole lines: ``python -m magi_attention.tools.launch.torchrun`` takes what ``torchrun`` takes.

torchrun follows the files of its ranks, one thread for each file, and passes on what it finds behind a prefix. A rank
that writes a line in pieces, as Python does under PYTHONUNBUFFERED, gets a prefix in the middle of the line.
"""

from __future__ import annotations

import re
import sys
import threading
from typing import TextIO

PREFIX = re.compile(r"^\[rank \d+\]: ")  # by LINE_PREFIX of ``failure.py``


class WholeLines:
    """Passes text on to ``stream`` once it ends with a newline. Each thread has a line of its own."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._lock = threading.Lock()
        self._begun: dict[int, str] = {}  # by thread

    def write(self, text: str) -> int:
        with self._lock:
            begun = self._begun.pop(threading.get_ident(), "")
            line = begun + (PREFIX.sub("", text) if begun else text)
            if line.endswith("\n"):
                self._stream.write(line)
            else:
                self._begun[threading.get_ident()] = line
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def finish(self) -> None:
        """Ends the lines that nobody will go on with."""
        with self._lock:
            for line in self._begun.values():
                self._stream.write(f"{line}\n" if line else "")
            self._begun.clear()
        self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def main() -> None:
    streams = [WholeLines(sys.stdout), WholeLines(sys.stderr)]
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
