# SPDX-License-Identifier: Apache-2.0
"""One compiler call of a build: runs it, keeps its log and time, and puts its output in place whole.

    python step.py OUTPUT -- COMMAND ...

``{out}`` in the command stands for a temporary name beside OUTPUT, which takes its place only on success, so a
build that is killed leaves no half-written file. ``OUTPUT.json`` tells seconds, bytes, command and log. Called
by ninja through its path, with nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def main(arguments: list[str]) -> int:
    out, command = Path(arguments[0]), arguments[2:]
    partial = out.with_name(f"{out.name}.{os.getpid()}.part")
    started = time.monotonic()
    try:
        filled = [word.replace("{out}", str(partial)) for word in command]
        done = subprocess.run(filled, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.stdout.write(done.stdout)
            return done.returncode
        report = {
            "seconds": round(time.monotonic() - started, 3),
            "bytes": partial.stat().st_size,
            "command": filled,
            "log": done.stdout,
        }
        # The report first: an output without one would never be looked at by the guard.
        partial_report = partial.with_suffix(".json")
        partial_report.write_text(json.dumps(report))
        os.replace(partial_report, f"{out}.json")
        os.replace(partial, out)
        return 0
    finally:
        partial.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
