# SPDX-License-Identifier: Apache-2.0
"""Attention by a plan: stage by stage over NCCL, or after a gather of the rows that are needed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from magi_attention.meta.predict.cost import is_wait_cheaper
from magi_attention.tools.simulate.events import COMPUTE, LINK, NETWORK, Lanes, Outcome
from magi_attention.tools.simulate.kernels import KernelTimes
from magi_attention.tools.simulate.machine import Cluster
from magi_attention.tools.simulate.traffic import PlanWork
from magi_attention.tools.simulate.wire import Wire, share_of_kernel

Floats = NDArray[np.float64]

# ---- stages over NCCL ---------------------------------------------------------------------------------


def staged(work: PlanWork, cluster: Cluster, is_backward: bool, may_wait: bool = True) -> Outcome:
    """A kernel for local keys and one for each stage; with degree 0 one kernel after one fetch, and so for a single
    stage where that is cheaper. Without ``may_wait`` a single stage is always merged (``AttnPolicy.hide_tail_reduce``).

    Beside the attention kernel NCCL's transfers over NVLink are not hidden (they took as much longer as they take, in
    all cells of two GPUs), so they take time of the compute lane. Those over the network are taken for hidden.
    """
    lanes, times, known = Lanes(work.ranks), KernelTimes(work.kind, cluster), cluster.calibration
    latency_s = 2 * known.nccl_latency_s  # of the collective, and of packing and unpacking rows
    wires = [Wire(t, cluster, cluster.nccl, latency_s, cluster.kv_row) for t in work.traffic]
    there = []
    for wire in wires:
        link_end = lanes.run(COMPUTE, 0.0, wire.link, LINK)
        net_end = lanes.run(NETWORK, 0.0, wire.net)
        there.append(np.maximum(*wire.arrived(link_end, net_end)))
    if wires and (work.degree == 0 or (may_wait and waits_for_stage(work, cluster))):
        rows = work.rows + sum(traffic.rows for traffic in work.traffic)
        joined = lanes.run(COMPUTE, there[0], cluster.copy(2 * rows * cluster.kv_row), LINK)  # in one tensor
        lanes.run(COMPUTE, joined, share_of_kernel(times, work, work.pairs, is_backward))
    else:
        _stage_kernels(work, cluster, lanes, times, there, is_backward)
    if is_backward:
        return _return_rows(work, cluster, lanes, cluster.nccl, latency_s)
    return lanes.outcome()


def waits_for_stage(work: PlanWork, cluster: Cluster) -> bool:
    """Whether a single stage is waited for, as ``AttnRuntime`` decides it: by the table of links, whatever the rates of
    ``cluster`` are."""
    if len(work.traffic) != 1:
        return False
    num_bytes, values = int(work.traffic[0].rows.max()) * cluster.kv_row, int(work.rows.max()) * cluster.q_values
    return is_wait_cheaper(num_bytes, values, is_one_host=work.ranks <= cluster.node)


def _stage_kernels(
    work: PlanWork, cluster: Cluster, lanes: Lanes, times: KernelTimes, there: list[Floats], is_backward: bool
) -> None:
    has_stages = (work.near + work.far).sum(axis=1) > 0
    lanes.run(COMPUTE, 0.0, share_of_kernel(times, work, work.local, is_backward))
    for stage, arrival in enumerate(there):
        pairs = work.near[:, stage] + work.far[:, stage]
        merged = np.where(pairs > 0, cluster.merge(1.0) * work.rows, 0.0)  # all rows are written anew
        lanes.run(COMPUTE, arrival, share_of_kernel(times, work, pairs, is_backward) + merged)
    lanes.run(COMPUTE, 0.0, np.where(has_stages, cluster.partial(1.0) * work.rows, 0.0))


def _return_rows(work: PlanWork, cluster: Cluster, lanes: Lanes, rate: float, latency_s: float) -> Outcome:
    """Gradients of remote keys go back; those of all stages but the last travel beside kernels over the network."""
    done = end = lanes.free(COMPUTE)
    for stage, traffic in enumerate(work.traffic, 1):
        back = Wire(traffic, cluster, rate, latency_s, cluster.kv_row)
        added = cluster.copy((traffic.link_out + traffic.net_out) * cluster.kv_row * 5)
        over_net = lanes.run(NETWORK, end * stage / len(work.traffic), back.net)
        done = np.maximum(lanes.run(COMPUTE, 0.0, back.link + added, LINK), over_net)
    return lanes.outcome(done)


# ---- rows first, then one kernel -----------------------------------------------------------------------


def selective_gather(work: PlanWork, cluster: Cluster, is_backward: bool) -> Outcome:
    """torchtitan's selective gather: needed rows are put into place over NVLink or the network by a kernel of their
    own, then one attention kernel runs; the backward puts gradients back into slots that the owners add up."""
    lanes, times, rates = Lanes(work.ranks), KernelTimes(work.kind, cluster), cluster.rates
    there = np.zeros(work.ranks)
    for traffic in work.traffic:
        wire = Wire(traffic, cluster, rates.link_bytes_per_s, rates.link_latency_s, cluster.kv_row)
        link_end, net_end = lanes.run(LINK, 0.0, wire.link), lanes.run(NETWORK, 0.0, wire.net)
        there = np.maximum(*wire.arrived(link_end, net_end))
    lanes.run(COMPUTE, there, share_of_kernel(times, work, work.pairs, is_backward))
    if is_backward:
        return _return_rows(work, cluster, lanes, rates.link_bytes_per_s, rates.link_latency_s)
    return lanes.outcome()
