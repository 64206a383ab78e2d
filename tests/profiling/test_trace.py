# SPDX-License-Identifier: Apache-2.0
"""Lanes of a trace: by hand on one of a GPU, and against a walk over every microsecond on random ones."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from gpu_trace import trace

from magi_attention.cli import main
from magi_attention.errors import ContractError
from magi_attention.tools.profiling.trace import profiles_of, read_trace, summary_of

NAMES = {
    "compute": ("gemm", "void ffa_fwd<A>(P)", "free_rows"),
    "communication": ("ncclDevKernel_AllGather", "ns::symm_recv_reduce(P)", "nvshmemi_put", "one_shot_all_reduce"),
}


def pieces(intervals) -> list[tuple[float, float]]:
    return [(a / 1e3, b / 1e3) for a, b in intervals.tolist()]


def test_a_gpu_by_hand():
    (profile,) = profiles_of(trace())
    assert (profile.rank, profile.world, profile.steps, profile.is_gpu) == (1, 2, 2, True)
    assert profile.device == "NVIDIA H100 80GB HBM3 (0)"
    assert profile.window == (100_000, 640_000)  # until the kernel that the last step launched is done
    assert pieces(profile.compute) == [(120, 200), (205, 300), (340, 500), (520, 530)]
    assert pieces(profile.communication) == [(180, 260), (315, 350), (560, 640)]
    assert pieces(profile.copies) == [(310, 320), (500, 504)]
    assert pieces(profile.exposed) == [(200, 205), (315, 340), (560, 640)]
    assert pieces(profile.gaps) == [(100, 120), (300, 310), (504, 520), (530, 560)]
    calls, compute, moved = profile.attention["forward"]
    assert (calls, pieces(compute), pieces(moved)) == (1, [(205, 300)], [(180, 260)])
    calls, compute, moved = profile.attention["backward"]
    assert (calls, pieces(compute), pieces(moved)) == (1, [(340, 500)], [(330, 350)])
    summary = summary_of(profile)
    assert summary["step_ms"] == pytest.approx(0.27) and summary["exposed_ms"] == pytest.approx(0.055)
    # The kernel that ran at 180 to 200 computed for the model, so of the fetch only 200 to 205 was exposed.
    assert summary["attention"]["forward"]["exposed_ms"] == pytest.approx(0.0025)
    assert summary["top"][0] == {"name": "void magi_ffa_sm90::ffa_bwd<Config>(BwdKernelParams)", "ms": 0.08, "count": 1}


def random_trace(rng: np.random.Generator, gpus: int) -> dict:
    end = int(rng.integers(50, 400))
    events = [{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 0, "dur": end}]
    for correlation in range(int(rng.integers(0, 60))):
        kind = rng.choice(list(NAMES))
        cat = "kernel"
        name = rng.choice(NAMES[kind])
        if rng.random() < 0.2:
            cat, name = "gpu_memcpy", rng.choice(["Memcpy PtoP (Device -> Device)", "Memcpy DtoD (Device -> Device)"])
        launched, start = int(rng.integers(0, end + 40)), int(rng.integers(0, end + 40))
        args = {"correlation": correlation, "device": int(rng.integers(0, gpus)), "stream": 7}
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "l", "pid": 1, "tid": 1, "ts": launched, "dur": 1}
        events.append({**launch, "args": {"correlation": correlation}})
        times = {"ts": start, "dur": int(rng.integers(0, 50))}
        events.append({"ph": "X", "cat": cat, "name": str(name), "pid": 0, "tid": 7, **times, "args": args})
    return {"traceEvents": [events[i] for i in rng.permutation(len(events))]}


def walk(events: list[dict], gpu: int) -> dict[str, int]:
    """The same numbers, microsecond by microsecond."""
    step = next(e for e in events if e["name"].startswith("Profiler"))
    launched = {e["args"]["correlation"]: e["ts"] for e in events if e["cat"] == "cuda_runtime"}
    work = [e for e in events if e["cat"] in ("kernel", "gpu_memcpy") and e["args"]["device"] == gpu]
    work = [e for e in work if launched[e["args"]["correlation"]] < step["dur"]]
    end = max([step["dur"], *(e["ts"] + e["dur"] for e in work)])
    found = dict.fromkeys(("compute", "communication", "exposed", "gaps"), 0)
    for time in range(end):
        now = [e for e in work if e["ts"] <= time < e["ts"] + e["dur"]]
        moves = [e for e in now if e["name"] in (*NAMES["communication"], "Memcpy PtoP (Device -> Device)")]
        computes = [e for e in now if e["name"] in NAMES["compute"]]
        found["compute"] += bool(computes)
        found["communication"] += bool(moves)
        found["exposed"] += bool(moves and not computes)
        found["gaps"] += not now
    return found


@pytest.mark.parametrize("seed", range(30))
def test_random_kernels_against_a_walk(seed):
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    data = random_trace(rng, gpus=1 + seed % 2)
    events = data["traceEvents"]
    gpus = sorted({e["args"]["device"] for e in events if e["cat"] in ("kernel", "gpu_memcpy")})
    profiles = profiles_of(data)
    assert len(profiles) == max(len(gpus), 1)
    for gpu, profile in zip(gpus, profiles):
        lengths = {name: int((x[:, 1] - x[:, 0]).sum()) for name, x in lanes(profile).items()}
        assert lengths == {name: 1000 * value for name, value in walk(events, gpu).items()}


def lanes(profile) -> dict[str, np.ndarray]:
    return {name: getattr(profile, name) for name in ("compute", "communication", "exposed", "gaps")}


def test_operators_have_the_time_that_is_left_to_them():
    def op(name, ts, dur, tid=1, cat="cpu_op"):
        return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur}

    events = [
        op("ProfilerStep#2", 0, 100, cat="user_annotation"),
        op("aten::linear", 10, 40), op("aten::t", 12, 5), op("aten::addmm", 20, 25), op("aten::linear", 55, 5, tid=2),
        op("c10d::alltoall_base_", 60, 30), op("autograd::engine::evaluate_function: X", 0, 99), op("_DistAttn", 0, 99),
        op("gloo:all_to_all", 45, 30, tid=3, cat="user_annotation"), op("magi::anchor", 1, 1, cat="user_annotation"),
    ]  # fmt: skip
    (profile,) = profiles_of({"traceEvents": events})
    assert pieces(profile.compute) == [(10, 50), (55, 60)] and pieces(profile.communication) == [(45, 75)]
    assert pieces(profile.exposed) == [(50, 55), (60, 75)] and pieces(profile.gaps) == [(0, 10), (75, 100)]
    assert profile.names == [("aten::addmm", 25_000, 1), ("aten::linear", 15_000, 2), ("aten::t", 5_000, 1)]


def test_files_that_are_no_trace(tmp_path, capsys):
    file = tmp_path / "a.json"
    for text in ("{", "{}", "3"):
        file.write_text(text)
        with pytest.raises(ContractError, match="is no trace of torch's profiler"):
            read_trace(file)
    file.write_text('{"traceEvents": []}')
    with pytest.raises(ContractError, match="has no ProfilerStep#N; call profiler.step"):
        profiles_of(read_trace(file))
    assert main(["profile", "--read", str(tmp_path / "none")]) == 2 and "is no folder" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["profile", "--read", str(tmp_path / "empty")]) == 2 and "holds no trace" in capsys.readouterr().err


def test_the_page_of_a_gpu(tmp_path, capsys):
    """Compressed, too; and it says which rank is missing, and compares times because it was a GPU."""
    with gzip.open(tmp_path / "rank1.trace.json.gz", "wt") as file:
        json.dump(trace(), file)
    assert main(["profile", "--read", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((tmp_path / "summary.json").read_text()) and result["missing_ranks"] == [0]
    (row,) = result["attention_forward"]
    assert row["is_comparable"] and row["predicted_compute_ms"] == pytest.approx(0.04)
    assert row["measured_compute_ms"] == pytest.approx(0.0475)
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png") == 1 == len(list(tmp_path.glob("*.png"))) and "not comparable" not in page
    assert main(["profile", "--read", str(tmp_path)]) == 0  # summary.json is no trace
    assert "traces of ranks 0 are not in" in capsys.readouterr().out
