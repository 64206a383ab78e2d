# SPDX-License-Identifier: Apache-2.0
"""The machine of the model: GPUs in nodes, two kinds of links, and what was measured of each."""

from __future__ import annotations

from dataclasses import dataclass, field

from magi_attention.config import links
from magi_attention.config.rates import MachineRates
from magi_attention.errors import ContractError

LEVELS = ("two", "flat")


@dataclass(frozen=True)
class Calibration:
    """Constants that no plan knows. Each comes from committed records of H100 GPUs; none belongs to one cell of them.

    Args:
        copy_bytes_per_s: read and written by a copy on the GPU (range_ops_h100.json, "copy").
        merge_bytes_per_s: read and written by a kernel that adds to float32 results of another call
            (context_parallel_h100x2.json: kernels alone of ring less those of all-gather).
        nccl_bytes_per_s: received by send/receive and all-to-all. gather_bytes_per_s: received by all-gather, sent by
            reduce-scatter. nccl_latency_s: of a collective that moves next to nothing (all three: ``config/links.py``).
        forward_pace: speed of today's forward, of that in ffa_forward_h100.json (one_gpu of all masks of
            context_parallel_nodes_h100x4.json and context_parallel_nodes_h200x2.json, the mean).
        put_sms: multiprocessors of ``sms`` that push rows of one launch (docs/log/one_launch.md).
        hot_pace: speed of a kernel that works for ``hot_s`` or longer, of a short one; GPUs reach their power limit
            (one_gpu of both records beside ffa_forward_h100.json).
    """

    copy_bytes_per_s: float = 2.95e12
    merge_bytes_per_s: float = 1.1e12
    nccl_bytes_per_s: float = links.NCCL_BYTES_PER_S
    gather_bytes_per_s: float = links.GATHER_BYTES_PER_S
    nccl_latency_s: float = links.NCCL_LATENCY_S
    forward_pace: float = 1.03
    put_sms: int = 16
    sms: int = 132
    cool_s: float = 6e-3
    hot_s: float = 12e-3
    hot_pace: float = 0.93


@dataclass(frozen=True)
class Cluster:
    """GPUs in nodes of ``node``, and the heads of the model.

    ``rates`` are those of the kernels and of the links in a node. ``network_bytes_per_s`` and ``network_latency_s`` are
    those of each GPU's link to other nodes: nothing here was measured over a network. With ``levels`` "two" a row that
    several GPUs of a node need crosses the network once and goes on over NVLink; with "flat" it crosses once for each.
    """

    node: int = 8
    network_bytes_per_s: float = links.NETWORK_BYTES_PER_S
    network_latency_s: float = links.NETWORK_LATENCY_S
    levels: str = "two"
    heads_q: int = 64
    heads_kv: int = 8
    head_dim: int = 128
    element_bytes: int = 2
    memory_bytes: float = 80e9
    rates: MachineRates = field(default_factory=MachineRates)
    calibration: Calibration = field(default_factory=Calibration)

    def __post_init__(self) -> None:
        if self.levels not in LEVELS:
            raise ContractError(f"levels is {self.levels!r}; use one of {', '.join(LEVELS)}.")
        sizes = self.node, self.heads_q, self.heads_kv, self.head_dim, self.element_bytes, self.memory_bytes
        if min(sizes) < 1 or not self.network_bytes_per_s > 0 or not self.network_latency_s >= 0:
            raise ContractError("Sizes and bandwidths of a cluster must be positive, and latencies not negative.")
        if self.heads_q % self.heads_kv:
            raise ContractError(f"{self.heads_q} query heads do not divide over {self.heads_kv} K/V heads.")

    # ---- sizes, in bytes ----------------------------------------------------------------------------

    @property
    def kv_row(self) -> int:
        """K and V of one token."""
        return 2 * self.heads_kv * self.head_dim * self.element_bytes

    @property
    def q_row(self) -> int:
        """Queries of one token; as many bytes as its out."""
        return self.heads_q * self.head_dim * self.element_bytes

    @property
    def q_values(self) -> int:
        return self.heads_q * self.head_dim

    # ---- seconds ------------------------------------------------------------------------------------

    @property
    def link_scale(self) -> float:
        """Links in a node beside those that NCCL was measured on."""
        return self.rates.link_bytes_per_s / links.NVLINK_BYTES_PER_S

    def copy(self, num_bytes: float) -> float:
        """Seconds of a kernel that reads and writes so many bytes together."""
        return num_bytes / self.calibration.copy_bytes_per_s

    def merge(self, rows: float) -> float:
        """What adding to float32 results of another call costs a kernel, ``rows`` query rows of all heads."""
        return 8 * rows * self.q_values / self.calibration.merge_bytes_per_s

    def partial(self, rows: float) -> float:
        """What it costs that a call writes float32 in place of 16 bits, and that these are rounded at last."""
        written = rows * self.q_values * (4 - self.element_bytes) / self.calibration.merge_bytes_per_s
        return written + self.copy(rows * self.q_values * (4 + self.element_bytes))

    @property
    def nccl(self) -> float:
        """Bytes per second in a node, by send/receive and all-to-all."""
        return self.calibration.nccl_bytes_per_s * self.link_scale

    @property
    def gather(self) -> float:
        return self.calibration.gather_bytes_per_s * self.link_scale
