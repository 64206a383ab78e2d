# SPDX-License-Identifier: Apache-2.0
"""What the rows and the pairs of a plan take on one rank: time of links, and of its share of a kernel."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from magi_attention.tools.simulate.kernels import KernelTimes
from magi_attention.tools.simulate.machine import Cluster
from magi_attention.tools.simulate.traffic import PlanWork, Traffic

Floats = NDArray[np.float64]


def share_of_kernel(times: KernelTimes, work: PlanWork, pairs: Floats, is_backward: bool) -> Floats:
    """Seconds of a part of a rank's pairs: its share of the one call that computes them all, on a hot GPU."""
    whole = times.seconds(work.pairs, work.rows, is_backward)
    whole = whole * times.hot(whole)
    return np.divide(pairs, work.pairs, out=np.zeros_like(work.pairs), where=work.pairs > 0) * whole


class Wire:
    """Seconds that one stage takes on the two kinds of links; ``rate`` in bytes per second in a node."""

    def __init__(self, traffic: Traffic, cluster: Cluster, rate: float, latency_s: float, row_bytes: float) -> None:
        self._traffic = traffic
        net = cluster.network_bytes_per_s
        self.link_out, self.net_out = traffic.link_out * row_bytes / rate, traffic.net_out * row_bytes / net
        link = np.maximum(traffic.link_in * row_bytes / rate, self.link_out)
        net_seconds = np.maximum(traffic.net_in * row_bytes / net, self.net_out)
        self.link = np.where(link > 0, link + latency_s, 0.0)
        self.net = np.where(net_seconds > 0, net_seconds + latency_s + cluster.network_latency_s, 0.0)

    def arrived(self, link_end: Floats, net_end: Floats, begin: Floats | float = 0.0) -> tuple[Floats, Floats]:
        """When the rows of the node and those of others are there: not before their senders, which begin at ``begin``,
        have sent them."""
        by_link, by_net = (self._traffic.slowest_sender(begin + sent) for sent in (self.link_out, self.net_out))
        near = np.where(self._traffic.near > 0, np.maximum(link_end, by_link), 0.0)
        far = np.where(self._traffic.far > 0, np.maximum(np.maximum(net_end, link_end), by_net), 0.0)
        return near, far


def slowest_of_node(seconds: Floats, node: int) -> Floats:
    """For each rank the largest of ``seconds`` over the ranks of its node."""
    latest = np.maximum.reduceat(seconds, np.arange(0, len(seconds), node))
    return np.repeat(latest, node)[: len(seconds)]
