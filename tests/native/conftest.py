# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that compile something."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_tree import make_tree

from magi_attention.errors import BuildError
from magi_attention.native import build, loader


@pytest.fixture(scope="module")
def planner() -> None:
    """The planner library, built where it can be."""
    try:
        build.build_all("planner")
    except BuildError as error:
        pytest.skip(f"The planner library cannot be built here: {error}")
    loader._load.cache_clear()


@pytest.fixture
def tree(tmp_path) -> Path:
    """The ``csrc`` of a checkout with trivial sources."""
    return make_tree(tmp_path / "tree with space" / "csrc")
