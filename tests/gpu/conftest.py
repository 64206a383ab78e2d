# SPDX-License-Identifier: Apache-2.0
"""GPUs that several processes of pytest-xdist share, each of which takes one of them for its tests.

A test with the marker ``whole_gpu`` measures a time, or needs most of the memory; `magi test --suite gpu` runs those
after all others, one at a time. So do all tests that start ranks, whose kernels wait for one another.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

_STARTS_RANKS = ("run_processes", "places", "over_nvshmem")
_MUCH = 1 << 30  # bytes that torch keeps in reserve


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(hasattr(getattr(item, "module", None), name) for name in _STARTS_RANKS):
            item.add_marker("whole_gpu")


@pytest.fixture(scope="session", autouse=True)
def _own_gpu() -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and torch.cuda.is_available():
        torch.cuda.set_device(int(worker.removeprefix("gw")) % torch.cuda.device_count())


@pytest.fixture(autouse=True)
def _leave_memory() -> Iterator[None]:
    yield
    is_shared = "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_available()
    if is_shared and torch.cuda.memory_reserved() > _MUCH:
        torch.cuda.empty_cache()
