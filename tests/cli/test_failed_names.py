# SPDX-License-Identifier: Apache-2.0
"""A test that fails is named while others still run, with one process and with several."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from magi_attention.testing.waiting import DEADLINE_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
FAILS = "def test_bad():\n    assert 1 == 2, 'one is not two'\n"
BROKEN = "import pytest\n@pytest.fixture\ndef x():\n    raise ValueError('no fixture')\ndef test_x(x):\n    pass\n"
WAITS = """
import os, time
def test_waits_until_it_is_let_go():
    while not os.path.exists("go"):
        time.sleep(0.05)
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_at_once(tmp_path, workers):
    if workers and importlib.util.find_spec("xdist") is None:
        pytest.skip("needs pytest-xdist")
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    for name, text in (("a_bad", FAILS), ("b_broken", BROKEN), ("c_waits", WAITS)):
        (tmp_path / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--dist", "worksteal", *workers]
    command = [word for word in command if workers or word not in ("--dist", "worksteal")]
    log = tmp_path / "log"
    with log.open("w") as out:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out, env=environment)
    try:
        # The third test ends only when it is let go, so these words stand there before the session is over.
        wanted = ("FAILED test_a_bad.py::test_bad: ", "one is not two", "FAILED test_b_broken.py::test_x (setup): ")
        wait_until(lambda: all(words in log.read_text() for words in wanted), "the names of the tests that failed")
        assert process.poll() is None
    finally:
        (tmp_path / "go").touch()
        process.wait(DEADLINE_S)
    assert process.returncode == 1 and "1 failed, 1 passed, 1 error" in log.read_text()
