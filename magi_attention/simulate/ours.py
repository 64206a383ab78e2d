# SPDX-License-Identifier: Apache-2.0
"""Attention by a plan: stage by stage over NCCL, in one launch, or after a gather of the rows that are needed.

Of these, one launch runs within a node only; over several nodes it is what the same kernel would do with rows that a
network puts into the same buffers, for which there is no code yet.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from magi_attention.errors import ContractError
from magi_attention.meta.cost import is_wait_cheaper
from magi_attention.meta.fused_layout import MAX_GROUPS  # that rows of one launch arrive in
from magi_attention.simulate.events import COMPUTE, LINK, NETWORK, Lanes, Outcome
from magi_attention.simulate.kernels import KernelTimes
from magi_attention.simulate.machine import Cluster
from magi_attention.simulate.traffic import PlanWork, Traffic

Floats = NDArray[np.float64]


def _kernel(times: KernelTimes, work: PlanWork, pairs: Floats, is_backward: bool) -> Floats:
    """Seconds of a part of a rank's pairs: its share of the one call that computes them all, on a hot GPU."""
    whole = times.seconds(work.pairs, work.rows, is_backward)
    whole = whole * times.hot(whole)
    return np.divide(pairs, work.pairs, out=np.zeros_like(work.pairs), where=work.pairs > 0) * whole


class _Wire:
    """Seconds that one stage takes on the two kinds of links; ``rate`` in bytes per second in a node."""

    def __init__(self, traffic: Traffic, cluster: Cluster, rate: float, latency_s: float, row_bytes: float) -> None:
        self._traffic = traffic
        net = cluster.network_bytes_per_s
        self.link_out, self.net_out = traffic.link_out * row_bytes / rate, traffic.net_out * row_bytes / net
        link = np.maximum(traffic.link_in * row_bytes / rate, self.link_out)
        net_seconds = np.maximum(traffic.net_in * row_bytes / net, self.net_out)
        self.link = np.where(link > 0, link + latency_s, 0.0)
        self.net = np.where(net_seconds > 0, net_seconds + latency_s + cluster.network_latency_s, 0.0)

    def arrived(self, link_end: Floats, net_end: Floats) -> tuple[Floats, Floats]:
        """When the rows of the node and those of others are there: not before their senders have sent them."""
        by_link, by_net = (self._traffic.slowest_sender(seconds) for seconds in (self.link_out, self.net_out))
        near = np.where(self._traffic.near > 0, np.maximum(link_end, by_link), 0.0)
        far = np.where(self._traffic.far > 0, np.maximum(np.maximum(net_end, link_end), by_net), 0.0)
        return near, far


# ---- one launch ---------------------------------------------------------------------------------------


def one_launch(work: PlanWork, cluster: Cluster, is_backward: bool) -> Outcome:
    """One kernel that waits for rows as they arrive, and takes what is there first; all stages are one.

    A backward kernel begins when all rows are there, and its gradients of others' rows leave from its epilogue.
    """
    lanes, times = Lanes(work.ranks), KernelTimes(work.kind, cluster)
    local = _kernel(times, work, work.local, is_backward)
    near = _kernel(times, work, work.near.sum(axis=1), is_backward)
    far = _kernel(times, work, work.far.sum(axis=1), is_backward)
    link_end = near_there = far_there = np.zeros(work.ranks)
    if (traffic := _only_stage(work)) is not None:
        wire = _Wire(traffic, cluster, cluster.rates.link_bytes_per_s, cluster.rates.link_latency_s, cluster.kv_row)
        link_end, net_end = lanes.run(LINK, 0.0, wire.link), lanes.run(NETWORK, 0.0, wire.net)
        near_there, far_there = wire.arrived(link_end, net_end)
    if is_backward:
        return _backward_launch(work, cluster, lanes, local + near + far, np.maximum(near_there, far_there))
    known = cluster.calibration
    pushing = np.minimum(link_end, local + near + far) * known.put_sms / known.sms
    pieces = [(np.zeros(work.ranks), local + pushing)]
    for group in range(1, MAX_GROUPS + 1):
        share = group / MAX_GROUPS
        pieces += [(near_there * share, near / MAX_GROUPS), (far_there * share, far / MAX_GROUPS)]
    lanes.in_order_of_arrival(pieces)
    return lanes.outcome()


