# SPDX-License-Identifier: Apache-2.0
"""ci/gpu_regression on made-up results: what warns, what fails, what is measured twice, what cannot be compared."""

from __future__ import annotations

import copy
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import compare_results as cr
import gpu_regression as gr
import pytest
import result_files as rf

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "gpu": "NVIDIA H100 80GB HBM3", "torch": "2.11.0", "cuda": "13.0", "cudnn": 91900,
    "nvidia_smi": "580.1, 700.00 W, 1980 MHz",
}  # fmt: skip
MASKS, SEQLENS = ["full", "varlen_causal"], [4096, 32768]
SPEEDS = {"magi": 700.0, "cudnn": 650.0, "flex": 400.0}


def results(direction: str = "forward", masks=MASKS, seqlens=SEQLENS, **environment) -> dict:
    """A file as benchmarks/kernel.py writes it."""
    rows = [
        {"mask": m, "seqlen": n, "name": name, "tflops": speed, "direction": direction, "reason": None}
        for m in masks for n in seqlens for name, speed in SPEEDS.items()
    ]  # fmt: skip
    settings = {
        "direction": direction, "masks": list(masks), "seqlens": list(seqlens), "only": None, "no_peers": False,
        "heads": [64, 8], "head_dim": 128, "dtype": "bf16", "samples": 4, "repeats": 20, "graph": False, "host": True,
    }  # fmt: skip
    return {"environment": ENVIRONMENT | environment, "settings": settings, "results": rows}


def changed(data: dict, factor: float, mask: str = "full", seqlen: int = 4096, names=("magi",)) -> dict:
    """A copy with some implementations at another speed; factor 0 means not run."""
    out = copy.deepcopy(data)
    for row in out["results"]:
        if row["mask"] == mask and row["seqlen"] == seqlen and row["name"] in names:
            row["tflops"] *= factor
            row["reason"] = None if factor else "RuntimeError: no kernel"
    return out


def run(data: dict) -> rf.Run:
    return rf.parse(data, "made up")


def verdict(before: dict, after: dict, mask: str = "full", seqlen: int = 4096) -> cr.Verdict:
    verdicts, _ = cr.compare(run(before), run(after))
    return next(v for v in verdicts if (v.cell.mask, v.cell.seqlen) == (mask, seqlen))


class Tries:
    """Stands for the benchmark: hands out prepared results and keeps what was asked for."""

    def __init__(self, *prepared: dict) -> None:
        self.prepared = list(prepared)
        self.asked: list[tuple[str, list, list]] = []

    def __call__(self, benchmark: str, direction: str, settings: dict, name: str) -> rf.Run:
        self.asked.append((name, settings["masks"], settings["seqlens"]))
        data = self.prepared.pop(0)
        return run(
            data | {"results": [
                r for r in data["results"] if r["mask"] in settings["masks"] and r["seqlen"] in settings["seqlens"]
            ]}
        )  # fmt: skip


def checked(*tries: dict) -> tuple[dict[str, list[cr.Verdict]], Tries, bool]:
    measure = Tries(*tries)
    verdicts, notes = gr.check("base", run(results()), measure)
    assert not measure.prepared, "a try that was prepared was not asked for"
    by_status: dict[str, list[cr.Verdict]] = {}
    for v in verdicts:
        by_status.setdefault(v.status, []).append(v)
    return by_status, measure, gr.report("base", verdicts, notes)


def test_slow_once_passes_and_only_that_is_measured_again(capsys):
    slow = changed(results(), 0.8, "varlen_causal", 32768)
    found, measure, passed = checked(slow, results())
    assert passed and set(found) == {"ok"}
    assert measure.asked[1] == ("base-try2-part1", ["varlen_causal"], [32768])
    assert "in the second try; the first was slow" in capsys.readouterr().out


