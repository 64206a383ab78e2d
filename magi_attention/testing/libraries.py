# SPDX-License-Identifier: Apache-2.0
"""Native libraries for tests: built where that can be done, else the test is skipped."""

from __future__ import annotations

from magi_attention.errors import BuildError
from magi_attention.native import build, loader


def planner_or_skip() -> None:
    """Builds the planner library where it is missing or out of date; skips the test where there is no compiler."""
    _build_or_skip("planner", "planner library")
    loader._load.cache_clear()


def host_or_skip() -> None:
    """The same for the Python module of prepared launches."""
    _build_or_skip("host", "host module")
    loader._load_host.cache_clear()


def _build_or_skip(name: str, what: str) -> None:
    import pytest

    try:
        build.build_all(name)
    except BuildError as error:
        pytest.skip(f"The {what} cannot be built here: {error}")
