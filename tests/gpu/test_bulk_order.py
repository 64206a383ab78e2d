# SPDX-License-Identifier: Apache-2.0
"""What semaphores of the deterministic backward rest on: a counter that is released orders additions by bulk copies."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from magi_attention.native.toolchain import find_nvcc

SOURCE = Path(__file__).with_name("bulk_order.cu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_release_keeps_additions_in_order(tmp_path):
    """Without it some thousand words are wrong on an H100; that is printed and not asserted, for it is chance."""
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        pytest.skip(f"the kernels with semaphores are for sm_90, not for sm_{major}{minor}")
    if torch.cuda.get_device_properties(0).multi_processor_count < 132:
        pytest.skip("120 CTAs and 12 others need 132 multiprocessors at once")
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("needs nvcc")
    program = tmp_path / "bulk_order"
    subprocess.run([nvcc, "-O3", "-std=c++17", "-arch=sm_90a", "-o", program, SOURCE], check=True, timeout=120)
    wrong = {}
    for how in ("relaxed", "released"):
        done = subprocess.run([program, how], capture_output=True, text=True, check=True, timeout=120)
        wrong[how] = int(done.stdout)
    print(wrong)
    assert wrong["released"] == 0