def test_slow_twice_fails(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    found, _, passed = checked(changed(results(), 0.8), changed(results(), 0.85))
    assert not passed
    (v,) = found["slow"]
    assert v.slower_by == pytest.approx(0.15) and v.measure == "ratio"  # the better of the two
    line = "forward full 4K: slow, 15.0% slower by ratio; in two tries"
    out = capsys.readouterr().out
    assert f"  {line}\n" in out and f"::error title=base::{line}" in out
    assert f"- {line}" in (tmp_path / "summary.md").read_text()


@pytest.mark.parametrize(
    ("factor", "status"),
    [(0.951, "ok"), (0.949, "warn"), (0.901, "warn"), (0.899, "slow"), (1.04, "ok"), (1.2, "faster")],
)
def test_thresholds(factor, status):
    assert verdict(results(), changed(results(), factor)).status == status


def test_missing_twice_fails_and_says_why():
    gone = changed(results(), 0)
    found, _, passed = checked(gone, gone)
    assert not passed and found["missing"][0].notes == ["RuntimeError: no kernel", "in two tries"]
    without = results()
    without["results"] = [r for r in without["results"] if r["seqlen"] == 4096]
    found, measure, passed = checked(without, results())
    assert passed and set(found) == {"ok"} and measure.asked[1][1:] == (MASKS, [32768])


def test_a_wrong_result_fails_at_once():
    wrong = changed(results(), 0)
    next(r for r in wrong["results"] if r["reason"])["reason"] = "wrong: relative error 0.3 of out on 64 rows or fewer"
    found, measure, passed = checked(wrong)
    assert not passed and len(found["wrong"]) == 1 and len(measure.asked) == 1
    found, _, passed = checked(changed(results(), 0.8), wrong)  # right and slow first, then wrong
    assert not passed and len(found["wrong"]) == 1


def test_a_slow_machine_is_not_our_doing():
    everyone = changed(results(), 0.8, names=tuple(SPEEDS))
    v = verdict(results(), everyone)
    assert v.status == "warn" and v.slower_by == pytest.approx(0)
    assert "TFLOP/s fell by 20.0% and those of the peers too" in v.line()


def test_another_machine():
    with pytest.raises(rf.Incomparable, match="baseline is of NVIDIA H100.* and this is NVIDIA H200; commit"):
        cr.compare(run(results()), run(results(gpu="NVIDIA H200")))
    # The same GPU with another power limit: the ratio alone.
    cooler = results(nvidia_smi="580.1, 500.00 W, 1980 MHz")
    verdicts, notes = cr.compare(run(results()), run(changed(cooler, 0.8, names=tuple(SPEEDS))))
    assert {v.status for v in verdicts} == {"ok"} and "power limit was 700.00 W and is 500.00 W" in notes[0]
    # Another torch: the peers may be other code, so TFLOP/s alone.
    newer = changed(results(torch="2.15.0"), 0.8, names=("cudnn", "flex"))
    verdicts, notes = cr.compare(run(results()), run(newer))
    assert {v.measure for v in verdicts} == {"tflops"} and "torch was 2.11.0 and is 2.15.0" in notes[0]
    with pytest.raises(rf.Incomparable, match="Nothing is left to compare"):
        cr.compare(run(results()), run(results(torch="2.15.0", nvidia_smi=None)))


def test_without_a_gpu_nothing_passes(monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gr, "run_tests", lambda: pytest.fail("tests were started"))
    assert gr.main([]) == 2
    assert "torch sees no GPU" in capsys.readouterr().err


def put(folder: Path, **files: dict) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / f"{name}.json").write_text(json.dumps(data))
    return folder


def test_baselines_are_those_of_this_gpu(tmp_path):
    put(tmp_path, mine=results(), other=results(gpu="NVIDIA H200"), strange={"results": []})
    found, notes = gr.baselines(tmp_path, ENVIRONMENT["gpu"])
    assert list(found) == ["mine"] and len(notes) == 1 and "strange.json is left out" in notes[0]
    with pytest.raises(rf.Incomparable, match="no baseline of a machine without a GPU, only of NVIDIA H100"):
        gr.baselines(tmp_path, None)


def options_of(line: list[str]) -> dict:
    """What the benchmark's own parser makes of a command line."""
    at = next(i for i, word in enumerate(line) if word.startswith(f"{ROOT / 'benchmarks'}"))
    program, words = importlib.import_module(Path(line[at]).stem), line[at + 1 :]
    if words[0] == "rows":
        program, words = importlib.import_module("range_ops"), words[1:]
    options = program.make_parser().parse_args(words)
    return program.settings_of(options) if program.__name__ == "kernel" else vars(options)


RECORDS = [p for kind in ("ffa", "context", "group", "range") for p in sorted(gr.BASELINES.glob(f"{kind}_*.json"))]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_committed_results_are_baselines_of_themselves(path):
    """What is committed can be read, passes against itself, and is measured again with the options that it had."""
    baseline = rf.load(path)
    verdicts, notes = cr.compare(baseline, baseline)
    assert verdicts and not notes and {v.status for v in verdicts} == {"ok"}
    parts = gr._parts(baseline, None)
    for direction, settings in parts:
        options = options_of(gr.command(baseline.benchmark, direction, settings, Path("x")))
        again = {key: options[key] for key in settings.keys() & options.keys()}
        assert {"masks", "rows", "megabytes"} & again.keys() and again.items() <= settings.items()
    if baseline.benchmark == rf.KERNEL:
        covered = {(d, m, n) for d, s in parts for m in s["masks"] for n in s["seqlens"]}
        assert {(v.cell.direction, v.cell.mask, v.cell.seqlen) for v in verdicts} <= covered


