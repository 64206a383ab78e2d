# SPDX-License-Identifier: Apache-2.0
"""The kernels of an exchange over nodes, compiled for the CPU once for all tests."""

from __future__ import annotations

import pytest
from cpu_verbs import compiled


@pytest.fixture(scope="session")
def library(compile_folder) -> str:
    """Path of the library of ``cpu_verbs``."""
    return compiled(compile_folder)
