# SPDX-License-Identifier: Apache-2.0
"""The model: kernels, lanes, ways, and what would have to change."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from magi_attention.common.mask import Mask
from magi_attention.config.rates import BACKWARD_FLOPS, FORWARD_FLOPS, KernelRate, MachineRates
from magi_attention.errors import ContractError
from magi_attention.tools.simulate import OURS, WAYS, Case, Cluster, KernelTimes, answer, estimate, kind_of
from magi_attention.tools.simulate.events import COMPUTE, LINK, Lanes
from magi_attention.tools.simulate.kernels import KINDS, TABLE
from magi_attention.tools.simulate.one_launch import one_launch
from magi_attention.tools.simulate.ours import staged
from magi_attention.tools.simulate.sweeps import least, sweep
from magi_attention.tools.simulate.ways import share_seconds

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
CLUSTER = Cluster()


def varlen(tokens: int) -> Mask:
    cuts = np.unique(np.minimum(np.cumsum([0, *[3000, 700, 9000, 150] * (tokens // 12850 + 1)]), tokens))
    return Mask.varlen(cuts, causal=True)


MASKS = {"causal": Mask.causal, "varlen": varlen, "window": lambda tokens: Mask.sliding_window(tokens, (1023, 0))}


# ---- kernels ------------------------------------------------------------------------------------------


def test_the_table_is_that_of_the_records():
    rates = {}
    for record in ("forward", "backward"):
        for row in json.loads((RESULTS / f"ffa_{record}_h100.json").read_text())["results"]:
            if row["name"] == "magi":
                rates[record, row["mask"], row["seqlen"]] = row["median_us"], row["tflops"]
    for row in json.loads((RESULTS / "ffa_backward_h100_documents.json").read_text())["results"]:
        if row["name"] == "magi":  # several draws: their rates do not tell the pairs
            rates["backward", row["mask"], row["seqlen"]] = row["median_us"], None
    for call in TABLE:
        for record, us, pairs, flops in (
            ("forward", call.forward_us, call.forward_pairs, FORWARD_FLOPS),
            ("backward", call.backward_us, call.backward_pairs, BACKWARD_FLOPS),
        ):
            wanted, tflops = rates[record, call.kind, call.tokens]
            assert us == pytest.approx(wanted, abs=0.06)
            if tflops is not None:
                assert flops * pairs * 64 * 128 / us / 1e6 == pytest.approx(tflops, rel=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_of_the_table_takes_what_it_took(kind):
    known = replace(CLUSTER.calibration, forward_pace=1.0)
    times, today = (KernelTimes(kind, cluster) for cluster in (replace(CLUSTER, calibration=known), CLUSTER))
    for call in (call for call in TABLE if call.kind == kind):
        for pairs, us, is_backward in (
            (call.forward_pairs, call.forward_us, False), (call.backward_pairs, call.backward_us, True),
        ):  # fmt: skip
            assert times.seconds(pairs, call.tokens, is_backward) == pytest.approx(us / 1e6)
            assert times.seconds(pairs, call.tokens, is_backward, 0.25) == pytest.approx(us / 4e6)
            assert times.seconds(2 * pairs, call.tokens, is_backward) > us / 1e6
            pace = 1.0 if is_backward else CLUSTER.calibration.forward_pace
            assert today.seconds(pairs, call.tokens, is_backward) * pace == pytest.approx(us / 1e6)
    assert times.seconds(0.0, 0.0, False) == 0
    assert times.hot(1e-3) == 1 and times.hot(1.0) == pytest.approx(1 / CLUSTER.calibration.hot_pace)


def test_rates_of_a_machine_scale_kernels():
    """A machine that was measured at half of the table's pace under a causal mask takes twice as long."""
    call = next(call for call in TABLE if call.kind == "causal" and call.tokens == 4096)
    pace = [
        flops * pairs * 64 * 128 / us * 1e6 / 2
        for flops, pairs, us in (
            (FORWARD_FLOPS, call.forward_pairs, call.forward_us),
            (BACKWARD_FLOPS, call.backward_pairs, call.backward_us),
        )
    ]
    rates = MachineRates("other", kernels=(KernelRate(64, 8, 128, 4096, *pace),), is_measured=True)
    known = replace(CLUSTER.calibration, forward_pace=1.0)  # which is of no importance to what was measured
    for is_backward in (False, True):
        clusters = replace(CLUSTER, rates=rates), replace(CLUSTER, calibration=known)
        mine, table = (KernelTimes("full", cluster).seconds(1e9, 1e4, is_backward) for cluster in clusters)
        assert mine == pytest.approx(2 * table)


