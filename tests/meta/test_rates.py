# SPDX-License-Identifier: Apache-2.0
"""Rates of a machine: their file, what of a plan they decide, and the times that are predicted from them."""

from __future__ import annotations

import pickle
from dataclasses import asdict, replace

import numpy as np
import pytest

from magi_attention.common.mask import Mask
from magi_attention.config import DispatchConfig, DistAttnConfig, LocalityDispatchAlg, MinHeapDispatchAlg, OverlapConfig
from magi_attention.config.rates import (
    KernelRate,
    MachineRates,
    find_rates,
    keep_rates,
    rates_file,
    read_rates,
)
from magi_attention.errors import ContractError
from magi_attention.meta import PlanOptions, build_plan
from magi_attention.meta.predict.budget import layer_times
from magi_attention.meta.predict.cost import stage_areas

FAST = MachineRates()
HEADS = {"num_heads_q": 64, "num_heads_kv": 8, "head_dim": 128}
DYNAMIC = DistAttnConfig(overlap_config=OverlapConfig(mode="dynamic"))
LOCALITY = DistAttnConfig(DispatchConfig(alg=LocalityDispatchAlg()))
HEAP = DistAttnConfig(DispatchConfig(alg=MinHeapDispatchAlg()))


def slower(factor: float) -> MachineRates:
    return replace(FAST, link_bytes_per_s=FAST.link_bytes_per_s / factor)


def plan_of(mask: Mask, ranks: int, config=None, rates=None, **options):
    return build_plan(
        mask.slices, mask.total_q, ranks, PlanOptions(**HEADS, rates=rates, **options), config=config
    )


def random_documents(seed: int, total: int, causal: bool = True) -> Mask:
    ends = np.random.default_rng(seed).integers(1, total, 20).tolist()
    return Mask.varlen(sorted({0, total, *ends}), causal=causal)


# ---- the file -----------------------------------------------------------------------------------------


def test_a_file_gives_back_what_was_kept(tmp_path):
    path = tmp_path / "below" / "rates.json"
    assert read_rates(path) == []
    others = [replace(FAST, device=device, ranks=ranks) for device in ("CPU", "GPU") for ranks in (2, 4, 8)]
    for entry in (*others, replace(others[0], link_latency_s=0.5), replace(FAST, device="GPU", version="0.0")):
        keep_rates(path, entry)
    entries = read_rates(path)
    assert len(entries) == 7 and [*path.parent.iterdir()] == [path]
    assert find_rates(entries, "CPU", 2) == replace(others[0], link_latency_s=0.5)
    for ranks, nearest in ((1, 2), (3, 4), (4, 4), (6, 8), (64, 8)):
        assert find_rates(entries, "GPU", ranks).ranks == nearest
    assert find_rates(entries, "H100", 2) is None
    assert find_rates([replace(FAST, version="0.0")], FAST.device, 8) is None, "of another version"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"machines": [{}]}', '{"machines": [{"kernels": [], "x": 1}]}'])
def test_other_files_are_refused(text, tmp_path):
    path = tmp_path / "rates.json"
    path.write_text(text)
    with pytest.raises(ContractError, match="rates"):
        read_rates(path)


def test_where_the_file_is(tmp_path, monkeypatch):
    monkeypatch.setenv("MAGI_ATTENTION_WORKSPACE_BASE", str(tmp_path))
    assert rates_file() == tmp_path / ".cache" / "magi_attention" / "rates.json"
    monkeypatch.setenv("MAGI_ATTENTION_RATES_FILE", str(tmp_path / "x.json"))
    assert rates_file() == tmp_path / "x.json"


def test_rates_are_values():
    assert pickle.loads(pickle.dumps(FAST)) == FAST == MachineRates.from_dict(asdict(FAST))
    assert hash(FAST) == hash(MachineRates())
    for wrong in ({"kernels": ()}, {"link_bytes_per_s": 0}, {"link_latency_s": -1e-6}):
        with pytest.raises(ContractError, match="must be positive"):
            replace(FAST, **wrong)


def test_the_nearest_shape():
    shapes = [(64, 8, 128, 1024), (64, 8, 128, 8192), (32, 32, 128, 8192), (32, 32, 64, 8192)]
    rates = replace(FAST, kernels=tuple(KernelRate(*shape, 1e12, 1e12) for shape in shapes))
    for wanted, found in (
        ((64, 8, 128, None), 1), ((64, 8, 128, 900), 0), ((16, 2, 128, 6000), 1), ((8, 8, 128, None), 2),
        ((64, 8, 64, None), 3), ((64, 8, 96, None), 1),
    ):  # fmt: skip
        assert rates.kernel(*wanted) == rates.kernels[found], wanted


# ---- what they decide ---------------------------------------------------------------------------------


