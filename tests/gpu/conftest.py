# SPDX-License-Identifier: Apache-2.0
"""GPUs that several processes of pytest-xdist share.

Each process takes one of the GPUs for its tests. A test with the marker ``whole_gpu`` runs while no other one does: it
measures a time, or needs most of the memory. So do all tests that start ranks, whose kernels wait for one another.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

import pytest
import torch

_STARTS_RANKS = ("run_processes", "places", "over_nvshmem")
_MUCH = 1 << 30  # bytes that torch keeps in reserve


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
def _share_of_gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    is_alone = request.node.get_closest_marker("whole_gpu") is not None
    with open(tmp_path_factory.getbasetemp().parent / "gpu.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        yield
        if torch.cuda.is_available() and torch.cuda.memory_reserved() > _MUCH:
            torch.cuda.empty_cache()