def test_kinds_of_masks():
    masks = {
        "full": Mask.full(64), "causal": Mask.causal(64), "varlen_full": Mask.varlen([0, 10, 64]),
        "varlen_causal": Mask.varlen([0, 10, 64], causal=True),
        "sliding_window_causal": Mask.sliding_window(64, (7, 0)),
    }  # fmt: skip
    assert {kind: kind_of(mask.slices.array) for kind, mask in masks.items()} == {kind: kind for kind in KINDS}


# ---- lanes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_what_arrives_first_is_done_first(seed):
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    work = [(rng.uniform(0, 4, 3), rng.uniform(0.1, 1, 3)) for _ in range(5)]
    lanes = Lanes(3)
    found = lanes.in_order_of_arrival(work)
    for rank in range(3):
        clock = 0.0
        for arrival, seconds in sorted((float(a[rank]), float(s[rank])) for a, s in work):
            clock = max(clock, arrival) + seconds
        assert found[rank] == pytest.approx(clock)
    outcome = lanes.outcome()
    assert outcome.seconds == found.max() and outcome.busy[COMPUTE] == pytest.approx(sum(s for _, s in work))


def test_nothing_waits_for_what_takes_no_time():
    lanes = Lanes(2)
    lanes.run(COMPUTE, 0.0, 1.0)
    assert lanes.run(COMPUTE, 5.0, np.array([0.0, 1.0])).tolist() == [5.0, 6.0]
    assert lanes.free(COMPUTE).tolist() == [1.0, 6.0]
    lanes.run(COMPUTE, 0.0, 2.0, LINK)
    outcome = lanes.outcome()
    assert outcome.ends.tolist() == [3.0, 8.0] and outcome.exposed == pytest.approx(6.0)


# ---- ways ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("levels", ["two", "flat"])
def test_ways_over_nodes(name, levels):
    """No way is faster than the heaviest rank's kernels, and a faster network makes none slower."""
    cluster = replace(CLUSTER, levels=levels)
    case = Case(MASKS[name](2048 * 16), 16, cluster)
    work, times = case.plan_work(1), KernelTimes(case.kind, cluster)
    for way in WAYS:
        slow, now, fast = (
            estimate(way, case, replace(cluster, network_bytes_per_s=rate)) for rate in (5e9, 50e9, 5e12)
        )  # fmt: skip
        if way == "ulysses":
            assert "do not divide over 16 ranks" in now.reason
            continue
        assert slow.efficiency <= now.efficiency <= fast.efficiency
        assert now.exposed_ms >= 0 and now.tflops > 0
        if way in OURS:
            least_ms = times.seconds(work.pairs, work.rows, False).max() * 1e3
            assert fast.forward_ms >= least_ms * (1 - 1e-9)


@pytest.mark.parametrize("node", [4, 16])
@pytest.mark.parametrize("name", MASKS)
def test_without_links_to_wait_for_one_launch_is_its_kernel(name, node):
    """All that is left of one launch with endless links is the heaviest rank, hot or not, and over several nodes copies
    on the GPU: here they take no time either, nor have CTAs anything to put."""
    rates = MachineRates(link_bytes_per_s=1e18, link_latency_s=0.0)
    known = replace(CLUSTER.calibration, copy_bytes_per_s=1e18, nccl_latency_s=0.0)
    cluster = Cluster(node, 1e18, 0.0, rates=rates, calibration=known)
    case = Case(MASKS[name](2048 * 16), 16, cluster)
    work, times = case.plan_work(1), KernelTimes(case.kind, cluster)
    for is_backward in (False, True):
        kernel = times.seconds(work.pairs, work.rows, is_backward)
        found = WAYS["one launch"](case, cluster, is_backward)
        assert found.seconds == pytest.approx((kernel * times.hot(kernel)).max())


