# SPDX-License-Identifier: Apache-2.0
"""Each test of the API begins and ends without cached keys; a group to make some for."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from magi_attention.api import clear_cache


@pytest.fixture(autouse=True)
def fresh_cache():
    clear_cache()
    yield
    clear_cache()


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """A process group of this process alone."""
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
