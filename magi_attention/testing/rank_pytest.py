# SPDX-License-Identifier: Apache-2.0
"""`torchrun -m magi_attention.testing.rank_pytest ...`: pytest on every rank, each with a JUnit file of its own.

A rank on which nothing ran has failed: a suite that skips everything must not look as if it had passed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from magi_attention.env import launch as env


class CountPassed:
    """Plugin: how many tests ran and passed."""

    def __init__(self) -> None:
        self.passed = 0

    def pytest_runtest_logreport(self, report) -> None:
        self.passed += report.when == "call" and report.outcome == "passed"


def main(arguments: list[str]) -> int:
    import pytest

    extra = ["-p", "no:cacheprovider", "-p", "no:xdist", "-rs"]
    if folder := env.run_folder():
        name = f"junit-rank{os.environ.get('RANK', '0')}.xml"
        extra.append(f"--junitxml={Path(folder) / name}")
    counter = CountPassed()
    code = int(pytest.main([*extra, *arguments], plugins=[counter]))
    if code == 0 and not counter.passed:
        print("No test ran on this rank; the reasons for skipping are above.")
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
