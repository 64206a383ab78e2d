# SPDX-License-Identifier: Apache-2.0
"""GPUs that several processes of pytest-xdist share, each of which takes one of them for its tests.

A test with the marker ``whole_gpu`` measures a time, or needs most of the memory; `magi test --suite gpu` runs those
after all others, one at a time. So do all tests that start ranks, whose kernels wait for one another.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch

_STARTS_RANKS = {"run_processes", "over_nvshmem"}
_MUCH = 1 << 30  # bytes that torch keeps in reserve


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") is None:
            continue
        fixtures = getattr(item, "_fixtureinfo", None)
        defined = fixtures.name2fixturedefs.values() if fixtures else ()
        functions = [getattr(item, "function", None), *(d.func for found in defined for d in found)]
        if any(starts_ranks(function, set()) for function in functions):
            item.add_marker("whole_gpu")


def starts_ranks(function: Any, seen: set[FunctionType]) -> bool:
    """Whether ``function``, or a function of its file that it names, names one of ``_STARTS_RANKS``."""
    function = inspect.unwrap(function) if callable(function) else function
    if not isinstance(function, FunctionType) or function in seen:
        return False
    seen.add(function)
    names = names_in(function.__code__)
    called = [function.__globals__.get(name) for name in names]
    here = [f for f in called if getattr(f, "__module__", None) == function.__module__]
    return bool(names & _STARTS_RANKS) or any(starts_ranks(f, seen) for f in here)


def names_in(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(names_in(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


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
