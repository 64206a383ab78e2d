# SPDX-License-Identifier: Apache-2.0
"""The example of Muon with QK-clip: the bound holds, without it logits go beyond, and the scale is exact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from magi_attention.testing.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs the Muon of torch 2.9")


def run(out: Path, ranks: int, bound: float) -> list[float]:
    """The greatest logit of each step."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, str(ROOT / "examples" / "muon_qk_clip.py"), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--bound", str(bound)], env=environment, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return [max(map(max, step)) for step in json.loads((out / "logits.json").read_text())["logits"]]


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", (1, 2))
def test_the_bound_holds(tmp_path, ranks):
    # A step may go beyond; the clip after it brings the weights back.
    free, bounded = run(tmp_path / "free", ranks, 0), run(tmp_path / "bounded", ranks, 10)
    late = [sum(tops[-10:]) / 10 for tops in (free, bounded)]
    assert late[0] > 17 and late[1] < 14, late
    first = next(i for i, top in enumerate(free) if top > 10)
    assert bounded[: first - 1] == free[: first - 1], "the clip changes what is within the bound"
