# SPDX-License-Identifier: Apache-2.0
"""Importing the package is cheap and touches nothing: no GPU, no compiler, no folder, no heavy package."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

from magi_attention.testing.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
PROBE = """
import json, sys
import torch, numpy.typing
before = set(sys.modules)
import magi_attention
import magi_attention.api
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps({"new": sorted(new - sys.stdlib_module_names), "cuda": torch.cuda.is_initialized()}))
"""


def probe(home: Path) -> dict:
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT), "PATH": ""}
    command = [sys.executable, "-W", "error::UserWarning", "-c", PROBE]
    done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_is_cheap_and_leaves_no_trace(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(stat.S_IRUSR | stat.S_IXUSR)
    # The time of an import is that of what it imports, so that nothing besides torch makes it slow. NumPy comes with
    # torch; its ``numpy.typing``, which torch leaves out, takes less than a millisecond.
    assert probe(home) == {"new": ["magi_attention"], "cuda": False}
    assert list(home.iterdir()) == []
