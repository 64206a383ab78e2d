# SPDX-License-Identifier: Apache-2.0
"""The tile planner is compiled once for all its tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import tile_lib  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def compiled_planner(compile_folder) -> None:
    tile_lib.compile_in(compile_folder / "tile_plan")
