# SPDX-License-Identifier: Apache-2.0
"""The benchmark of exchanges over nodes, as far as it goes without GPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import node_exchange  # noqa: E402


def test_it_says_how_to_run_it(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        node_exchange.main([])
    assert "torchrun" in capsys.readouterr().err


def test_rates_are_of_the_bytes_received():
    """50 MB in 200 us are 250 GB/s."""
    told = node_exchange.line("blocks", [200.0, 400.0], [50_000_000, 60_000_000], [{"put": 120.0}, {}])
    assert "cast  200.0 us (250 GB/s, put 120)" in told and told.endswith("reduce  400.0 us (150 GB/s)")