def test_every_option_of_several_gpus_is_given_again():
    usual = vars(importlib.import_module("context_parallel").make_parser().parse_args([]))
    del usual["out"]
    chosen = {
        "masks": ["causal"], "tokens": [64], "only": ["ring"], "heads": [8, 2], "dtype": "fp16", "chunk_size": 512,
        "time_limit": 7.0,
    }  # fmt: skip
    for key in usual.keys() - chosen.keys():
        chosen[key] = True if usual[key] is False else usual[key] + 2
    given = options_of(gr._several_command({**chosen, "world": 4}, Path("x")))
    assert set(chosen) == set(usual) and {k: v for k, v in given.items() if k != "out"} == chosen


def several(factor: float = 1.0, world: int = 4, **others: float) -> dict:
    """A file as benchmarks/context_parallel.py writes it; ``others`` are factors of other implementations."""
    speeds = {"magi_fused": 600.0 * factor, "magi_a2av_1": 500.0, "all_gather": 550.0, "ring": 0.0}
    cells = [
        {
            "mask": mask, "tokens_per_gpu": 8192, "name": name, "reason": None if speed else "not this mask",
            **{d: {"tflops": speed * others.get(name, 1.0)} if speed else {} for d in ("forward", "backward", "both")},
        }
        for mask in MASKS for name, speed in speeds.items()
    ]  # fmt: skip
    settings = {
        "masks": list(MASKS), "tokens": [8192], "only": list(speeds), "heads": [64, 8], "head_dim": 128,
        "dtype": "bf16", "packs": 2, "world": world,
    }  # fmt: skip
    return {"environment": dict(ENVIRONMENT), "settings": settings, "cells": cells}


def test_several_gpus():
    before = run(several())
    verdicts, notes = cr.compare(before, run(several(0.8)))
    assert not notes and {v.status for v in verdicts} == {"slow"} and len(verdicts) == 6
    assert "backward varlen_causal 8K on 4 ranks: slow, 20.0% slower by ratio" in {v.line() for v in verdicts}
    # Other settings of ours are no peers, and who did not run is none either.
    assert {v.status for v in cr.compare(before, run(several(magi_a2av_1=0.5)))[0]} == {"ok"}
    verdicts, _ = cr.compare(before, run(several(0.8, all_gather=0.8)))
    assert {v.status for v in verdicts} == {"warn"}
    assert {v.status for v in cr.compare(before, run(several(world=2)))[0]} == {"missing"}
    with pytest.raises(rf.Incomparable, match="several benchmarks"):
        cr.merge([before, run(results())])


@pytest.mark.parametrize(("tests_pass", "factor", "code"), [(True, 1.0, 0), (False, 1.0, 1), (True, 0.8, 1)])
def test_exit_codes_of_a_whole_run(tmp_path, monkeypatch, capsys, tests_pass, factor, code):
    put(tmp_path / "base", forward=results())
    now = changed(results(), factor)
    monkeypatch.setattr(gr, "gpus_here", lambda: (ENVIRONMENT["gpu"], 1))
    monkeypatch.setattr(gr, "run_tests", lambda: tests_pass)
    monkeypatch.setattr(gr, "measurer", lambda folder, timeout: Tries(now, now))
    assert gr.main(["--baselines", str(tmp_path / "base"), "--out", str(tmp_path / "out")]) == code
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == {0: "passed", 1: "failed: forward" if tests_pass else "failed: tests"}[code]
    assert gr.main(["--baselines", str(tmp_path / "base"), "--only", "backward"]) == 2


def test_the_command_compares_files_without_a_gpu(tmp_path):
    put(tmp_path / "base", forward=results(), backward=results("backward"))
    put(tmp_path, good=results(), slow=changed(results(), 0.8), other=results(gpu="NVIDIA H200"))

    def said(name: str) -> tuple[int, str]:
        line = [str(ROOT / "ci" / "gpu_regression"), "--baselines", str(tmp_path / "base"), "--compare"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("GITHUB_")}
        environment["MAGI_PYTHON"] = sys.executable
        done = subprocess.run([*line, str(tmp_path / name)], env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    assert said("good.json") == (0, "forward: 4 ok\n")
    code, text = said("slow.json")
    assert code == 1 and "forward full 4K: slow, 20.0% slower by ratio" in text and "backward" not in text
    code, text = said("other.json")
    assert code == 2 and "no baseline of NVIDIA H200, only of NVIDIA H100" in text
