# SPDX-License-Identifier: Apache-2.0
"""``ContextParallelTrainer`` on one and two GPUs, in the ways in which users ask for half precision."""

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
GPUS = torch.cuda.device_count()
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
parallelism_config:
  parallelism_config_dp_replicate_size: 1
  parallelism_config_dp_shard_size: 1
  parallelism_config_tp_size: 1
  parallelism_config_cp_size: 2
"""

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")


def trained(folder: Path, *start: str, **options) -> dict:
    out = folder / "out.json"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    script = ROOT / "tests" / "integrations" / "train_on_gpus.py"
    command = [sys.executable, "-m", *start, str(script), str(out), json.dumps(options)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True,
        timeout=DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-20_000:]
    found = json.loads(out.read_text())
    print(found)
    return found


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, found {GPUS}")
def test_half_precision_over_two_gpus(tmp_path):
    """bf16=True on float32 weights, and FSDP2 with mixed precision from accelerate's config alone: our kernels run, and
    losses are those of one GPU."""
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node")
    one = trained(tmp_path, *torchrun, "1", bf16=True)
    (tmp_path / "accelerate.yaml").write_text(ACCELERATE)
    launch = ("accelerate.commands.launch", "--config_file", str(tmp_path / "accelerate.yaml"))
    for found in (trained(tmp_path, *torchrun, "2", bf16=True), trained(tmp_path, *launch)):
        assert found["backends"] == ["ffa"] and found["cp_size"] == 2
        assert len(found["losses"]) == 10 and found["losses"][-1] < 0.8 * found["losses"][0]
        assert found["losses"] == pytest.approx(one["losses"], rel=0.02)
    assert "FSDP" in found["kind"]
