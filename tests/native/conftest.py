# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that compile something."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_tree import make_tree

from magi_attention.testing.libraries import planner_or_skip


@pytest.fixture(scope="module")
def planner() -> None:
    """The planner library, built where it can be."""
    planner_or_skip()


@pytest.fixture
def tree(tmp_path) -> Path:
    """The ``csrc`` of a checkout with trivial sources."""
    return make_tree(tmp_path / "tree with space" / "csrc")
