# SPDX-License-Identifier: Apache-2.0
"""Factors that bring attention area and moved tokens to one unit of time."""

from __future__ import annotations


def get_calc_cost_factor(
    num_heads_q: int, head_dim: int, tflops: float, mfu: float, sec_ratio: float = 1e6, is_fwd: bool = True
) -> float:
    """Time per (q, k) pair: ``4 num_heads_q head_dim / tflops / mfu * sec_ratio``, times 2.5 for backward.

    With ``tflops`` in FLOP/s the unit is seconds / sec_ratio, by default microseconds.
    """
    return 4 * num_heads_q * head_dim / tflops / mfu * sec_ratio * (1.0 if is_fwd else 2.5)


def get_comm_cost_factor(
    num_heads_kv: int,
    head_dim: int,
    bandwidth: float,
    bwu: float,
    corr_factor: float,
    sec_ratio: float = 1e6,
) -> float:
    """Time per KV token: ``2 num_heads_kv head_dim / bandwidth / corr_factor / bwu * sec_ratio``.

    ``bandwidth`` counts *elements* per second: divide bytes per second by the element size.
    """
    return 2 * num_heads_kv * head_dim / bandwidth / corr_factor / bwu * sec_ratio


def get_a2a_corr_factor(world_size: int) -> float:
    """``(w - 1) / w``: the share of an all-to-all that leaves the rank."""
    return (world_size - 1) / world_size
