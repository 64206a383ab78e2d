# SPDX-License-Identifier: Apache-2.0
"""Oracles, also those of GPU tests, and harnesses are found by all tests of kernels; fixtures of those that call the
public function on simulated kernels."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent / name) for name in ("oracles", "harness", "../gpu")]
from ffa_simulator import public_backend  # noqa: E402
from known_case import KNOWN, Case  # noqa: E402

from magi_attention.testing.libraries import host_or_skip, planner_or_skip  # noqa: E402


@pytest.fixture(scope="session")
def planner() -> None:
    """The planner library, built where it can be."""
    planner_or_skip()


@pytest.fixture(scope="session")
def host_libraries(planner) -> None:
    host_or_skip()


@pytest.fixture
def public(host_libraries, monkeypatch):
    """``flex_flash_attn_func`` on the simulated kernels; gives the backend and the simulator."""
    yield public_backend(monkeypatch)
    KNOWN.forget()


@pytest.fixture
def case(public):
    made = Case(public[1])
    assert made.find() is not None
    return made