@pytest.mark.parametrize("name", MASKS)
def test_one_launch_on_one_node_is_that_over_nvlink(name):
    """No node is so large, and no network so slow, that it matters when all ranks are on one."""
    case = Case(MASKS[name](2048 * 8), 8, CLUSTER)
    for is_backward in (False, True):
        on_one = WAYS["one launch"](case, CLUSTER, is_backward).ends
        for other in (replace(CLUSTER, node=64), replace(CLUSTER, network_bytes_per_s=1e3, network_latency_s=1.0)):
            work = Case(case.mask, 8, other).plan_work(1)
            assert one_launch(work, other, is_backward).ends == pytest.approx(on_one)


def test_one_launch_over_nodes_does_not_wait_for_a_network_that_it_does_not_use():
    """A document of each node, so that nothing crosses: a network of no speed changes nothing."""
    mask = Mask.varlen(np.arange(0, 2048 * 16 + 1, 2048 * 8), causal=True)
    work = Case(mask, 16, CLUSTER).plan_work(1, is_sequential=True)
    assert not work.traffic[0].far.any() and work.traffic[0].near.any()
    none = replace(CLUSTER, network_bytes_per_s=1.0, network_latency_s=1e3)
    for is_backward in (False, True):
        found, slow = (one_launch(work, cluster, is_backward).ends for cluster in (CLUSTER, none))
        assert found == pytest.approx(slow)


@pytest.mark.parametrize("seed", range(8))
def test_one_launch_over_nodes_is_never_slower_on_faster_links(seed):
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    node, ranks, tokens = int(rng.choice([1, 2, 4, 8])), 16, int(rng.choice([512, 2048, 8192]))
    cluster = replace(CLUSTER, node=node, levels=str(rng.choice(["two", "flat"])))
    case = Case(MASKS[str(rng.choice(list(MASKS)))](tokens * ranks), ranks, cluster)

    def seconds(link: float, network: float, latency_s: float) -> list[float]:
        rates = MachineRates(link_bytes_per_s=link, link_latency_s=latency_s)
        known = replace(cluster.calibration, nccl_latency_s=latency_s)
        changed = replace(
            cluster, network_bytes_per_s=network, network_latency_s=latency_s, rates=rates, calibration=known
        )
        return [WAYS["one launch"](case, changed, is_backward).seconds for is_backward in (False, True)]

    link, network, latency_s = 10 ** rng.uniform(9, 12), 10 ** rng.uniform(9, 12), 10 ** rng.uniform(-6, -3)
    now = seconds(link, network, latency_s)
    for faster in ((2 * link, network, latency_s), (link, 2 * network, latency_s), (link, network, latency_s / 2)):
        assert all(one <= before * (1 + 1e-12) for one, before in zip(seconds(*faster), now))


@pytest.mark.parametrize("name", MASKS)
def test_over_nodes_a_backward_sends_behind_its_kernel_and_a_forward_beside_it(name):
    slow = replace(CLUSTER, network_bytes_per_s=10e9)
    case = Case(MASKS[name](4096 * 32), 32, slow)
    work, times = case.plan_work(1), KernelTimes(case.kind, slow)
    (traffic,) = work.traffic
    kernels = [times.seconds(work.pairs, work.rows, is_backward) for is_backward in (False, True)]
    kernels = [kernel * times.hot(kernel) for kernel in kernels]
    net = np.maximum(traffic.net_in, traffic.net_out) * slow.kv_row / slow.network_bytes_per_s
    forward, backward = (WAYS["one launch"](case, slow, is_backward) for is_backward in (False, True))
    assert (backward.ends >= kernels[1] + net).all()
    assert (forward.ends >= np.maximum(kernels[0], net)).all()


