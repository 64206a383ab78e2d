# SPDX-License-Identifier: Apache-2.0
"""The benchmark of recurrent layers: two ranks on CPUs, and what it compares with."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import recurrent
import torch

from magi_attention.testing.spawn import run_program

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "functional"))
from recurrences import random_inputs, run  # noqa: E402


def test_the_recurrence_that_it_times() -> None:
    x = random_inputs("gated_delta", 11, seed=3)
    initial = torch.randn(3, 2, 3, 4, dtype=torch.float64)
    want, final = run("gated_delta", x, initial, [0, 4, 4, 11])
    got, states = recurrent.by_tokens(x.v, initial, torch.tensor([0, 4, 4, 11]), x.q, x.k, x.log_decay, x.beta)
    torch.testing.assert_close([got, states], [want * 3**-0.5, final])


def measured(folder: Path, *options: str) -> dict:
    out = folder / "record"
    words = ["--tokens", "48,32", "--longest", "32", "--dims", "4", "4", "--dtype", "fp32", "--rounds", "2",
             "--repeats", "2", *options, "--out", str(out)]  # fmt: skip
    printed, _ = run_program(2, ROOT / "benchmarks" / "context_parallel.py", "recurrent", *words)
    return {**json.loads(out.with_suffix(".json").read_text()), "printed": printed}


def test_all_ways_on_two_ranks(tmp_path) -> None:
    record = measured(tmp_path, "--heads", "4", "--key-heads", "2")
    ways = ["states", "contiguous", "heads", "consecutive"]
    assert [(row["tokens"], row["way"]) for row in record["results"]] == [(n, way) for n in (48, 32) for way in ways]
    for row in record["results"]:
        assert row["ms"].keys() == {"forward", "backward", "both"} and min(row["ms"].values()) > 0
        assert len(row["rounds_ms"]) == 2 and row["way"] in record["printed"]
        if row["way"] == "consecutive":
            assert row["difference"] is None and row["fragments"] == 1
        else:
            assert row["difference"] < 1e-4 and (row["way"] == "states") == (row["difference"] == 0)
    assert record["settings"]["world"] == 2 and record["settings"]["kernel"] == "torch"


def test_heads_that_do_not_divide_have_no_row(tmp_path) -> None:
    rows = measured(tmp_path, "--heads", "3", "--tokens", "32", "--rounds", "1", "--repeats", "1")["results"]
    assert {row["way"] for row in rows} == {"states", "contiguous", "consecutive"}
