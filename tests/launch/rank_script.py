# SPDX-License-Identifier: Apache-2.0
"""What the launched ranks do in these tests; needs no torch, so that a run takes torchrun's own seconds only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FOREVER_S = 3600  # the test ends the ranks long before
mode, *rest = sys.argv[1:]
rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]


def say(line: str) -> None:
    """In one write, because ranks share a pipe; ``print`` without a buffer writes the end of a line on its own."""
    os.write(1, f"{line}\n".encode())


say(f"rank {rank} of {world} says {mode} {rest} {os.environ.get('GREETING', '')}")
for name in rest:
    if name in os.environ:
        say(f"{name} is {os.environ[name]}")
print(f"rank {rank} on stderr", file=sys.stderr, flush=True)
if mode == "crash" and rank == rest[0]:
    sys.exit(7)
if mode == "fill":
    while True:
        print("x" * 4000, flush=True)
if mode in ("wait", "crash"):
    time.sleep(FOREVER_S)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # a grandchild in a session of its own, as a data loader or a server may start one
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER_S})"], start_new_session=True)
    Path(rest[0], f"ready{rank}").touch()
    time.sleep(FOREVER_S)
