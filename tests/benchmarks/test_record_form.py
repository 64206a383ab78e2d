# SPDX-License-Identifier: Apache-2.0
"""Records of benchmarks have a row a line: the committed ones, and those that programs write."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import result_file

ROOT = Path(__file__).resolve().parents[2]
RECORDS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def rows_of(data: dict) -> list[dict]:
    return [row for entry in data.values() if isinstance(entry, list) for row in entry if isinstance(row, dict)]


def faults(text: str) -> list[str]:
    """What keeps a record from being a row a line, in sentences."""
    data, lines = json.loads(text), text.splitlines()
    rows, found = rows_of(data), []
    alone = []
    for line in lines:
        try:
            alone.append(json.loads(line.rstrip(",")))
        except json.JSONDecodeError:
            continue
    if [row for row in alone if isinstance(row, dict)] != rows:
        found.append("A row is not a line of its own.")
    if len(lines) > len(rows) + 2 * len(data) + 2:
        found.append(f"{len(lines)} lines hold {len(rows)} rows and {len(data)} entries.")
    return found


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: file.stem)
def test_committed_records_have_a_row_a_line(file):
    assert not faults(file.read_text())


def test_the_check_finds_other_forms():
    data = {"environment": {"torch": "2"}, "results": [{"a": 1, "b": [1, 2]}, {"a": 2, "b": []}]}
    assert faults(json.dumps(data)) and faults(json.dumps(data, indent=1))


def test_programs_write_that_form_and_lose_nothing(tmp_path):
    draw = random.Random(seed := 66)
    print("seed", seed)

    def value(depth: int = 0):
        kinds = [lambda: draw.random(), lambda: draw.choice(["a\nb", 'q"', "é", ""]), lambda: None, lambda: True]
        if depth < 3:
            kinds += [lambda: [value(depth + 1) for _ in range(draw.randrange(3))]]
            kinds += [lambda: {str(n): value(depth + 1) for n in range(draw.randrange(3))}]
        return draw.choice(kinds)()

    for number in range(50):
        measured = {"results": [{"x": value()} for _ in range(draw.randrange(1, 4))], "missing": {"y": value()}}
        measured |= {"beside": [value(2) for _ in range(2)], "few": [math.pi, 1]}
        out = tmp_path / "folder" / f"record{number}"
        data = result_file.write_results(out, {"repeats": 2}, {"torch": "2"}, **measured)
        text = out.with_suffix(".json").read_text()
        assert json.loads(text) == data and list(json.loads(text)) == ["environment", "settings", *measured]
        lines = {line.strip().rstrip(",") for line in text.splitlines()}
        assert all(json.dumps(row) in lines for row in measured["results"])
