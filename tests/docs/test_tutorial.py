# SPDX-License-Identifier: Apache-2.0
"""The tutorial, word for word: its programs, its commands, and what it says that they print."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest
from pages import ROOT, blocks

PAGE = ROOT / "docs" / "tutorial.md"


@pytest.mark.slow
def test_the_tutorial(tmp_path):
    text = PAGE.read_text(encoding="utf-8")
    found = blocks(PAGE)
    for name, block in zip(("my_mask.py", "my_attention.py"), (b for b in found if b.language == "python")):
        assert f"`{name}`" in text
        (tmp_path / name).write_text(block.text)
    tools = {
        "./magi": [sys.executable, "-m", "magi_attention.cli"],
        "python": [sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
    }
    printed = ""
    for line in (line for block in found if not block.language for line in block.text.splitlines()):
        program, *rest = shlex.split(line)
        if program == "source":
            continue  # the tests have an environment
        done = subprocess.run(
            [*tools[program], *rest], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
            text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        printed += done.stdout
    assert (tmp_path / "runs" / "explain" / "report.html").is_file()
    for words in ("6 slices, 309,616 of 1,048,576 pairs", "area (allowed pairs)", "imbalance, max/mean"):
        assert words in text and words in printed
    for words in ("the same for a contiguous split", "rows out", "rows in", "of all-gather"):
        assert f"`{words}`" in text and words in printed
    assert "of 1024 tokens, largest difference 1e-15" in printed
