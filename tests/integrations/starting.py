# SPDX-License-Identifier: Apache-2.0
"""Starts a training script over several processes and reads what it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from magi_attention.testing.waiting import DEADLINE_S

HERE = Path(__file__).resolve().parent
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
# --multi_gpu is what makes it start several processes; the script says use_cpu.
ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--main_process_port", "0",
              "--num_processes")  # fmt: skip


def launch(folder: Path, settings: dict, processes: int, script: str = "train_tiny.py", by=TORCHRUN) -> dict:
    """What rank 0 of ``script`` wrote; fails with what the processes said."""
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / f"{processes}.json"
    command = [*by, str(processes), str(HERE / script), str(out), json.dumps(settings)]
    path = os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))
    alone = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "0"}
    alone["PYTHONFAULTHANDLER"] = "1"  # a rank that aborts says where
    done = subprocess.run(command, env={**os.environ, **alone}, capture_output=True, text=True, timeout=DEADLINE_S)
    # torchrun's own words come last and are long; the cause stands before them.
    assert done.returncode == 0, (done.stdout + done.stderr)[-40_000:]
    result = json.loads(out.read_text())
    assert result["processes"] == processes
    return result


def launch_both(folder: Path, settings: dict, processes: tuple[int, int] = (1, 2), **options) -> list[dict]:
    """``launch`` with each number of processes, side by side."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda n: launch(folder, settings, n, **options), processes))


def assert_same_steps(one: dict, other: dict, steps: int, tolerance: float = 1e-5) -> None:
    """Loss and norm of the gradients of each step, relative."""
    a, b = ([x for x in result["log"] if "grad_norm" in x] for result in (one, other))
    assert len(a) == len(b) == steps
    for x, y in zip(a, b):
        for name in ("loss", "grad_norm"):
            assert abs(x[name] - y[name]) <= tolerance * abs(x[name]), (x, y)
