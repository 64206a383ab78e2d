# SPDX-License-Identifier: Apache-2.0
"""Waiting for states in tests. A busy machine is slow and not broken: a deadline only ends a test that hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_S = 300.0  # for anything that a test waits for; far beyond what a busy machine needs
_POLL_S = 0.02


def wait_until(is_so: Callable[[], object], what: str | Callable[[], str], deadline_s: float = DEADLINE_S) -> None:
    """Returns once ``is_so()`` is true.

    Args:
        is_so: the state, asked for again and again.
        what: the state in words, or a function that gives the words.
        deadline_s: seconds after which the test fails.
    Raises:
        AssertionError: the state did not come before the deadline; with its words.
    """
    deadline = time.monotonic() + deadline_s
    while not is_so():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {deadline_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(_POLL_S)


class Flags:
    """Files in ``folder`` by which the processes of a test tell each other how far they are."""

    def __init__(self, folder: str | Path):
        self._folder = Path(folder)

    def set(self, name: str) -> None:
        (self._folder / name).touch()

    def wait(self, *names: str) -> None:
        """Returns once all of them are set."""
        for name in names:
            wait_until((self._folder / name).exists, f"the flag {name} is set")
