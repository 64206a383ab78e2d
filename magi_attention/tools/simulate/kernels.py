# SPDX-License-Identifier: Apache-2.0
"""Seconds of a kernel call, from calls that were measured on one H100.

The table gives calls by kind of mask and number of tokens. Between its sizes a call takes the time of its pairs at the
best pace of the table, and an overhead by its query rows: tiles that are partly masked, the start and end of a tile,
waves that do not fill the GPU. The overhead is that of the two nearest sizes of its kind, a straight line between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from magi_attention.common.slices import BICAUSAL, CAUSAL, K0, K1, Q0, Q1, TYPE
from magi_attention.config.rates import BACKWARD_FLOPS, FORWARD_FLOPS
from magi_attention.tools.simulate.machine import Cluster

Floats = NDArray[np.float64]
KINDS = ("full", "causal", "varlen_full", "varlen_causal", "sliding_window_causal")


class MeasuredCall(NamedTuple):
    """64 query heads on 8, head dim 128, bf16. Pairs are allowed pairs, times are of all heads; both are means where
    several draws of the documents were measured."""

    kind: str
    tokens: int
    forward_pairs: float
    forward_us: float
    backward_pairs: float
    backward_us: float


# benchmarks/results/ffa_forward_h100.json and ffa_backward_h100.json, and of documents in 4,096 tokens
# ffa_backward_h100_documents.json, which has 16 draws; a test compares.
TABLE = (
    MeasuredCall("full", 1_024, 1_048_576, 64.4, 1_048_576, 220.1),
    MeasuredCall("full", 4_096, 16_777_216, 785.5, 16_777_216, 2165.1),
    MeasuredCall("full", 32_768, 1_073_741_824, 47206.1, 1_073_741_824, 141511.4),
    MeasuredCall("causal", 1_024, 524_800, 50.6, 524_800, 161.9),
    MeasuredCall("causal", 4_096, 8_390_656, 423.2, 8_390_656, 1201.6),
    MeasuredCall("causal", 32_768, 536_887_296, 23154.6, 536_887_296, 69917.5),
    MeasuredCall("varlen_full", 1_024, 1_048_576, 64.7, 1_048_576, 220.1),
    MeasuredCall("varlen_full", 4_096, 12_451_346, 612.3, 8_488_007.75, 1292.9),
    MeasuredCall("varlen_full", 32_768, 302_795_490, 13164.9, 302_795_490, 41190.7),
    MeasuredCall("varlen_causal", 1_024, 524_800, 47.6, 524_800, 161.4),
    MeasuredCall("varlen_causal", 4_096, 6_227_721, 321.6, 4_246_051.875, 837.0),
    MeasuredCall("varlen_causal", 32_768, 151_414_129, 6816.4, 151_414_129, 20704.6),
    MeasuredCall("sliding_window_causal", 1_024, 524_800, 48.1, 524_800, 160.9),
    MeasuredCall("sliding_window_causal", 4_096, 3_670_528, 234.5, 3_670_528, 724.8),
    MeasuredCall("sliding_window_causal", 32_768, 33_030_656, 1862.2, 33_030_656, 5669.8),
)
_VALUES = 64 * 128  # query heads times head dim of the table


def kind_of(slices: NDArray[np.int64]) -> str:
    """The row of the table for a mask: windows have bands, causal masks a diagonal, varlen ones several documents."""
    is_square = (slices[:, Q1] - slices[:, Q0] == slices[:, K1] - slices[:, K0]) & (slices[:, Q0] == slices[:, K0])
    if (slices[:, TYPE] == BICAUSAL).any():
        return "sliding_window_causal"
    has_diagonal = bool((slices[:, TYPE] & CAUSAL == CAUSAL).any())
    is_single = len(slices) == 1 and bool(is_square.all())
    return ("" if is_single else "varlen_") + ("causal" if has_diagonal else "full")


class KernelTimes:
    """Seconds of kernel calls of one kind of mask on one GPU of ``cluster``."""

    def __init__(self, kind: str, cluster: Cluster) -> None:
        self._cluster, self._values = cluster, cluster.heads_q * cluster.head_dim
        self._tokens = np.array([call.tokens for call in TABLE if call.kind == kind], dtype=np.float64)
        self._pair_s: dict[bool, float] = {}
        self._overhead_s: dict[bool, Floats] = {}
        for is_backward in (False, True):
            # Seconds of a pair of one head and one value of head dim at the best pace of all calls.
            best = min(seconds / pairs for pairs, seconds in _measured(TABLE, is_backward))
            mine = _measured([call for call in TABLE if call.kind == kind], is_backward)
            pace = _pace(cluster, is_backward)
            self._pair_s[is_backward] = best / pace
            self._overhead_s[is_backward] = np.array([seconds - best * pairs for pairs, seconds in mine]) / pace

    def seconds(self, pairs: Floats | float, rows: Floats | float, is_backward: bool, heads: float = 1.0) -> Floats:
        """A GPU that is not hot yet takes so long for calls on ``pairs`` allowed pairs of ``rows`` query rows;
        ``heads`` is the share of the heads. No rows take no time."""
        values, where, beyond = self._values * heads, self._tokens, self._overhead_s[is_backward]
        rows = np.asarray(rows, dtype=np.float64)
        slope = (beyond[-1] - beyond[-2]) / (where[-1] - where[-2])
        overhead = np.interp(rows, where, beyond) + slope * np.maximum(rows - where[-1], 0)
        overhead *= np.minimum(rows / where[0], 1.0) ** 0.5  # few tiles are still one wave, and part of a GPU
        return (np.asarray(pairs) * self._pair_s[is_backward] + overhead) * values

    def hot(self, seconds: Floats | float) -> Floats:
        """How much longer a kernel takes that works so long at a stretch: GPUs reach their power limit."""
        known = self._cluster.calibration
        return 1 / np.interp(seconds, [known.cool_s, known.hot_s], [1.0, known.hot_pace])


def _measured(calls: Sequence[MeasuredCall], is_backward: bool) -> list[tuple[float, float]]:
    """Pairs and seconds of calls, the seconds of one head and one value of head dim."""
    if is_backward:
        return [(call.backward_pairs, call.backward_us / 1e6 / _VALUES) for call in calls]
    return [(call.forward_pairs, call.forward_us / 1e6 / _VALUES) for call in calls]


def _pace(cluster: Cluster, is_backward: bool) -> float:
    """Kernels of ``cluster`` beside those of the table: as fast as today's, unless `magi tune` measured them under a
    causal mask."""
    if not cluster.rates.is_measured:
        return 1.0 if is_backward else cluster.calibration.forward_pace
    rate = cluster.rates.kernel(cluster.heads_q, cluster.heads_kv, cluster.head_dim)
    calls, flops = [call for call in TABLE if call.kind == "causal"], BACKWARD_FLOPS if is_backward else FORWARD_FLOPS
    there = [flops * pairs / seconds for pairs, seconds in _measured(calls, is_backward)]
    found = np.interp(np.log(rate.tokens), np.log([call.tokens for call in calls]), there)
    return float((rate.backward if is_backward else rate.forward) / found)
