# SPDX-License-Identifier: Apache-2.0
"""The kernels of the device tile planner, compiled for the CPU: their plans pass the walker and equal the host's."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from hopper_library import hopper_library

from magi_attention.native.planner.tile_plan import TilePlan, plan_words
from magi_attention.testing import masks

pytestmark = pytest.mark.usefixtures("planner")


@pytest.fixture(scope="module")
def kernels(compile_folder) -> ctypes.CDLL:
    library = hopper_library(compile_folder / "plan", Path(__file__).with_name("plan_on_cpu.cpp"))
    library.plan_tiles_on_cpu.restype = ctypes.c_char_p
    return library


def on_device(kernels: ctypes.CDLL, rows: np.ndarray, tq: int, tk: int, tile: int, groups: int, seed: int) -> TilePlan:
    """Room for a record of each slice in each tile; the header is zero, as the launcher leaves it."""
    room = len(rows) * -(-tq // tile)
    raw = np.zeros(plan_words(tq, tile, room) + 4, dtype=np.int32)
    words = raw[(-raw.ctypes.data % 16) // 4 :][: len(raw) - 4]
    parts = [np.ascontiguousarray(x, dtype=np.int32) for x in (rows[:, :2], rows[:, 2:4], rows[:, 4])]
    at = [ctypes.c_void_p(x.ctypes.data) for x in parts]
    error = kernels.plan_tiles_on_cpu(
        *at, len(rows), tq, tk, tile, groups, ctypes.c_void_p(words.ctypes.data), len(words), seed
    )
    assert error is None, error.decode()
    return TilePlan(words)


@pytest.mark.parametrize("tile, groups", [(24, 3), (16, 2), (128, 2), (5, 3)])
@pytest.mark.parametrize("seed", range(6))
def test_random_masks(kernels, seed, tile, groups):
    rng = np.random.default_rng(seed)
    tq, tk = (int(n) for n in rng.integers(1, 500, 2))
    slices = masks.random_slices(rng, tq, tk, max_slices=int(rng.integers(1, 40)))
    rows = np.ascontiguousarray(getattr(slices, "array", slices), dtype=np.int32).reshape(-1, 5)
    plan = on_device(kernels, rows, tq, tk, tile, groups, seed)
    plan.check(rows)
    host = TilePlan.build(rows, tq, tk, tile, groups)
    assert np.array_equal(np.delete(plan.tiles, 2, axis=1), np.delete(host.tiles, 2, axis=1)), f"{seed=}"
    assert list(plan.header.num_key_blocks) == list(host.header.num_key_blocks), f"{seed=}"
    assert np.array_equal(plan.order, host.order) and plan.header.has_unseen == host.header.has_unseen, f"{seed=}"
