# SPDX-License-Identifier: Apache-2.0
"""Attention in one launch and group collectives of two ranks, few of each, to be run under compute-sanitizer on two
GPUs:

    compute-sanitizer --target-processes all --kernel-name kernel_substring=magi --tool memcheck \\
        python tests/gpu/sanitized_ranks.py

and with ``--tool synccheck``. Only our kernels are looked at, as NCCL's own end synccheck. memcheck also reports what
NCCL and torch ask of the driver to find out what it can do.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1] / "comm"), str(Path(__file__).parents[1])]

CASES = 6


def calls(rank: int, world: int) -> None:
    """Random masks, half of them once more where the first writer of a block of dq stores; then random plans."""
    from test_native_group_collective import check_plans
    from test_one_launch_gpu import random_cases

    from magi_attention.comm.transport.torch import as_transport

    found = random_cases(rank, world, torch.bfloat16, range(CASES))
    found += random_cases(rank, world, torch.bfloat16, range(CASES // 2), True)
    wrong = [seed for seed, errors in found if max(errors) > 2]
    faults = check_plans(as_transport(None), CASES)
    assert not wrong and not faults, (wrong, faults)
    print(f"rank {rank}: {len(found)} masks and {CASES} plans are right", flush=True)


if __name__ == "__main__":
    from magi_attention.testing.spawn import run_processes

    run_processes(2, calls, timeout_s=300, backend="nccl")
