# SPDX-License-Identifier: Apache-2.0
"""The FSDP2 example on CPUs: ranks and replicas against one process, resuming, and the picture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from magi_attention.testing.spawn import RankFailure, run_program
from magi_attention.testing.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "fsdp2_llama.py"
TEXT = ("--data", str(ROOT / "examples"))  # few files, which are soon found
SMALL = ("--device", "cpu", "--dtype", "fp32", "--seq-len", "1024", "--max-document", "300", "--steps", "6", *TEXT)
NO_GPU = "torch sees no GPU"


def run(out: Path, ranks: int, *options: str) -> dict:
    """curve.json of a run in interpreters of its own."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, str(SCRIPT), *SMALL, "--out", str(out), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return json.loads((out / "curve.json").read_text())


def side_by_side(*calls: tuple) -> list[dict]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda call: run(*call), calls))


def run_here(out: Path, ranks: int, *options: str) -> dict:
    """curve.json of a run in forks."""
    run_program(ranks, SCRIPT, *SMALL, "--out", str(out), *options)
    return json.loads((out / "curve.json").read_text())


def near(a: dict, b: dict) -> bool:
    return len(a["losses"]) == len(b["losses"]) and all(abs(x - y) < 1e-5 * x for x, y in zip(a["losses"], b["losses"]))


@pytest.mark.skipif(" " in sys.prefix, reason="torch.compile does not quote Python's path, which has a space")
def test_ranks_train_as_one_process_and_as_sdpa(tmp_path):
    one, two = run_here(tmp_path / "1", 1), run_here(tmp_path / "2", 2)
    sdpa = run_here(tmp_path / "s", 1, "--attention", "sdpa")
    compiled = run(tmp_path / "c", 2, "--compile", "--recompute")
    assert near(one, two) and near(one, compiled) and near(one, sdpa)
    assert one["losses"][0] > one["losses"][-1]


@pytest.mark.nightly
def test_replicas_of_groups(tmp_path):
    plain, grouped = side_by_side((tmp_path / "a", 2, "--cp", "1"), (tmp_path / "b", 4, "--cp", "2"))
    assert near(plain, grouped)


@pytest.mark.nightly
def test_resuming_gives_the_same_bits(tmp_path):
    straight = run(tmp_path, 2, "--save-every", "3", "--accumulate", "2")
    resumed = run(tmp_path / "again", 2, "--resume", str(tmp_path / "step-3"), "--accumulate", "2")
    assert straight["losses"][3:] == resumed["losses"]


def test_curves_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    curve = {"losses": [3.0, 2.5], "tokens_per_second": 10.0, "ranks": 2, "arguments": {"attention": "magi", "cp": 2}}
    (tmp_path / "curve.json").write_text(json.dumps(curve))
    run_program(1, SCRIPT, "--out", str(tmp_path), "--plot", str(tmp_path / "curve.json"))
    assert (tmp_path / "loss_curves.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "sentence"),
    [(["--config", "1b"], "takes some 15 GB of memory on the CPU"), (["--config", "1b", "--device", "cuda"], NO_GPU)],
)
def test_what_wants_a_gpu_says_so_first(tmp_path, words, sentence):
    """Before the model is made."""
    with pytest.raises(RankFailure, match=sentence):
        run_program(1, SCRIPT, *words, "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_it_says_so_before_there_is_a_process_group(tmp_path):
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    environment = {**kept, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "MASTER_ADDR": "no.such.host.invalid"}
    command = [sys.executable, str(SCRIPT), "--device", "cuda", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 1 and NO_GPU in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()
