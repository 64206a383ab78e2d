# SPDX-License-Identifier: Apache-2.0
"""How far the model is off in the records of two and four GPUs, by which a modelled time is supported or an estimate.

A time is supported if records have its way under its kind of mask, on as many GPUs of one node, with as many tokens and
the same heads, and if the model is within ``LIMIT`` of all of them.
"""

from __future__ import annotations

from magi_attention.tools.simulate.machine import Cluster

LIMIT = 0.10
FEWEST_TOKENS, SHAPE = 8192, (64, 8, 128)  # of a GPU in the records; heads and head dim
# By way, kind of mask and GPUs: the largest relative errors, forward and backward, rounded up; most tokens of a GPU.
# made by benchmarks/simulated.py
LARGEST_ERRORS: dict[tuple[str, str, int], tuple[float, float, int]] = {
    ("one launch", "full", 2): (0.07, 0.08, 16384),
    ("one launch", "full", 4): (0.06, 0.08, 16384),
    ("one launch", "causal", 2): (0.05, 0.03, 16384),
    ("one launch", "causal", 4): (0.11, 0.09, 16384),
    ("one launch", "varlen_full", 2): (0.05, 0.09, 16384),
    ("one launch", "varlen_full", 4): (0.2, 0.03, 16384),
    ("one launch", "varlen_causal", 2): (0.1, 0.16, 16384),
    ("one launch", "varlen_causal", 4): (0.2, 0.15, 16384),
    ("one launch", "sliding_window_causal", 2): (0.07, 0.08, 16384),
    ("one launch", "sliding_window_causal", 4): (0.04, 0.04, 8192),
    ("one stage", "full", 2): (0.08, 0.08, 16384),
    ("one stage", "full", 4): (0.01, 0.08, 8192),
    ("one stage", "causal", 2): (0.07, 0.05, 16384),
    ("one stage", "causal", 4): (0.09, 0.03, 8192),
    ("one stage", "varlen_full", 2): (0.09, 0.55, 16384),
    ("one stage", "varlen_full", 4): (0.07, 0.05, 8192),
    ("one stage", "varlen_causal", 2): (0.12, 0.21, 16384),
    ("one stage", "varlen_causal", 4): (0.06, 0.12, 8192),
    ("one stage", "sliding_window_causal", 2): (0.08, 0.15, 16384),
    ("one stage", "sliding_window_causal", 4): (0.01, 0.15, 8192),
    ("two stages", "full", 2): (0.1, 0.04, 16384),
    ("two stages", "causal", 2): (0.07, 0.07, 16384),
    ("two stages", "varlen_full", 2): (0.08, 0.28, 16384),
    ("two stages", "varlen_causal", 2): (0.1, 0.08, 16384),
    ("two stages", "sliding_window_causal", 2): (0.15, 0.23, 16384),
    ("fetch, then attend", "full", 2): (0.07, 0.08, 16384),
    ("fetch, then attend", "causal", 2): (0.07, 0.02, 16384),
    ("fetch, then attend", "varlen_full", 2): (0.04, 0.08, 16384),
    ("fetch, then attend", "varlen_causal", 2): (0.08, 0.21, 16384),
    ("fetch, then attend", "sliding_window_causal", 2): (0.08, 0.15, 16384),
    ("ring", "full", 2): (0.07, 0.07, 16384),
    ("ring", "causal", 2): (0.05, 0.04, 16384),
    ("ring", "varlen_full", 2): (0.1, 0.56, 16384),
    ("ring", "varlen_causal", 2): (0.03, 0.53, 16384),
    ("ring", "sliding_window_causal", 2): (0.11, 0.12, 16384),
    ("all-gather", "full", 2): (0.06, 0.09, 16384),
    ("all-gather", "full", 4): (0.06, 0.03, 16384),
    ("all-gather", "causal", 2): (0.1, 0.08, 16384),
    ("all-gather", "causal", 4): (0.08, 0.06, 16384),
    ("all-gather", "varlen_full", 2): (0.05, 0.56, 16384),
    ("all-gather", "varlen_full", 4): (0.05, 0.41, 16384),
    ("all-gather", "varlen_causal", 2): (0.09, 0.65, 16384),
    ("all-gather", "varlen_causal", 4): (0.11, 0.54, 16384),
    ("all-gather", "sliding_window_causal", 2): (0.03, 0.05, 16384),
    ("ulysses", "full", 2): (0.06, 0.1, 16384),
    ("ulysses", "causal", 2): (0.06, 0.1, 16384),
    ("ulysses", "varlen_full", 2): (0.03, 0.09, 16384),
    ("ulysses", "varlen_causal", 2): (0.03, 0.09, 16384),
    ("ulysses", "sliding_window_causal", 2): (0.03, 0.06, 16384),
}
# end


def largest_error(way: str, kind: str, ranks: int, tokens: int, cluster: Cluster, is_backward: bool) -> float | None:
    """What the records with such a case say, ``tokens`` in all on ``ranks`` GPUs; None if there are none."""
    shape = cluster.heads_q, cluster.heads_kv, cluster.head_dim
    found = LARGEST_ERRORS.get((way, kind, ranks))
    if found is None or ranks > cluster.node or shape != SHAPE or cluster.rates.is_measured:
        return None
    return found[is_backward] if FEWEST_TOKENS <= tokens / ranks <= found[2] else None


def is_supported(error: float | None) -> bool:
    return error is not None and error <= LIMIT
