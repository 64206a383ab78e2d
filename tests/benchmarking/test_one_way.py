# SPDX-License-Identifier: Apache-2.0
"""Timing, pictures and tables have one place each, which all benchmarks and commands use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "magi_attention").rglob("*.py")]
# What is used -> files that may use it: the one place, and what is about another thing.
PLACES = {
    r"Event\(enable_timing=True\)": {
        "timing.py",
        "node_exchange.py",  # kernels inside of a call
        "instruments.py",  # stages of a user's own step
    },
    r"FigureCanvasAgg\(": {"pictures.py"},
    r"rich\.table": {"common.py"},
}


@pytest.mark.parametrize("pattern", PLACES)
def test_it_is_used_in_its_place_alone(pattern):
    found = {file.name for file in SOURCES if re.search(pattern, file.read_text())}
    assert found == PLACES[pattern]
