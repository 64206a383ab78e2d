# SPDX-License-Identifier: Apache-2.0
"""Where tests of several ranks run: a GPU each, over NCCL; or, where there is one GPU, all on that, over gloo."""

from __future__ import annotations

import pytest
import torch

GPUS = torch.cuda.device_count()
NEEDS_A_GPU = pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
IS_SHARED = GPUS == 1


def places(*worlds: int, shared: tuple[int, ...] = (2,)) -> list:
    """Parameters ``world, backend``: those of ``worlds`` that there are GPUs for, or ``shared`` on the only one."""
    if IS_SHARED:
        return [pytest.param(n, "gloo", id=f"{n} on one GPU") for n in shared]
    return [pytest.param(n, "nccl", id=f"{n} GPUs") for n in worlds if n <= GPUS]