def _backward_launch(work: PlanWork, cluster: Cluster, lanes: Lanes, kernel: Floats, there: Floats) -> Outcome:
    # dout and out are read before, and need no rows of others.
    before = cluster.copy(2 * cluster.q_row) * work.rows
    end = lanes.run(COMPUTE, np.maximum(there - before, 0.0), kernel)
    if (traffic := _only_stage(work)) is None:
        return lanes.outcome()
    rates = cluster.rates
    back = _Wire(traffic, cluster, rates.link_bytes_per_s, rates.link_latency_s, cluster.kv_row)
    begin = end - kernel * (1 - 1 / MAX_GROUPS)
    sent = np.maximum(lanes.run(LINK, begin, back.link), lanes.run(NETWORK, begin, back.net))
    # The last rows leave when the kernel is over, and their owners add what came: 16 bits onto float32.
    sent = np.maximum(sent, end + np.maximum(back.link, back.net) / MAX_GROUPS)
    added = cluster.copy((traffic.link_out + traffic.net_out) * cluster.kv_row * 5)
    return lanes.outcome(sent + added)


def _only_stage(work: PlanWork) -> Traffic | None:
    if len(work.traffic) > 1:
        raise ContractError("One launch takes all remote keys as one stage; make the plan with degree 1.")
    return work.traffic[0] if work.traffic else None


# ---- stages over NCCL ---------------------------------------------------------------------------------


def staged(work: PlanWork, cluster: Cluster, is_backward: bool, may_wait: bool = True) -> Outcome:
    """A kernel for local keys and one for each stage; with degree 0 one kernel after one fetch, and so for a single
    stage where that is cheaper. Without ``may_wait`` a single stage is always merged (``AttnPolicy.hide_tail_reduce``).

    Beside the attention kernel NCCL's transfers over NVLink are not hidden (they took as much longer as they take, in
    all cells of two GPUs), so they take time of the compute lane. Those over the network are taken for hidden.
    """
    lanes, times, known = Lanes(work.ranks), KernelTimes(work.kind, cluster), cluster.calibration
    latency_s = 2 * known.nccl_latency_s  # of the collective, and of packing and unpacking rows
    wires = [_Wire(t, cluster, cluster.nccl, latency_s, cluster.kv_row) for t in work.traffic]
    there = []
    for wire in wires:
        link_end = lanes.run(COMPUTE, 0.0, wire.link, LINK)
        net_end = lanes.run(NETWORK, 0.0, wire.net)
        there.append(np.maximum(*wire.arrived(link_end, net_end)))
    if wires and (work.degree == 0 or (may_wait and waits_for_stage(work, cluster))):
        rows = work.rows + sum(traffic.rows for traffic in work.traffic)
        joined = lanes.run(COMPUTE, there[0], cluster.copy(2 * rows * cluster.kv_row), LINK)  # in one tensor
        lanes.run(COMPUTE, joined, _kernel(times, work, work.pairs, is_backward))
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
    lanes.run(COMPUTE, 0.0, _kernel(times, work, work.local, is_backward))
    for stage, arrival in enumerate(there):
        pairs = work.near[:, stage] + work.far[:, stage]
        merged = np.where(pairs > 0, cluster.merge(1.0) * work.rows, 0.0)  # all rows are written anew
        lanes.run(COMPUTE, arrival, _kernel(times, work, pairs, is_backward) + merged)
    lanes.run(COMPUTE, 0.0, np.where(has_stages, cluster.partial(1.0) * work.rows, 0.0))


def _return_rows(work: PlanWork, cluster: Cluster, lanes: Lanes, rate: float, latency_s: float) -> Outcome:
    """Gradients of remote keys go back; those of all stages but the last travel beside kernels over the network."""
    done = end = lanes.free(COMPUTE)
    for stage, traffic in enumerate(work.traffic, 1):
        back = _Wire(traffic, cluster, rate, latency_s, cluster.kv_row)
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
        wire = _Wire(traffic, cluster, rates.link_bytes_per_s, rates.link_latency_s, cluster.kv_row)
        link_end, net_end = lanes.run(LINK, 0.0, wire.link), lanes.run(NETWORK, 0.0, wire.net)
        there = np.maximum(*wire.arrived(link_end, net_end))
    lanes.run(COMPUTE, there, _kernel(times, work, work.pairs, is_backward))
    if is_backward:
        return _return_rows(work, cluster, lanes, rates.link_bytes_per_s, rates.link_latency_s)
    return lanes.outcome()


__all__ = ["one_launch", "selective_gather", "staged", "waits_for_stage"]
