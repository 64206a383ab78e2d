# SPDX-License-Identifier: Apache-2.0
"""`magi profile` on two ranks over gloo, and the recorder in this process."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from magi_attention.api import DistAttnConfig, Mask, OverlapConfig, make_plan
from magi_attention.cli import main
from magi_attention.config.rates import MachineRates, keep_rates
from magi_attention.meta.predict.cost import CostModel, timeline
from magi_attention.tools.profiling import record
from magi_attention.tools.profiling.page import predictions
from magi_attention.tools.profiling.trace import profiles_of, read_trace

LAYERS, STEPS = 2, 2
SCRIPT = f"""
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
import torch, torch.distributed as dist
from magi_attention.api import Mask, attend, make_plan, sum_gradients

dist.init_process_group("gloo")
plan = make_plan(Mask.varlen([0, 300, 512], causal=True), 2, num_heads_q=2, num_heads_kv=1, head_dim=16)
layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range({LAYERS}))
optimizers = [torch.optim.SGD(layers.parameters(), 0.1), torch.optim.SGD(layers.parameters(), 0.1)]
for step in range(int(sys.argv[1])):
    x = torch.randn(plan.shard(torch.zeros(512)).shape[0], 2, 16)
    for layer in layers:
        x = x + attend(layer(x), x[:, :1], x[:, :1], plan)[0]
    x.square().mean().backward()
    sum_gradients(layers)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
sys.exit(0)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setenv("MAGI_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MAGI_ATTENTION_RATES_FILE", str(tmp_path / "rates.json"))
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.nightly
def test_two_ranks(script, tmp_path, capfd):
    out = tmp_path / "out"
    options = ["--out", str(out), "--skip", "1", "--steps", str(STEPS), "--ranks-per-node", "2", "--no-preflight"]
    assert main(["profile", *options, script, "--", "4"]) == 0, "\n".join(capfd.readouterr())
    printed = capfd.readouterr().out
    assert "host" in printed and "report.html" in printed and not list(out.glob("*.part"))
    result = json.loads((out / "summary.json").read_text())
    assert [r["rank"] for r in result["ranks"]] == [0, 1] and result["missing_ranks"] == []
    for rank, row in enumerate(result["ranks"]):
        assert row["steps"] == STEPS and row["device"] == "CPU"
        assert {d: a["calls"] for d, a in row["attention"].items()} == {"forward": LAYERS, "backward": LAYERS}
        assert 0 < row["compute_ms"] and 0 <= row["exposed_ms"] <= row["communication_ms"]
        busy = row["compute_ms"] + row["exposed_ms"] + row["gaps_ms"]
        assert busy == pytest.approx(row["step_ms"])
        trace = read_trace(out / f"rank{rank}.trace.json")
        (profile,) = profiles_of(trace)
        assert profile.predicted[0]["calls"] == LAYERS * STEPS
        # forward and backward of each call, local keys and one stage, computed and fetched
        kinds = sorted((s["lane"], s["stage"]) for s in profile.stages)
        assert kinds == sorted([("compute", -1), ("compute", 0), ("comm", 0)] * (2 * LAYERS * STEPS))
        check_stages_lie_in_their_calls(trace["traceEvents"], profile.stages)
    shares = [row["measured_share"] for row in result["attention_forward"]]
    assert sum(shares) == pytest.approx(1) and not any(r["is_comparable"] for r in result["attention_forward"])
    page = (out / "report.html").read_text()
    assert page.count("data:image/png") == 2 == len(list(out.glob("*.png")))
    assert "Times are not comparable" in page and "http" not in page.replace("http-equiv", "")
    assert main(["profile", "--out", str(out), script]) == 2 and "already holds traces" in capfd.readouterr().err


def check_stages_lie_in_their_calls(events: list[dict], stages: list[dict]) -> None:
    """The clock of `attend(trace=)` is laid over that of the profiler to within a fraction of a millisecond."""
    calls = [e for e in events if e.get("ph") == "X" and e["name"].startswith("magi::attention_")]
    slack = 500.0
    for stage in stages:
        start, end = stage["start"] / 1e3, stage["end"] / 1e3
        assert any(c["ts"] - slack <= start and end <= c["ts"] + c["dur"] + slack for c in calls)


