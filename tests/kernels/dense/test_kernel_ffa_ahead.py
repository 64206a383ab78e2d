# SPDX-License-Identifier: Apache-2.0
"""Tile plans and schedules that were made before the call: the call finds all of them, and makes none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ffa_simulator import CpuRuntime, Simulator

from magi_attention.common.slices import SliceTable
from magi_attention.kernels.ffa import schedule as schedule_module
from magi_attention.kernels.ffa.ahead import kept_tables, take_tables
from magi_attention.kernels.ffa.backend import FfaBackend
from magi_attention.kernels.types import AttnOptions, BackwardOperands, Operands
from magi_attention.native.planner.tile_plan import TilePlan
from magi_attention.testing.masks import random_slices


def refuse(*args, **kwargs):
    raise AssertionError("made anew, though it was made ahead")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_call_makes_nothing_that_was_made_ahead(seed, deterministic, monkeypatch):
    rng = np.random.default_rng(seed)
    rows = random_slices(rng, 70, 90, drop=0.0)
    options = AttnOptions(0.25, deterministic=deterministic)
    ffa = FfaBackend(Simulator(), CpuRuntime())
    q, k, v = (torch.randn(n, h, 16, dtype=torch.bfloat16) for n, h in ((70, 4), (90, 2), (90, 2)))
    want = ffa.forward_final(Operands(q, k, v, SliceTable(rows), options))

    other_process, slices = SliceTable(rows), SliceTable(rows)
    kernels = ffa.tiles(-1, q.dtype, (4, 2), (16, 16), options)
    kernels.make(other_process, 70, 90, 90)
    take_tables([(slices, *rest) for _, *rest in kept_tables(other_process)])
    for owner, name in ((TilePlan, "build"), (schedule_module, "_choose")):
        monkeypatch.setattr(owner, name, refuse)
    out, lse, _ = ffa.forward_final(Operands(q, k, v, slices, options))
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
    ffa.backward_final(BackwardOperands(torch.ones_like(out), q, k, v, out, lse, slices, options))
    with pytest.raises(AssertionError, match="made anew"):
        ffa.forward_final(Operands(q, k, v, SliceTable(rows), options))