def test_a_plan_without_rates_follows_none():
    mask = random_documents(0, 8192)
    plan = plan_of(mask, 4, DYNAMIC)
    assert plan.rates is None and plan.overlap == DYNAMIC.overlap_config


@pytest.mark.parametrize("seed", range(4))
def test_a_slow_link_asks_for_more_stages(seed):
    print(f"seed {seed}")
    mask = random_documents(seed, 32_768)
    plans = [plan_of(mask, 8, DYNAMIC, slower(factor)) for factor in (1e-6, 8)]
    assert plans[0].degree == 1 < plans[1].degree
    one = plan_of(mask, 8)
    times = [sum(t["seconds"] for t in layer_times(plan, slower(8), 2)) for plan in (one, plans[1])]
    assert times[1] < times[0]


@pytest.mark.parametrize("seed", range(4))
def test_a_slow_link_asks_for_fewer_rows(seed):
    print(f"seed {seed}")
    mask = random_documents(seed, 32_768)
    rows = [int(plan_of(mask, 8, LOCALITY, slower(factor)).comm_matrix().sum()) for factor in (1e-6, 1, 100)]
    assert rows[2] <= rows[1] <= rows[0]


def test_what_a_row_costs():
    """By hand: a row of 8 kv heads of dim 128 moves 6 * 1,024 values of 2 bytes; a pair costs 14 * 8,192 operations."""
    rates = replace(FAST, kernels=(KernelRate(64, 8, 128, 1024, 1e12, 1e12),), link_bytes_per_s=1e9)
    config = rates.config(LOCALITY, 64, 8, 128)
    row, pair = 6 * 1024 * 2 / 1e9, 14 * 8192 / 1e12
    assert config.dispatch_config.alg.row_cost == pytest.approx(row / pair)
    assert config.overlap_config.comm_cost_factor == pytest.approx(row * 1e6)
    assert config.overlap_config.calc_cost_factor == pytest.approx(pair * 1e6)
    assert rates.config(None, 64, 8, 128).dispatch_config == config.dispatch_config
    assert rates.config(HEAP, 64, 8, 128).dispatch_config == HEAP.dispatch_config


@pytest.mark.parametrize(
    "config",
    [
        DistAttnConfig(overlap_config=OverlapConfig(calc_cost_factor=2.0)),
        DistAttnConfig(DispatchConfig(alg=LocalityDispatchAlg(row_cost=7.0))),
    ],
)
def test_two_that_say_the_same(config):
    with pytest.raises(ContractError, match="and rates= says the same; drop one of them"):
        plan_of(Mask.causal(1024), 2, config, FAST)


def test_queries_move_by_themselves_where_that_saves_time():
    mask = Mask.causal(16_384)
    plans = {factor: plan_of(mask, 16, HEAP, rates=slower(factor), query_moves="auto") for factor in (1e-6, 100)}
    assert plans[1e-6].assigned is None, "what travels costs nothing"
    assert plans[100].assigned is not None
    always = plan_of(mask, 16, HEAP, query_moves="always")
    assert always.comm_matrix().sum() == plans[100].comm_matrix().sum()


def test_plans_for_other_rates_are_not_equal():
    mask = random_documents(1, 4096)
    plans = [plan_of(mask, 2, rates=rates) for rates in (None, FAST, slower(2), FAST)]
    assert plans[1] == plans[3] and len({plan.fingerprint for plan in plans}) == 3
    copied = pickle.loads(pickle.dumps(plans[2]))
    assert copied == plans[2] and copied.rates == slower(2)


# ---- times --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_times_of_a_layer(seed):
    print(f"seed {seed}")
    mask, degree = random_documents(seed, 8192), seed
    plan = plan_of(mask, 4, DistAttnConfig(overlap_config=OverlapConfig(degree=degree)))
    free = replace(FAST, link_bytes_per_s=1e30, link_latency_s=0.0)
    busiest = int(stage_areas(plan).sum(axis=1).max())
    for i, (time, at_a_price) in enumerate(zip(layer_times(plan, free, 2), layer_times(plan, slower(4), 2))):
        rate, flops = ((728e12, 4), (599e12, 10))[i]
        assert time["compute_s"] == pytest.approx(busiest * flops * 64 * 128 / rate)
        assert time["seconds"] == pytest.approx(time["compute_s"]) and time["exposed_s"] == pytest.approx(0, abs=1e-12)
        assert at_a_price["seconds"] > time["seconds"] and at_a_price["exposed_s"] > 0
        received = plan.comm_matrix().sum(axis=0).max() * 2 * 8 * 128 * 2
        assert time["received_bytes"] == received * (1 + i)


def test_one_rank_exposes_nothing():
    for time in layer_times(plan_of(Mask.causal(512), 1), FAST, 2):
        assert time["exposed_s"] == 0 and time["received_bytes"] == 0 and time["seconds"] > 0
