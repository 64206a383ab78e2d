# SPDX-License-Identifier: Apache-2.0
"""`magi bench` with tiny sizes on the CPU: each benchmark writes records, charts and a page; wrong requests."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from magi_attention.cli import main
from magi_attention.testing.libraries import planner_if_possible

TINY = "--heads 4,2 --head-dim 8 --repeats 2 --device cpu".split()
RUNS = {
    "kernel": (["--masks", "causal", "--sizes", "64,96", "--only", "magi,magi_attend,fa2", *TINY], []),
    "sparse": (["--masks", "index_8", "--sizes", "64", "--only", "magi,gather", *TINY], ["--index-heads", "2"]),
    "cp": (["--masks", "causal", "--sizes", "32", "--only", "magi,ring", *TINY], ["--no-check"]),
    "comm": (["--sizes", "8", "--repeats", "2", "--device", "cpu"], ["--heads", "2", "--head-dim", "8"]),
    "planner": (["--masks", "packed_128K", "--repeats", "2"], []),
    "train": (["--sizes", "128", "--only", "magi,sdpa", "--repeats", "2", "--device", "cpu"], []),
}
CELLS = {
    "kernel": {("forward", "64"), ("forward", "96"), ("backward", "64"), ("backward", "96")},
    "sparse": {("forward", "64"), ("backward", "64")},
    "cp": {("forward", "32"), ("backward", "32"), ("both", "32")}, "comm": {("cast", "8"), ("reduce", "8")},
    "planner": {("plan", "128K")}, "train": {("step", "128")},
}  # fmt: skip
PEERS = {
    "kernel": {"fa2"}, "sparse": {"gather"}, "cp": {"ring"}, "comm": {"torch"}, "planner": set(), "train": {"sdpa"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "mine"


BY_NIGHT = ("comm", "cp", "planner", "sparse", "train")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in BY_NIGHT else ()) for name in RUNS]
)
def test_each_writes_records_charts_and_a_page(name, folder, capfd):
    pytest.importorskip("matplotlib")
    planner_if_possible()
    options, behind = RUNS[name]
    assert main(["bench", name, "--name", "mine", *options, "--", *behind]) == 0
    told = capfd.readouterr().out
    assert ("No GPU is used" in told) == (name != "planner") and "Page: runs/mine/report.html" in told
    records = ["forward", "backward"] if name == "kernel" else [name]
    assert {file.name for file in folder.iterdir()} == {f"{r}.{x}" for r in records for x in ("json", "png")} | {
        "report.html"
    }
    for record in records:
        data = json.loads((folder / f"{record}.json").read_text())
        assert data["environment"]["torch"] and data["environment"]["cpu"] and data["settings"]
        assert (folder / f"{record}.png").read_bytes().startswith(b"\x89PNG\r\n")
    page = (folder / "report.html").read_text()
    data = json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', page, re.DOTALL)[1])
    assert {(cell["direction"], cell["size"]) for cell in data["cells"]} == CELLS[name]
    assert {n["name"] for n in data["names"] if n["role"] == "peer"} == PEERS[name]
    for cell in data["cells"]:
        for shown in (data["ours"], *PEERS[name]):
            assert cell["values"][shown]["shown"] > 0 and cell["values"][shown]["noise"] >= 0
    assert bool(data["missing"]) == (name in ("kernel", "sparse", "cp"))


def test_a_page_of_stored_records(folder, capfd):
    pytest.importorskip("matplotlib")
    record = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "ffa_forward_h100.json"
    show = ["bench", "kernel", "--name", "mine", "--show", str(record)]
    assert main([*show, "--baseline", str(record), "--fail-above", "1.05"]) == 0
    assert "No cell takes more than 1.05 times as long" in capfd.readouterr().out
    assert [file.name for file in folder.iterdir()] == ["report.html"]


def test_dry_runs_print_the_commands(folder, capsys):
    for name in RUNS:
        assert main(["bench", name, "--dry-run", "--", "--more", "1"]) == 0
        *measure, report = capsys.readouterr().out.splitlines()
        assert all("benchmarks/" in line and "--more 1" in line for line in measure) and "report.py" in report
        assert len(measure) == (2 if name == "kernel" else 1)
    assert not folder.parent.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["cp", "--ranks", "1"], "give at least 2"),
        (["train", "--ranks", "0"], "give at least 1"),
        (["kernel", "--directions", "up"], "give forward, backward, both"),
        (["planner", "--fail-above", "1.05"], "name its file with --baseline"),
        (["kernel", "--baseline", "none.json"], "none.json is no file"),
        (["kernel", "--show", "none.json"], "none.json is no file"),
    ],
)
def test_wrong_requests_are_one_sentence(arguments, words, folder, capsys):
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert words in error and "\n" not in error and not folder.parent.exists()


def test_help_says_what_each_measures(capsys):
    assert main(["bench"]) == 0
    assert all(f"    {name} " in text for text in [capsys.readouterr().out] for name in RUNS)
    for name in RUNS:
        with pytest.raises(SystemExit) as stop:
            main(["bench", name, "--help"])
        told = capsys.readouterr().out
        assert stop.value.code == 0 and "Measures" in told and "--baseline" in told and "go behind --" in told


@pytest.mark.nightly
def test_long_training_beside_other_context_parallelism(folder, capfd):
    """The losses of all ways are those of the first."""
    pytest.importorskip("matplotlib")
    options = ["--sizes", "256", "--only", "magi,ring,all_gather,ulysses", "--repeats", "3", "--device", "cpu"]
    long = ["--long", "--keeps-attention", "--layers", "2", "--ranks", "2"]
    assert main(["bench", "train", "--name", "mine", *options, "--", *long]) == 0
    rows = json.loads((folder / "train.json").read_text())["results"]
    assert [row["name"] for row in rows] == ["magi", "ring", "all_gather", "ulysses"]
    for row in rows:
        assert row["reason"] is None and row["ms"] > 0
        assert row["losses"] == pytest.approx(rows[0]["losses"], rel=1e-5)
    assert (folder / "report.html").exists()


@pytest.mark.parametrize("behind", ["--layers 2", "--config llama3-8b", "--only ring", "--keeps-attention"])
def test_options_of_long_training_alone(behind, folder, capfd):
    assert main(["bench", "train", "--name", "mine", "--sizes", "128", "--device", "cpu", "--", *behind.split()]) != 0
    assert "--long" in capfd.readouterr().err
