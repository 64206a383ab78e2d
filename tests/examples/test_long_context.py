# SPDX-License-Identifier: Apache-2.0
"""The long-context example on CPUs: bounded memory changes no loss, on one rank and on two; resuming."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from magi_attention.testing.waiting import DEADLINE_S

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ("--device", "cpu", "--dtype", "fp32", "--seq-len", "1024", "--max-document", "300", "--steps", "4")
CHUNKS = ("--mlp-chunk", "100", "--logits-chunk", "64", "--head-chunks", "2")


def run(script: str, out: Path, ranks: int, *options: str) -> tuple[list[float], str]:
    """Losses, and what was printed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, str(EXAMPLES / script), *SMALL, "--out", str(out), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return json.loads((out / "curve.json").read_text())["losses"], done.stdout


@pytest.mark.nightly
def test_losses_are_those_of_the_plain_program(tmp_path):
    plain, _ = run("fsdp2_llama.py", tmp_path / "plain", 1)
    assert len(plain) == 4 and plain[0] > plain[2]
    for ranks, options in ((1, CHUNKS), (2, CHUNKS), (2, ("--activations", "checkpointed"))):
        found, printed = run("long_context.py", tmp_path / f"{ranks}{options[1]}", ranks, *options)
        assert found == pytest.approx(plain, rel=1e-5)
        assert re.search(rf"{1024 // ranks:,} tokens a rank: predicted \d+\.\d+ GB on the GPU", printed)


@pytest.mark.nightly
def test_resuming_gives_the_same_bits(tmp_path):
    straight, _ = run("long_context.py", tmp_path, 2, *CHUNKS, "--save-every", "2")
    resumed, _ = run("long_context.py", tmp_path / "again", 2, *CHUNKS, "--resume", str(tmp_path / "step-2"))
    assert straight[2:] == resumed
