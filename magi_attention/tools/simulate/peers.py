# SPDX-License-Identifier: Apache-2.0
"""Ring attention, all-gather, Ulysses and USP, as benchmarks/cp_*.py run them, with our attention kernel.

NCCL's transfers over NVLink take time of the compute lane, as in ``ours.staged``; those over the network do not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from magi_attention.errors import UnsupportedError
from magi_attention.tools.simulate.events import COMPUTE, LINK, NETWORK, Lanes, Outcome
from magi_attention.tools.simulate.kernels import KernelTimes
from magi_attention.tools.simulate.machine import Cluster
from magi_attention.tools.simulate.spread import Spread

Floats = NDArray[np.float64]
Crosses = NDArray[np.bool_]
_GRADIENT = 2  # bytes of a gradient that travels round the ring beside one of bf16: float32


def ring(where: Spread, cluster: Cluster, is_backward: bool, inner: int = 1) -> Outcome:
    """Keys go round, a rank at a time; those that come from another node cross the network.

    With ``inner`` ranks that exchange tokens for heads and are one part of ``where`` it is USP: each of them goes round
    with its share of the heads.
    """
    lanes = Lanes(where.parts)
    first = np.arange(where.parts) * inner
    crosses = (first % cluster.node == 0) & (where.parts * inner > cluster.node)
    _exchange(lanes, cluster, inner, where.rows / inner, is_backward, True)
    _ring(lanes, where, cluster, is_backward, crosses, inner)
    _exchange(lanes, cluster, inner, where.rows / inner, is_backward, False)
    return lanes.outcome()


def _ring(lanes: Lanes, where: Spread, cluster: Cluster, is_backward: bool, crosses: Crosses, inner: int) -> None:
    times, steps, rows = KernelTimes(where.kind, cluster), where.parts, where.rows
    share, latency_s = 1 / inner, cluster.calibration.nccl_latency_s
    kv = rows * share * cluster.kv_row
    sizes = [kv, kv * _GRADIENT] if is_backward else [kv]
    whole = times.seconds(where.pairs / steps, rows, is_backward, share)
    hot = float(times.hot(whole))
    lanes.run(COMPUTE, 0.0, cluster.copy(2 * kv), LINK)  # k and v in one tensor
    arrived = np.zeros(steps)
    for step in range(steps):
        pairs = where.pairs_of_step(step)
        part = pairs * steps / max(where.pairs, 1)
        # The first call has nothing to add to in the forward; a backward adds from the first call on.
        adds = cluster.merge(rows * share) * (pairs > 0) * (1.0 if step or is_backward else 0.0)
        added_keys = 8 * kv / cluster.element_bytes / cluster.calibration.merge_bytes_per_s if is_backward else 0.0
        kernel = times.seconds(pairs, rows * part, is_backward, share) * hot + adds + added_keys * (pairs > 0)
        begin = np.maximum(lanes.free(COMPUTE), arrived)
        lanes.run(COMPUTE, arrived, kernel)
        sent = [size for place, size in enumerate(sizes) if step + 1 < steps or (place and steps > 1)]
        if not sent:
            continue
        link = sum(sent) / cluster.nccl + latency_s * len(sent)
        net = sum(sent) / cluster.network_bytes_per_s + latency_s * len(sent) + cluster.network_latency_s
        # A rank gets what the one before it sends, when both have come to this step.
        begin = np.maximum(begin, np.roll(begin, 1))
        over_net = lanes.run(NETWORK, begin, np.where(crosses, net, 0.0))
        lanes.run(COMPUTE, 0.0, np.where(crosses, 0.0, link), LINK)
        arrived = np.where(crosses, over_net, begin)
    lanes.run(COMPUTE, arrived, cluster.partial(rows * share))


def all_gather(where: Spread, cluster: Cluster, is_backward: bool) -> Outcome:
    """Keys of all ranks, one kernel, reduce-scatter of their gradients. A row crosses the network once for a node, or
    for each of its ranks with levels "flat"."""
    parts, rows, known = where.parts, where.rows, cluster.calibration
    total = parts * rows * cluster.kv_row
    if total > cluster.memory_bytes:
        raise UnsupportedError(f"the keys of all ranks are {total / 1e9:.0f} GB, on each GPU")
    lanes, times = Lanes(1), KernelTimes(where.kind, cluster)
    nodes = -(-parts // cluster.node)
    per_nic = (nodes - 1) * rows if cluster.levels == "two" else (parts - min(parts, cluster.node)) * rows
    link = (parts - 1) * rows * cluster.kv_row / cluster.gather + 2 * known.nccl_latency_s
    net = per_nic * cluster.kv_row / cluster.network_bytes_per_s + cluster.network_latency_s
    wire = max(link, net if nodes > 1 else 0.0) if parts > 1 else 0.0
    # Rows are put into the order of the sequence, and gradients back.
    wire += cluster.copy(2 * total) if where.is_zigzag or where.kind != "full" else 0.0
    kernel = times.seconds(where.pairs / parts, rows, is_backward)
    lanes.run(COMPUTE, 0.0, wire, LINK)
    lanes.run(COMPUTE, 0.0, kernel * times.hot(kernel))
    lanes.run(COMPUTE, 0.0, wire if is_backward else 0.0, LINK)
    return lanes.outcome()


def ulysses(where: Spread, cluster: Cluster, is_backward: bool) -> Outcome:
    """Ranks exchange tokens for heads; each computes some heads of the whole sequence."""
    parts, rows = where.parts, where.rows
    _check_heads(cluster, parts)
    lanes, times = Lanes(1), KernelTimes(where.kind, cluster)
    _exchange(lanes, cluster, parts, rows, is_backward, True)
    kernel = times.seconds(where.pairs, rows * parts, is_backward, 1 / parts)
    lanes.run(COMPUTE, 0.0, kernel * times.hot(kernel))
    _exchange(lanes, cluster, parts, rows, is_backward, False)
    return lanes.outcome()


def usp_size(ranks: int, cluster: Cluster) -> int:
    """Ranks that share the heads: as many of a node as divide heads and ranks, and fewer than all."""
    for size in (8, 4, 2):
        if size < ranks and not (ranks % size or cluster.node % size or cluster.heads_kv % size):
            return size
    raise UnsupportedError("USP needs two factors above 1, of which one divides the heads")


def _check_heads(cluster: Cluster, size: int) -> None:
    if cluster.heads_q % size or cluster.heads_kv % size:
        heads = f"{cluster.heads_q} query and {cluster.heads_kv} K/V heads"
        raise UnsupportedError(f"{heads} do not divide over {size} ranks")


def _exchange(lanes: Lanes, cluster: Cluster, size: int, rows: float, is_backward: bool, is_first: bool) -> None:
    """All-to-alls of ``size`` neighbours, and the copies that put heads together: q, k and v, or one of their size."""
    if size == 1:
        return
    sent = rows * (cluster.q_row + (0 if is_first == is_backward else cluster.kv_row))
    nodes = -(-size // cluster.node)
    near, far = min(size, cluster.node) - 1, size - min(size, cluster.node)
    latency_s = cluster.calibration.nccl_latency_s
    link = near / size * sent / cluster.nccl + latency_s
    net = far / size * sent / cluster.network_bytes_per_s + cluster.network_latency_s
    # Heads are put together once, and the three gradients into one tensor before.
    copies = 4 if is_backward and not is_first else 2
    lanes.run(COMPUTE, 0.0, max(link, net if nodes > 1 else 0.0) + cluster.copy(copies * sent), LINK)
