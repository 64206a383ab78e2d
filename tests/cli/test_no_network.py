# SPDX-License-Identifier: Apache-2.0
"""Ranks of one machine meet where no name resolves and nothing but loopback is there."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from magi_attention.cli import common
from magi_attention.testing.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
ALONE = ("unshare", "--net", "--uts", "sh", "-c")
BEGIN = "ip link set lo up && hostname nowhere.example"


def test_torchrun_of_one_machine():
    if (
        not all(map(shutil.which, ("unshare", "ip", "hostname")))
        or subprocess.run([*ALONE, BEGIN], capture_output=True).returncode
    ):
        pytest.skip("a network of its own needs root, unshare and ip")
    script = str(ROOT / "tests" / "launch" / "rank_script.py")
    line = f"{BEGIN} && exec {shlex.join([sys.executable, *common.torchrun(2), script, 'hello'])}"
    done = subprocess.run(
        [*ALONE, line], capture_output=True, text=True, timeout=DEADLINE_S, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert sorted(w for w in done.stdout.splitlines() if w) == [f"rank {rank} of 2 says hello [] " for rank in range(2)]


def test_every_start_of_ranks_on_this_machine_does_so():
    folders = (Path(common.__file__).parents[1], ROOT / "benchmarks", ROOT / "ci")
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    starts = [path for path, text in texts.items() if '"--standalone"' in text]
    assert starts and [path for path in starts if '"--local-addr"' not in texts[path]] == []
