# SPDX-License-Identifier: Apache-2.0
"""Where tests of several ranks run: a GPU each, over NCCL; or, where there is one GPU, all on that, over gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from magi_attention.errors import UnsupportedError
from magi_attention.native.comm.nvshmem import Nvshmem
from magi_attention.testing.spawn import run_processes

GPUS = torch.cuda.device_count()
NEEDS_A_GPU = pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
IS_SHARED = GPUS == 1


def places(*worlds: int, shared: tuple[int, ...] = (2,)) -> list:
    """Parameters ``world, backend``: those of ``worlds`` that there are GPUs for, or ``shared`` on the only one."""
    if IS_SHARED:
        return [pytest.param(n, "gloo", id=f"{n} on one GPU") for n in shared]
    return [pytest.param(n, "nccl", id=f"{n} GPUs") for n in worlds if n <= GPUS]


def in_a_process(main: Callable[..., Any], *args: Any) -> Any:
    """What ``main(*args)`` gives in a process of its own, which has an NCCL group of one rank."""
    return run_processes(1, main, *args, timeout_s=100.0, backend="nccl")[0]


def over_nvshmem(main: Callable[..., Any], world: int, *args: Any, **options: Any) -> list[Any]:
    """What ``run_processes`` gives with a GPU for each rank; skips where GPUs or NVSHMEM are missing."""
    if torch.cuda.device_count() < world:
        pytest.skip(f"Needs {world} GPUs; here are {torch.cuda.device_count()}.")
    try:
        Nvshmem()
    except UnsupportedError as error:
        pytest.skip(str(error))
    return run_processes(world, main, *args, **options)
