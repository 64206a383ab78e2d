# SPDX-License-Identifier: Apache-2.0
"""Runs the Python blocks of a page of docs/frameworks; started as ``train_tiny.py``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from train_tiny import leave

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "docs"))
from pages import blocks, setup  # noqa: E402


def main(out: str, settings: dict) -> None:
    os.chdir(ROOT)
    page = ROOT / settings["page"]
    space: dict = {"__name__": "page"}
    sys.argv[1:] = []  # a program on the page reads its own
    exec(compile(setup(page), f"{page}, before the code", "exec"), space)
    ran = 0
    for block in blocks(page):
        if block.language == "python":
            exec(compile("\n" * block.line + block.text, str(page), "exec"), space)
            ran += 1
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps({"processes": int(os.environ["WORLD_SIZE"]), "blocks": ran}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
    leave()
