# SPDX-License-Identifier: Apache-2.0
"""The command line of the launcher with a home of its own."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
from launching import Magi, processes_with


@pytest.fixture
def magi(tmp_path):
    """``Magi``; what a failed test left running is ended."""
    made = Magi(tmp_path / "home")
    yield made
    for pid in processes_with(f"MAGI_HOME={made.home}"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
