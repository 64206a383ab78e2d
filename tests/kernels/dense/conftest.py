# SPDX-License-Identifier: Apache-2.0
"""The kernels of a test's ``SOURCE`` on the CPU."""

from __future__ import annotations

import pytest
from hopper_library import hopper_library, hopper_on_cpu


@pytest.fixture(scope="module")
def library(request, compile_folder):
    source = request.module.SOURCE
    return hopper_library(compile_folder / source.stem.removesuffix("_on_cpu"), source)


@pytest.fixture
def hopper(library):
    with hopper_on_cpu(library) as device:
        yield device
