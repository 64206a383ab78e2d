# SPDX-License-Identifier: Apache-2.0
"""Measured rates reach all ranks alike, and plans for other rates are found out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from magi_attention.api import MachineRates, Mask, attend, load_rates, make_plan
from magi_attention.config.rates import keep_rates
from magi_attention.errors import ContractError, PlanMismatchError
from magi_attention.testing.spawn import run_processes

MEASURED = replace(MachineRates(), device="CPU", ranks=2, is_measured=True)
SHAPE = {"num_heads_q": 2, "num_heads_kv": 2, "head_dim": 8}


def on_two_ranks(rank: int, world: int, folder: str) -> list:
    path = Path(folder) / f"{rank}.json"  # each rank has a file of its own, and that of rank 0 counts
    with pytest.raises(ContractError, match=r"0.json has no rates of CPU.*run `magi tune`"):
        load_rates(path=path, device="cpu")
    keep_rates(path, replace(MEASURED, link_latency_s=1e-3 * (rank + 1)))
    rates = load_rates(path=path, device="cpu")
    mask, x = Mask.causal(64), torch.randn(32, 2, 8)
    plan = make_plan(mask, world, rates=rates, **SHAPE)
    out = attend(x, x, x, plan)[0]
    assert plan.with_mask(Mask.full(64)).rates == rates
    other = make_plan(mask, world, rates=replace(rates, link_latency_s=1.0 + rank), **SHAPE)
    with pytest.raises(PlanMismatchError, match="hold different plans"):
        attend(x, x, x, other)
    return [rates, tuple(out.shape)]


def test_all_ranks_get_the_rates_of_rank_0(tmp_path):
    found = run_processes(2, on_two_ranks, str(tmp_path))
    assert found[0] == found[1] and found[0][0].link_latency_s == 1e-3


def test_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("MAGI_ATTENTION_RATES_FILE", str(tmp_path / "x.json"))
    keep_rates(tmp_path / "x.json", MEASURED)
    assert load_rates(device="cpu") == MEASURED