LOCAL = """
import sys, torch
layer = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
for _ in range(int(sys.argv[1])):
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def local(tmp_path, monkeypatch):
    path = tmp_path / "local.py"
    path.write_text(LOCAL)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return str(path)


@pytest.mark.parametrize(("options", "steps"), [(["--steps", "3", "--skip", "2"], 3), (["--whole"], 1)])
def test_steps_are_those_asked_for(local, tmp_path, options, steps):
    record.main(["--out", str(tmp_path / "out"), *options, local, "6"])
    (profile,) = profiles_of(read_trace(tmp_path / "out" / "rank0.trace.json"))
    assert profile.steps == steps and profile.world == 1 and not profile.stages
    (count,) = (count for name, _, count in profile.names if name == "aten::linear")
    assert count == (6 if "--whole" in options else 3)


def test_too_few_steps_and_wrong_options(local, tmp_path):
    with pytest.raises(SystemExit, match="the script took 1 optimizer steps and 4 were asked for"):
        record.main(["--out", str(tmp_path / "out"), local, "1"])
    with pytest.raises(SystemExit, match="--skip and --steps must be 1 or more"):
        record.main(["--out", str(tmp_path / "out"), "--skip", "0", local])


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_cpu_that_was_measured_is_compared(ranks, script, tmp_path, monkeypatch):
    measured = replace(MachineRates(), device="CPU", ranks=ranks, link_latency_s=0.25, is_measured=True)
    keep_rates(tmp_path / "rates.json", measured)
    plan = make_plan(Mask.causal(64), 2, num_heads_q=2, num_heads_kv=1, head_dim=8)
    recorder = record.Recorder(record.arguments(["--out", str(tmp_path / "out"), script]))
    recorder.calls.append((plan, 1, 4, []))
    monkeypatch.setattr(recorder, "_stage_events", lambda events: [])

    class Exported:
        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_text('{"traceEvents": []}')

    recorder.write(Exported())
    (predicted,) = read_trace(recorder.path)["magi"]["predicted"]
    assert predicted["is_measured"] and predicted["communication_s"] > 0.25
    assert predicted["rates"] == measured.words and f"measured by `magi tune` over {ranks} ranks" in measured.words
    summary = {"attention": {"forward": {"calls": 1, "compute_ms": 1, "communication_ms": 1, "exposed_ms": 1}}}
    profile = SimpleNamespace(rank=1, steps=1, is_gpu=False, predicted=[predicted])
    (row,) = predictions([profile], [summary])
    assert row["is_comparable"] and row["predicted_communication_ms"] > 250


@pytest.mark.parametrize("seed", range(5))
def test_predictions_against_a_walk_over_time(seed):
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    lengths = np.diff(np.sort(rng.choice(np.arange(1, 4096), 6, replace=False))).tolist()
    cu_seqlens = np.cumsum([0, *lengths]).tolist()
    degree, world = int(rng.integers(0, 3)), int(rng.integers(2, 5))
    config = DistAttnConfig(overlap_config=OverlapConfig(degree=degree))
    mask = Mask.varlen(cu_seqlens, causal=True)
    plan = make_plan(mask, world, config, num_heads_q=8, num_heads_kv=2, head_dim=64)
    bars = timeline(plan, CostModel.for_plan(plan, MachineRates()))
    shares = 0.0
    for rank in range(world):
        found, own = record.predicted(plan, rank, 2, MachineRates()), [b for b in bars if b["rank"] == rank]
        times = np.linspace(0, max(b["end"] for b in own), 20_001)
        middle, width = (times[:-1] + times[1:]) / 2, times[1]
        lanes = {}
        for lane in ("compute", "comm"):
            inside = [(b["start"] <= middle) & (middle < b["end"]) for b in own if b["lane"] == lane]
            lanes[lane] = np.any(inside, axis=0) if inside else np.zeros(len(middle), bool)
        near = {"abs": 20 * width + 1e-12}
        assert found["compute_s"] == pytest.approx(lanes["compute"].sum() * width, **near)
        assert found["communication_s"] == pytest.approx(lanes["comm"].sum() * width, **near)
        assert found["exposed_s"] == pytest.approx((lanes["comm"] & ~lanes["compute"]).sum() * width, **near)
        shares += found["share"]
    assert shares == pytest.approx(1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["profile", "--steps", "0"], "--steps is 0"),
        (["profile", "--json"], "--json goes with --read"),
        (["profile", "--ranks", "0"], "--ranks is 0"),
        (["profile", "/no/such/script.py"], "is not there"),
        (["profile", "--degree", "2", "x.py"], "--degree: for the built-in example alone"),
        (["profile", "--read", ".", "x.py"], "--read makes a page of traces"),
        (["profile", "--", "4"], "belong to a script"),
    ],
)
def test_wrong_requests_are_one_sentence(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert words in error and "\n" not in error, error
