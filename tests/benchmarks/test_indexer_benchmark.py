# SPDX-License-Identifier: Apache-2.0
"""The indexer's benchmark with tiny sizes on the CPU: what it writes, and that wrong lists are not timed."""

from __future__ import annotations

import json

import indexer_bench
import pytest

TINY = "--seqlens 40,96 --heads 3 --head-dim 8 --keys 9 --repeats 2".split()


def test_a_run_counts_visible_pairs(tmp_path, capsys):
    out = tmp_path / "indexer"
    assert indexer_bench.main([*TINY, "--only", "magi", "--out", str(out)]) == 0
    assert "Best keys of an indexer" in capsys.readouterr().out
    rows = json.loads((tmp_path / "indexer.json").read_text())["results"]
    assert [row["seqlen"] for row in rows] == [40, 96]
    for row in rows:
        pairs = row["seqlen"] * (row["seqlen"] + 1) // 2
        assert row["tflops"] == pytest.approx(2 * pairs * 3 * 8 / row["median_us"] / 1e6)
    with pytest.raises(SystemExit):
        indexer_bench.main([*TINY, "--only", "other"])
    assert "other: not installed here" in capsys.readouterr().err


def test_worse_keys_are_told():
    options = indexer_bench.make_parser().parse_args(TINY)
    inputs = indexer_bench.draw(96, options, "cpu")
    lists = indexer_bench.available()["magi"](inputs, 9)()
    indexer_bench.check(lists, inputs, 9)
    lists[:] = indexer_bench.available()["magi"]((inputs[0], inputs[1], -inputs[2]), 9)()
    with pytest.raises(AssertionError, match="better keys were left out"):
        indexer_bench.check(lists, inputs, 9)
