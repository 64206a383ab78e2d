# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the indexer's loss, tiny, on the CPU: what it writes, and that wrong results are not timed."""

from __future__ import annotations

import json

import indexer_kl_bench
import pytest
import torch

TINY = "--seqlens 40,96 --heads 4 --head-dims 16 8 --index-heads 3 --index-dim 8 --keys 9 --repeats 2".split()


def test_a_run_counts_pairs_and_shares(tmp_path, capsys):
    assert indexer_kl_bench.main([*TINY, "--out", str(tmp_path / "kl")]) == 0
    assert "forward and backward" in capsys.readouterr().out
    rows = json.loads((tmp_path / "kl.json").read_text())["results"]
    backward = 3 * 3 * 8
    columns_of = {"forward": 4 * 16 + 3 * 8, "backward": backward, "backward in order": backward}
    columns_of |= {"inverting": 0, "attention": 4 * (3 * 16 + 2 * 8)}
    assert [(row["seqlen"], row["name"]) for row in rows] == [(n, name) for n in (40, 96) for name in columns_of]
    for row in rows:
        columns = columns_of[row["name"]]
        assert row["tflops"] == pytest.approx(2 * row["seqlen"] * 9 * columns / row["median_us"] / 1e6)
        assert row["share"] > 0 and (row["name"] != "attention" or row["share"] == 1)


@pytest.mark.parametrize("place", [0, 1, 3])
def test_wrong_results_are_told(place):
    options = indexer_kl_bench.make_parser().parse_args(TINY)
    of = indexer_kl_bench.draw(40, options, "cpu")
    found = [x.clone() for x in of.truth()]
    indexer_kl_bench.check(of, found[0], found[1:])
    found[place] += torch.rand_like(found[place]) * found[place].abs().max()
    with pytest.raises(AssertionError, match="is off by"):
        indexer_kl_bench.check(of, found[0], found[1:])
