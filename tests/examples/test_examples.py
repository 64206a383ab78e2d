# SPDX-License-Identifier: Apache-2.0
"""Every numbered example runs and stays short; the flagship trains a few small steps on two ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from magi_attention.cli import main
from magi_attention.testing.spawn import run_program
from magi_attention.testing.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
RANKS = ["2"]  # each of which imports torch
ARGUMENTS = {"03_context_parallel": RANKS, "04_plans_ahead": RANKS}
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))


def run(*command: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE_S
    )


def test_there_are_examples():
    assert [path.name[:2] for path in EXAMPLES[:3]] == ["01", "02", "03"]


def test_they_are_short():
    assert max(len(path.read_text().splitlines()) for path in EXAMPLES) <= 150


def test_sparse_attention_as_under_torchrun():
    (path,) = (path for path in EXAMPLES if path.stem == "05_sparse_attention")
    assert any(printed.strip() for printed in run_program(2, path))


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.stem[:2] != "05"], ids=lambda path: path.stem)
def test_example(path):
    done = run(str(path), *ARGUMENTS.get(path.stem, []))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
    if path.stem == "03_context_parallel":  # what all ranks say is said once
        assert done.stderr.count("Attention runs on the CPU, by PyTorch's kernels ('sdpa_ol').") == 1, done.stderr
        assert "in place of" not in done.stderr


@pytest.mark.nightly
def test_flagship_on_own_text(tmp_path, monkeypatch, capfd):
    text = tmp_path / "text"
    text.mkdir()
    for i in range(4):
        (text / f"{i}.txt").write_text("\n\n".join(f"line {j} of file {i}" for j in range(60)))
    small = ["--data", str(text), "--ranks", "2", "--device", "cpu", "--steps", "3", "--seq-len", "320"]
    monkeypatch.chdir(tmp_path)
    assert main(["run", *small, "--name", "t"]) == 0, "\n".join(capfd.readouterr())
    folder = tmp_path / "runs" / "t"
    losses = json.loads((folder / "losses.json").read_text())["losses"]
    replayed = json.loads((folder / "replay.json").read_text())["losses"]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert max(abs(a - b) / b for a, b in zip(losses, replayed)) <= 1e-4
    page = (folder / "report.html").read_text()
    assert "http" not in page.replace("http-equiv", "")
    data = json.loads(re.search(r'<script type="application/json" id="plan">(.*?)</script>', page, re.DOTALL)[1])
    assert [values for _, values in data["run"]["curves"]] == [losses, replayed] and len(data["run"]["times"]) == 2
    assert any(end > start for start, end in [times["compute"][:2] for times in data["run"]["times"]])

    assert main(["run", *small, "--name", "t"]) == 2 and "already holds a run" in capfd.readouterr().err
