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


@pytest.mark.parametrize("more", [[], ["--separate"]], ids=str)
def test_blocks_of_keys(more, tmp_path, capsys):
    out = tmp_path / "blocks"
    assert indexer_bench.main([*TINY, "--block-size", "4", *more, "--only", "magi,torch", "--out", str(out)]) == 0
    assert "Best blocks of 4 keys" in capsys.readouterr().out
    rows = json.loads((tmp_path / "blocks.json").read_text())["results"]
    assert [(row["seqlen"], row["name"]) for row in rows] == [(s, n) for s in (40, 96) for n in ("magi", "torch")]
    assert all(row["median_us"] > 0 and not row["reason"] for row in rows)
    if more:
        with pytest.raises(SystemExit):
            indexer_bench.main([*TINY, *more])
        assert "give --block-size" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--block-size", "4"], ["--block-size", "3", "--separate"]], ids=str)
def test_worse_keys_are_told(more):
    options = indexer_bench.make_parser().parse_args([*TINY, *more])
    inputs = q, k, weights = indexer_bench.draw(96, options, "cpu")
    run = indexer_bench.available()["magi"]
    lists = run(inputs, options)()
    indexer_bench.check(lists, inputs, options)
    lists[:] = run((-q, k, None) if weights is None else (q, k, -weights), options)()
    with pytest.raises(AssertionError, match="better keys were left out"):
        indexer_bench.check(lists, inputs, options)
