# SPDX-License-Identifier: Apache-2.0
"""Attention by a plan in one launch for each direction: over the NVLink of a node, and over several nodes.

The kernel is the same. In a node each rank puts rows into the buffers of others, and the kernel takes those that are
there. Over several nodes an exchange fills one buffer, whose rows it reports group by group, whatever link they come by
(``docs/design/two_levels.md``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from magi_attention.errors import ContractError
from magi_attention.meta.one_launch.fused_layout import MAX_GROUPS  # that rows arrive in
from magi_attention.tools.simulate.events import COMPUTE, LINK, NETWORK, Lanes, Outcome
from magi_attention.tools.simulate.kernels import KernelTimes
from magi_attention.tools.simulate.machine import Cluster
from magi_attention.tools.simulate.traffic import PlanWork, Traffic
from magi_attention.tools.simulate.wire import Wire, share_of_kernel, slowest_of_node

Floats = NDArray[np.float64]


def one_launch(work: PlanWork, cluster: Cluster, is_backward: bool) -> Outcome:
    """One kernel that waits for rows as they arrive; all stages are one. Over nodes if ``work`` has more than one."""
    if len(work.traffic) > 1:
        raise ContractError("One launch takes all remote keys as one stage; make the plan with degree 1.")
    if not work.traffic:
        lanes, times = Lanes(work.ranks), KernelTimes(work.kind, cluster)
        lanes.run(COMPUTE, 0.0, share_of_kernel(times, work, work.pairs, is_backward))
        return lanes.outcome()
    if work.ranks > cluster.node:
        return _over_nodes(work, work.traffic[0], cluster, is_backward)
    return _over_nvlink(work, work.traffic[0], cluster, is_backward)


# ---- in a node ------------------------------------------------------------------------------------------


def _over_nvlink(work: PlanWork, traffic: Traffic, cluster: Cluster, is_backward: bool) -> Outcome:
    lanes, times, rates = Lanes(work.ranks), KernelTimes(work.kind, cluster), cluster.rates
    local = share_of_kernel(times, work, work.local, is_backward)
    remote = share_of_kernel(times, work, work.near.sum(axis=1), is_backward)
    wire = Wire(traffic, cluster, rates.link_bytes_per_s, rates.link_latency_s, cluster.kv_row)
    put = lanes.run(LINK, 0.0, wire.link)
    there, _ = wire.arrived(put, put)
    if not is_backward:
        _attend(lanes, cluster, local, remote, put, there, cluster.calibration.put_sms)
        return lanes.outcome()
    end = _attend_backward(lanes, work, cluster, local + remote, there)
    begin = end - (local + remote) * (1 - 1 / MAX_GROUPS)
    # Gradients of others' rows leave from the epilogue. The last leave when the kernel is over, and owners add them.
    sent = np.maximum(lanes.run(LINK, begin, wire.link), end + wire.link / MAX_GROUPS)
    return lanes.outcome(sent + _added(cluster, traffic.link_out))


def _attend(
    lanes: Lanes, cluster: Cluster, local: Floats, remote: Floats, put: Floats, there: Floats, sms: int
) -> None:
    """A forward: local pairs, and remote ones in groups, as they arrive; puts have ``sms`` until they are done."""
    pushing = np.minimum(put, local + remote) * sms / cluster.calibration.sms
    pieces = [(np.zeros_like(local), local + pushing)]
    pieces += [(there * group / MAX_GROUPS, remote / MAX_GROUPS) for group in range(1, MAX_GROUPS + 1)]
    lanes.in_order_of_arrival(pieces)


def _attend_backward(lanes: Lanes, work: PlanWork, cluster: Cluster, kernel: Floats, there: Floats) -> Floats:
    """A backward begins when all rows are there. dout and out are read before, and need no rows of others."""
    before = cluster.copy(2 * cluster.q_row) * work.rows
    return lanes.run(COMPUTE, np.maximum(there - before, 0.0), kernel)


def _added(cluster: Cluster, rows: Floats) -> Floats:
    """What it costs an owner to add gradients that came, 16 bits onto float32."""
    added: Floats = cluster.copy(1.0) * rows * cluster.kv_row * 5
    return added


# ---- over several nodes ---------------------------------------------------------------------------------


def _over_nodes(work: PlanWork, traffic: Traffic, cluster: Cluster, is_backward: bool) -> Outcome:
    """A rank puts its own rows, and passes on those that it holds for the node; those that it needs itself it copies.
    Gradients travel back the same way when the kernel is over."""
    lanes, times, rates = Lanes(work.ranks), KernelTimes(work.kind, cluster), cluster.rates
    local = share_of_kernel(times, work, work.local, is_backward)
    remote = share_of_kernel(times, work, (work.near + work.far).sum(axis=1), is_backward)
    wire = Wire(traffic, cluster, rates.link_bytes_per_s, rates.link_latency_s, cluster.kv_row)
    copy_row = cluster.copy(2 * cluster.kv_row)
    kept = copy_row * traffic.carried_own
    # Rows are copied to where puts can send them.
    begin = lanes.run(COMPUTE, 0.0, copy_row * np.minimum(work.rows, traffic.owned_out), LINK)
    held = lanes.run(NETWORK, begin, wire.net)
    put = lanes.run(LINK, begin, wire.link + kept)
    near, far = wire.arrived(put, held, begin)
    # Rows of the last group are passed on when they are held. One signal is for all rows of a group.
    carried = np.maximum(traffic.carried_in, traffic.carried_out) * cluster.kv_row / rates.link_bytes_per_s + kept
    left = np.maximum(put, held + carried / MAX_GROUPS)
    there = np.maximum(near, np.where(far > 0, np.maximum(far, slowest_of_node(left, cluster.node)), 0.0))
    if not is_backward:
        # One CTA more says what has arrived. The epoch ends when all puts have left.
        _attend(lanes, cluster, local, remote, left, there, cluster.calibration.put_sms + 1)
        return lanes.outcome(np.maximum(lanes.free(COMPUTE), left) + rates.link_latency_s)
    end = _attend_backward(lanes, work, cluster, local + remote, there)
    # These kernels run behind that of attention, so they begin as those of any collective do.
    terms = lanes.run(LINK, end + cluster.calibration.nccl_latency_s, wire.link + kept)
    # Carriers read the terms of their node, and each sum crosses the network.
    read = copy_row / 2 * (traffic.carried_out + traffic.carried_own)
    sums = lanes.run(NETWORK, slowest_of_node(terms, cluster.node) + read, wire.net)
    return lanes.outcome(np.maximum(terms, sums) + _added(cluster, traffic.owned_out) + rates.link_latency_s)
