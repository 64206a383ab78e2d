# SPDX-License-Identifier: Apache-2.0
"""The benchmark of native group collectives as far as it needs no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import group_collectives  # noqa: E402


def test_it_says_how_it_is_run(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        group_collectives.main([])
    assert "run it by torchrun on GPUs that share NVLink" in capsys.readouterr().err


def test_rates_and_shares_of_a_copy():
    cell = {"rows": 4096, "received_bytes": 2**24, "us": {"copy": 40.0, "cast": 50.0, "reduce": 80.0}}
    _, head, _, line = group_collectives.table([cell]).split("\n")
    assert head.split()[:5] == ["rows", "MiB", "copy", "cast", "reduce"]
    assert "16.00" in line and "50.0 (336)" in line, "GB/s that a rank receives"
    assert head.split()[5:] == ["cast", "/", "copy", "reduce", "/", "copy"] and line.split()[-2:] == ["0.80", "0.50"]
