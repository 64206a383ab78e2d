# SPDX-License-Identifier: Apache-2.0
"""Each test of the API begins and ends without cached keys."""

from __future__ import annotations

import pytest

from magi_attention.api import clear_cache


@pytest.fixture(autouse=True)
def fresh_cache():
    clear_cache()
    yield
    clear_cache()