def test_puts_of_a_forward_take_multiprocessors():
    """One launch over nodes whose kernel is long enough to hide all that travels: what is left are puts and copies."""
    case = Case(Mask.causal(16384 * 16), 16, CLUSTER)
    now = WAYS["one launch"](case, CLUSTER, False).seconds
    fewer = replace(CLUSTER, calibration=replace(CLUSTER.calibration, put_sms=1))
    work, times = case.plan_work(1), KernelTimes(case.kind, CLUSTER)
    kernel = times.seconds(work.pairs, work.rows, False)
    assert (kernel * times.hot(kernel)).max() < WAYS["one launch"](case, fewer, False).seconds < now


def test_two_levels_cross_the_network_less_and_are_no_slower_where_it_is_slow():
    slow = replace(CLUSTER, network_bytes_per_s=2e9)
    two, flat = (Case(Mask.causal(2048 * 32), 32, replace(slow, levels=levels)) for levels in ("two", "flat"))
    assert two.plan_work(1).traffic[0].net_in.sum() < flat.plan_work(1).traffic[0].net_in.sum()
    for way in ("one launch", "one stage", "all-gather"):
        assert estimate(way, two).efficiency > estimate(way, flat).efficiency


@pytest.mark.parametrize(("name", "ranks", "waits"), [("window", 16, True), ("causal", 2, True), ("causal", 16, False)])
def test_one_stage_is_waited_for_or_merged(name, ranks, waits):
    case = Case(MASKS[name](4096 * ranks), ranks, CLUSTER)
    for is_backward in (False, True):
        one = WAYS["one stage"](case, CLUSTER, is_backward).seconds
        merged = staged(case.plan_work(1), CLUSTER, is_backward, may_wait=False).seconds
        waited = WAYS["fetch, then attend"](case, CLUSTER, is_backward).seconds
        assert merged != waited and one == (waited if waits else merged)


def test_one_gpu_has_nothing_to_wait_for():
    case = Case(Mask.causal(4096), 1, CLUSTER)
    for way in ("one launch", "fetch, then attend"):
        assert WAYS[way](case, CLUSTER, False).seconds == pytest.approx(share_seconds(case, CLUSTER, False))


def test_all_gather_says_that_keys_do_not_fit():
    case = Case(Mask.causal(8192 * 64), 64, replace(CLUSTER, memory_bytes=1e9))
    assert "2 GB" in estimate("all-gather", case).reason


@pytest.mark.parametrize("wrong", [{"levels": "three"}, {"node": 0}, {"network_bytes_per_s": 0.0}, {"heads_kv": 7}])
def test_a_cluster_that_cannot_be(wrong):
    with pytest.raises(ContractError):
        Cluster(**wrong)


# ---- what would have to change ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_bisection_finds_the_least(seed):
    print(f"seed {seed}")
    wanted = float(np.random.default_rng(seed).uniform(2, 1e5))
    assert least(lambda x: min(x / wanted, 2.0), 1.0, 1.0, 1e6) == pytest.approx(wanted, rel=0.01)
    assert least(lambda x: 0.0, 1.0, 1.0, 1e6) is None and least(lambda x: 1.0, 1.0, 3.0, 1e6) == 3.0


@pytest.mark.parametrize("name", MASKS)
def test_answers_hold_in_the_model(name):
    case = Case(MASKS[name](2048 * 32), 32, CLUSTER)
    found = answer("one launch", case, MASKS[name], 0.8)
    assert found.network_is_used and found.efficiency <= found.endless
    assert found.even >= found.efficiency * (1 - 1e-9)
    if found.network_bytes_per_s is not None:
        at = replace(CLUSTER, network_bytes_per_s=found.network_bytes_per_s)
        below = replace(CLUSTER, network_bytes_per_s=found.network_bytes_per_s * 0.97)
        assert estimate("one launch", case, at).efficiency >= 0.8 > estimate("one launch", case, below).efficiency
    else:
        assert found.endless < 0.8
    if found.tokens_per_gpu is not None:
        more = Case(MASKS[name](found.tokens_per_gpu * 32), 32, CLUSTER)
        assert found.tokens_per_gpu > 2048 and estimate("one launch", more).efficiency >= 0.8


def test_a_sweep_has_every_way_of_every_size():
    found = [(one.ranks, one.way) for _, one in sweep(Mask.causal, (2, 16), 1024, CLUSTER)]
    assert found == [(ranks, way) for ranks in (2, 16) for way in WAYS]
