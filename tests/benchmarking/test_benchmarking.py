# SPDX-License-Identifier: Apache-2.0
"""Timing on the CPU, tables, CSV round trips, plots."""

import base64
import itertools
import subprocess
import sys
import types

import pytest
import torch

from magi_attention import benchmarking as bm
from magi_attention.benchmarking import timing
from magi_attention.compat.benchmarking import bench
from magi_attention.compat.benchmarking.report import Table
from magi_attention.errors import ContractError, UnsupportedError


@pytest.fixture
def clock(monkeypatch):
    """A clock that only ``clock.now +=`` moves, in seconds."""
    fake = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: fake.now)
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    return fake


UNTIDY = {"to_gc_collect": False}  # a collection takes a second where many tests have run


def test_do_bench_counts_and_times(clock):
    calls = []

    def fn():
        calls.append(None)
        clock.now += 0.001 * len(calls)

    result = bm.do_bench(fn, warmup=2, rep=5, return_mem=False, **UNTIDY)
    assert len(calls) == 1 + 2 + 5 and result == {"flops": pytest.approx(6)}, "calls 4 to 8 count"
    calls.clear()
    quantiles = bm.do_bench_flops(fn, warmup=0, rep=5, quantiles=[0.0, 0.5, 1.0], **UNTIDY)
    assert quantiles == pytest.approx([2, 4, 6])
    modes = {"mean": 10 / 3, "median": 3, "min": 2, "max": 5}
    for mode, wanted in modes.items():
        steps = iter([9, 2, 5, 3])  # the first call is not timed

        def uneven(steps=steps):
            clock.now += 0.001 * next(steps)

        assert bm.do_bench_flops(uneven, warmup=0, rep=3, return_mode=mode, **UNTIDY) == pytest.approx(wanted)
    for bad in ({"rep": 0}, {"warmup": -1}, {"return_mode": "mode"}, {"mem_record_mode": "x"}):
        with pytest.raises(ContractError):
            bm.do_bench(fn, **{"warmup": 0, "rep": 1, **UNTIDY, **bad})


def test_gradients_are_dropped():
    x = torch.ones(2, requires_grad=True)
    seen = []
    x.grad = torch.ones(2)
    bm.do_bench(lambda: seen.append(x.grad), warmup=1, rep=1, grad_to_none=[x], **UNTIDY)
    assert seen[0] is not None and seen[1:] == [None] * (len(seen) - 1)


