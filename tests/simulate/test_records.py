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
import simulated_tables as tables_module  # noqa: E402

from magi_attention.common.mask import Mask  # noqa: E402
from magi_attention.tools.simulate import WAYS, Case, Cluster, estimate  # noqa: E402
from magi_attention.tools.simulate.support import LARGEST_ERRORS, LIMIT, is_supported  # noqa: E402

PAGE = ROOT / "docs" / "guides" / "simulate-records.md"


@pytest.fixture(scope="module")
def cells() -> list[list[simulated.CellError]]:
    """The cells of both tables."""
    return [
        [cell for record in records for cell in simulated.errors_of(record, is_new)]
        for records, is_new in ((simulated.RECORDS, False), (simulated.NEW_RECORDS, True))
    ]


def test_most_times_are_within_a_tenth(cells):
    """Cells whose kernels the rate table knows; the page names the others, and says why."""
    for found, most in zip(cells, (0.8, 0.75)):
        errors = sorted(abs(cell.error) for cell in found)
        assert len(errors) > 100 and errors[len(errors) // 2] < 0.06
        assert sum(error <= 0.1 for error in errors) > most * len(errors)


def test_one_launch_over_nodes_is_as_far_off_as_that_over_nvlink(cells):
    """To twelve points, in each cell: so what the model adds for nodes is about what they cost."""
    by_cell = {(c.record, c.mask, c.direction, c.way): c.error for c in cells[1]}
    found = [(key, error) for key, error in by_cell.items() if key[3].endswith(", one launch")]
    assert len(found) == 36
    for key, error in found:
        assert abs(error - by_cell[(*key[:3], "one launch")]) <= 0.12, key


def test_a_stage_is_waited_for_where_that_was_faster():
    choices = [choice for record in simulated.RECORDS for choice in simulated.choices_of(record)]
    assert len(choices) > 15
    for choice in choices:
        assert choice.waits == {choice.waited < choice.merged}, choice


def test_the_page_has_the_errors_of_today(cells):
    """To three points in a hundred. If not, run ``python benchmarks/simulated.py --write``."""
    page = PAGE.read_text(encoding="utf-8")
    tables = tables_module.tables_of(page)
    assert len(tables) == len(cells) == 2
    for table, found in zip(tables, cells):
        told, now = (tables_module.numbers(text) for text in (table, simulated.table(found)))
        assert told.keys() == now.keys()
        far = {key: (told[key], now[key]) for key in now if abs(told[key] - now[key]) > 3}
        assert not far, far


KINDS = {"varlen_block_causal": "varlen_full"}  # of masks that the model takes for those of another name


def test_the_model_knows_how_far_it_is_off(cells):
    """To three points, as the page does; no cell of a time that is called supported is further off."""
    most: dict[tuple[str, str, int], list[float]] = {}
    for cell in (cell for found in cells for cell in found):
        gpus = int(cell.record.removesuffix(".json")[-1])
        is_one_stage = cell.way in ("one stage, merged", "fetch, then attend")
        for way in {cell.way, "one stage"} if is_one_stage else {cell.way}:
            if way in WAYS:
                pair = most.setdefault((way, KINDS.get(cell.mask, cell.mask), gpus), [0.0, 0.0])
                pair[cell.direction == "backward"] = max(pair[cell.direction == "backward"], abs(cell.error))
    assert most.keys() == LARGEST_ERRORS.keys()
    for key, pair in most.items():
        for now, told in zip(pair, LARGEST_ERRORS[key]):
            assert abs(now - told) <= 0.03 and not (told <= LIMIT < now - 0.03), key


def test_what_is_supported_and_what_is_an_estimate():
    def errors(way: str, mask: Mask, ranks: int, **cluster) -> tuple[bool, bool]:
        one = estimate(way, Case(mask, ranks, Cluster(**cluster)))
        assert one.reason is None
        return is_supported(one.forward_error), is_supported(one.backward_error)

    documents = Mask.varlen([0, 3000, 8192, 12_000, 16_384], causal=False)
    assert errors("one launch", Mask.full(16_384), 2) == (True, True)
    assert errors("ring", documents, 2) == (True, False)  # off by 56% in a record
    assert errors("two stages", Mask.full(32_768), 4) == (False, False)  # never measured on four
    assert errors("one launch", Mask.full(8 * 8192), 8) == (False, False)
    assert errors("one launch", Mask.full(16_384), 2, node=1) == (False, False)  # over a network
    assert errors("one launch", Mask.full(16_384), 2, heads_q=32) == (False, False)
    for tokens in (8192, 1 << 16):
        assert errors("one launch", Mask.full(tokens), 2) == (False, False)


NODE_NAMES = ("magi_nodes", "magi_nodes_2", "magi_nodes_2_a2av", "magi_nodes_fused", "magi_nodes_2_fused")


def test_cells_over_logical_nodes(tmp_path, capsys):
    """A record that has the same time under the names of node variants: each gets a prediction of its own, and one with
    nodes of two crosses the network with fewer rows than one in which each GPU is a node."""
    record = json.loads((simulated.RESULTS / "context_parallel_h200x4.json").read_text())
    flat = [cell for cell in record["cells"] if cell["name"] == "magi_fused" and cell["mask"] == "varlen_causal"]
    copies = [cell | {"name": name} for cell in flat for name in NODE_NAMES]
    path = tmp_path / "nodes_h200x4.json"
    path.write_text(json.dumps(record | {"cells": flat + copies}))
    found = list(simulated.errors_of(str(path)))
    ways = {cell.way for cell in found}
    assert ways == {"one launch", "each GPU a node, NVSHMEM", "nodes of 2, NVSHMEM", "nodes of 2, all-to-all-v",
                    "each GPU a node, one launch", "nodes of 2, one launch"}  # fmt: skip
    assert len(found) == 2 * len(flat + copies)
    assert all(0.3 * cell.measured < cell.modelled < 3 * cell.measured for cell in found)
    assert simulated.main(["--records", str(path)]) == 0
    told = capsys.readouterr().out
    assert told.count("NVSHMEM, forward: measured") == 2 * len(flat) and "nodes of 2, all-to-all-v |" in told
    with pytest.raises(SystemExit):
        simulated.main(["--records", str(path), "--write"])
