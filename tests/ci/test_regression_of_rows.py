# SPDX-License-Identifier: Apache-2.0
"""ci/gpu_regression on results of what moves rows: group collectives and range operations."""

from __future__ import annotations

from pathlib import Path

import compare_results as cr
import gpu_regression as gr
import pytest
import result_files as rf
from test_gpu_regression import ENVIRONMENT, results, run

ROOT = Path(__file__).resolve().parents[2]


def test_committed_results_of_rows_are_baselines_of_themselves():
    import group_collectives
    import range_ops

    paths = [path for path in gr.BASELINES.glob("*.json") if path.stem.startswith(("group_", "range_"))]
    found = [rf.load(path) for path in paths]
    assert {baseline.benchmark for baseline in found} == {"group_collectives", "range_ops"}
    for baseline in found:
        verdicts, notes = cr.compare(baseline, baseline)
        assert verdicts and not notes and {(v.status, v.measure) for v in verdicts} == {("ok", "ratio")}
        ((direction, settings),) = gr._parts(baseline, None)
        line = gr.command(baseline.benchmark, direction, settings, Path("x"))
        if baseline.benchmark == "range_ops":
            assert line[2] == "rows"
            options = vars(range_ops.make_parser().parse_args(line[3:]))
        else:
            ranks = str(baseline.world)
            assert line[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
            options = vars(group_collectives.make_parser().parse_args(line[9:])) | {"world": baseline.world}
        assert {k: v for k, v in options.items() if k != "out"} == settings


def rows_of_ranks(factor: float = 1.0) -> dict:
    """A file as benchmarks/group_collectives.py writes it."""
    cells = [
        {
            "rows": rows, "received_bytes": 4096 * rows,
            "us": {
                "copy": 5.0, "cast": 10.0, "reduce": 20.0 / factor, "cast by all-to-all": 30.0,
                "reduce by all-to-all": 40.0,
            },
        }
        for rows in (8, 4096)
    ]  # fmt: skip
    settings = {
        "rows": [8, 4096], "heads": 8, "head_dim": 128, "num_sms": 24, "repeats": 20, "beside": None, "world": 2,
    }  # fmt: skip
    return {"environment": dict(ENVIRONMENT), "settings": settings, "results": cells, "beside": []}


def test_group_collectives():
    before = run(rows_of_ranks())
    verdicts, _ = cr.compare(before, run(rows_of_ranks(0.8)))
    assert [v.status for v in verdicts] == ["ok", "ok", "slow", "slow"]
    assert "reduce rows 4K on 2 ranks: slow, 20.0% slower by ratio" in {v.line() for v in verdicts}
    tries, asked = [rows_of_ranks(0.8), rows_of_ranks()], []

    def measure(benchmark: str, direction: str, settings: dict, name: str) -> rf.Run:
        asked.append((direction, settings["rows"]))
        return run(tries.pop(0))

    assert {v.status for v in gr.check("base", before, measure)[0]} == {"ok"} and asked == [("all", [8, 4096])] * 2
    newer = rows_of_ranks(0.8)
    newer["environment"]["torch"] = "2.15.0"
    assert {v.measure for v in cr.compare(before, run(newer))[0]} == {"bandwidth"}
    with pytest.raises(rf.Incomparable, match="several benchmarks"):
        cr.merge([before, run(results())])