def test_memory():
    size = 64 * 2**20
    hold = []

    def fn():
        hold.append(torch.ones(size // 4, device="cuda" if torch.cuda.is_available() else "cpu"))
        hold.clear()

    peak = bm.do_bench_mem(fn, rep=2, **UNTIDY)
    assert isinstance(peak, float)
    if sys.platform == "linux" or torch.cuda.is_available():
        # bytes and not KiB; how much else the process takes meanwhile is not ours to say
        assert 0.5 * size < peak < 100 * size


def sweep(tmp_path, **kwargs):
    @bm.perf_report(
        bm.Benchmark(["n"], [1, 2, 4], "kind", ["a", "b"], ["A", "B"], "plot", args={"scale": 10}, **kwargs)
    )
    def measure(n, kind, scale):
        value = n * scale + (kind == "b")
        return {"time": value, "mem": (value, value - 1, value + 1)}

    return measure


def test_sweep_tables_and_csv(tmp_path, capsys):
    mark = sweep(tmp_path)
    assert mark(n=1, kind="a", scale=1)["time"] == 1
    tables = mark.collect(mark.benchmarks[0])
    assert tables["time"].rows() == [["n", "A", "B"], [1, 10.0, 11.0], [2, 20.0, 21.0], [4, 40.0, 41.0]]
    assert tables["mem"].rows()[0] == ["n", "A", "A-min", "A-max", "B", "B-min", "B-max"]
    for table in tables.values():
        table.to_csv(tmp_path / "t.csv")
        assert Table.from_csv(tmp_path / "t.csv") == table
    assert mark.run(print_data=True) is None
    assert "plot-mem" in capsys.readouterr().out
    (tmp_path / "bad.csv").write_text("x\n1\n")
    with pytest.raises(ContractError, match="# x"):
        Table.from_csv(tmp_path / "bad.csv")


def test_files_and_plots(tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    mark = sweep(tmp_path, x_log=True, y_log=True, ylabel={"time": "ms"}, styles=[("red", "-"), ("blue", "--")])
    mark.run(save_path=tmp_path / "out", report_all_name="all")
    names = ["all.html", "plot-mem.csv", "plot-mem.png", "plot-time.csv", "plot-time.png"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == names
    page = (tmp_path / "out" / "all.html").read_text()
    for name in ("plot-time", "plot-mem"):
        picture = base64.b64encode((tmp_path / "out" / f"{name}.png").read_bytes()).decode()
        assert f"<h2>{name}</h2>" in page and picture in page and "<td>41</td>" in page
    bench = bm.Benchmark.from_csv(tmp_path / "out" / "plot-time.csv", ylabel="ms")
    assert (bench.x_names, bench.x_vals, bench.line_names, bench.ylabel) == (
        ["n"],
        [1, 2, 4],
        ["A", "B"],
        "ms",
    )
    bm.Mark.draw_from_csv(tmp_path / "out" / "plot-mem.csv", tmp_path / "again.png", print_value_on_bar=True)
    bm.make_img_grid(tmp_path, tmp_path / "grid.png", "tall", ignore_patterns=["plot-mem"], save_pdf=True)
    assert min((tmp_path / name).stat().st_size for name in ("grid.png", "grid.pdf")) > 1000
    bm.make_img_grid(tmp_path, tmp_path / "none.png", ignore_patterns=[".*"])
    assert not (tmp_path / "none.png").exists()
    with pytest.raises(ContractError, match="layout"):
        bm.make_img_grid(tmp_path, tmp_path / "none.png", layout="round")


def test_several_x_names_and_mismatched_lines():
    mark = bm.Mark(lambda a, b, k: a * b, bm.Benchmark(["a", "b"], [(1, 2), (3, "x")], "k", [0], ["K"], "p"))
    assert mark.collect(bm.Benchmark(["a", "b"], [(2, 3), 5], "k", [0], ["K"], "p"))[""].rows() == [
        ["a", "b", "K"],
        [2, 3, 6.0],
        [5, 5, 25.0],
    ]
    with pytest.raises(ContractError, match="pair"):
        bm.Benchmark(["a"], [1], "k", [0, 1], ["K"], "p")


def test_data_frames(tmp_path):
    try:
        import pandas  # noqa: F401
    except ImportError:
        with pytest.raises(UnsupportedError, match="pip install pandas"):
            sweep(tmp_path).run(return_df=True)
    else:
        frame = sweep(tmp_path).run(return_df=True)[0]
        assert list(frame.columns) == ["n", "A", "B"] and frame["B"].tolist() == [11.0, 21.0, 41.0]


def test_import_is_cheap():
    code = "import sys, magi_attention.benchmarking; print('matplotlib' in sys.modules, 'pandas' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "False"]


def test_rounds_that_warm_up_and_what_runs_before_each_do_not_count(clock):
    order = []

    def call(name, seconds):
        def run():
            order.append(name)
            clock.now += seconds * len(order)

        return run

    def before():
        order.append("before")
        clock.now += 1000

    cpu = timing.Clock(torch.device("cpu"))
    options = {"clock": cpu, "warm_up_rounds": 2, "before": before}
    (us,) = timing.interleaved_us({"a": call("a", 1.0)}, 3, None, **options).values()
    assert order == ["before", "a"] * 5 and us == pytest.approx([6e6, 8e6, 10e6])
    order.clear()
    found = timing.interleaved_us({n: call(n, 0.0) for n in "abc"}, 4, None, **options)
    rounds = [order[i : i + 6] for i in range(0, len(order), 6)]
    assert all(sorted(names[1::2]) == ["a", "b", "c"] for names in rounds) and len(rounds) == 6
    assert {n: len(us) for n, us in found.items()} == {"a": 4, "b": 4, "c": 4}


def test_a_call_that_fails_leaves_or_ends_the_measurement(clock, monkeypatch):
    """In the warm-up or while it is timed; each call follows a lead."""
    leads, counts = [], itertools.count()
    cpu = timing.Clock(torch.device("cpu"))
    monkeypatch.setattr(cpu, "idle", leads.append, raising=False)

    def bad():
        raise torch.OutOfMemoryError("no memory")

    def late():
        if next(counts) == 2:
            raise RuntimeError("launch failed")

    failed = {}
    found = timing.interleaved_us({"good": lambda: None, "bad": bad, "late": late}, 5, failed, 77, clock=cpu)
    assert found == {"good": [0.0] * 5} and leads == [77] * 7
    assert failed == {"bad": "OutOfMemoryError: no memory", "late": "RuntimeError: launch failed"}
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        timing.interleaved_us({"bad": bad}, 2, None, device="cpu")
