# SPDX-License-Identifier: Apache-2.0
"""The model beside the records of two and four GPUs, and the page that says how far it is off."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import simulated  # noqa: E402

PAGE = ROOT / "docs" / "guides" / "simulate.md"


@pytest.fixture(scope="module")
def cells() -> list[simulated.CellError]:
    return [cell for record in simulated.RECORDS for cell in simulated.errors_of(record)]


def test_most_times_are_within_a_tenth(cells):
    """Cells whose kernels the rate table knows; the page names the others, and says why."""
    errors = sorted(abs(cell.error) for cell in cells)
    assert len(errors) > 100 and errors[len(errors) // 2] < 0.06
    assert sum(error <= 0.1 for error in errors) > 0.8 * len(errors)


def test_a_stage_is_waited_for_where_that_was_faster():
    choices = [choice for record in simulated.RECORDS for choice in simulated.choices_of(record)]
    assert len(choices) > 15
    for choice in choices:
        assert choice.waits == {choice.waited < choice.merged}, choice


def test_the_page_has_the_errors_of_today(cells):
    """To three points in a hundred. If not, run ``python benchmarks/simulated.py --write``."""
    page = PAGE.read_text(encoding="utf-8")
    told, now = (simulated.numbers(table) for table in (simulated.table_of(page), simulated.table(cells)))
    assert told.keys() == now.keys()
    far = {key: (told[key], now[key]) for key in now if abs(told[key] - now[key]) > 3}
    assert not far, far


def test_cells_over_logical_nodes(tmp_path, capsys):
    """A record that has the same time under the names of node variants: each gets a prediction of its own, and one with
    nodes of two crosses the network with fewer rows than one in which each GPU is a node."""
    record = json.loads((simulated.RESULTS / "context_parallel_h200x4.json").read_text())
    flat = [cell for cell in record["cells"] if cell["name"] == "magi_fused" and cell["mask"] == "varlen_causal"]
    copies = [cell | {"name": name} for cell in flat for name in ("magi_nodes", "magi_nodes_2", "magi_nodes_2_a2av")]
    path = tmp_path / "nodes_h200x4.json"
    path.write_text(json.dumps(record | {"cells": flat + copies}))
    found = list(simulated.errors_of(str(path)))
    ways = {cell.way for cell in found}
    assert ways == {"one launch", "each GPU a node, NVSHMEM", "nodes of 2, NVSHMEM", "nodes of 2, all-to-all-v"}
    assert len(found) == 2 * len(flat + copies)
    assert all(0.3 * cell.measured < cell.modelled < 3 * cell.measured for cell in found)
    assert simulated.main(["--records", str(path)]) == 0
    told = capsys.readouterr().out
    assert told.count("NVSHMEM, forward: measured") == 2 * len(flat) and "nodes of 2, all-to-all-v |" in told
    with pytest.raises(SystemExit):
        simulated.main(["--records", str(path), "--write"])
