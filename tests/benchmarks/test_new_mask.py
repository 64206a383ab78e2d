# SPDX-License-Identifier: Apache-2.0
"""The benchmark of what a new mask costs the host."""

from __future__ import annotations

import json
from pathlib import Path

import new_mask
import pytest

from magi_attention.testing.libraries import planner_or_skip

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def planner():
    planner_or_skip()


def test_the_parts_of_each_mask(tmp_path, capsys):
    out = tmp_path / "folder" / "record.json"
    assert new_mask.main(["--tokens", "1024", "--ranks", "1,2", "--repeats", "2", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["environment"]["torch"] and [row["ranks"] for row in record["rows"]] == [1] * 4 + [2] * 4
    for row in record["rows"]:
        parts = {*new_mask.PARTS, *new_mask.BESIDE} if row["ranks"] == 2 else {"forward", "backward"}
        assert set(row["ms"]) == parts and min(row["ms"].values()) > 0
        assert abs(row["sum_ms"] - sum(row["ms"].get(part, 0) for part in new_mask.PARTS)) < 0.011
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 9 and all(str(row["sum_ms"]) in text for row, text in zip(record["rows"], printed[1:]))
