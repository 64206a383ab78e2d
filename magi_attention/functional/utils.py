# SPDX-License-Identifier: Apache-2.0
"""Building blocks of softmax attention that are safe for rows with nothing to attend to."""

from magi_attention.kernels.correction import (
    calc_lse_rescale_weight,
    calc_lse_sink,
    correct_attn_lse,
    correct_attn_lse_with_sink,
    correct_attn_out,
    correct_attn_out_lse,
    correct_attn_out_lse_with_sink,
    correct_attn_out_with_sink,
    safe_lse,
    safe_softmax,
    safe_subtract,
    sink_bwd,
    softmax_bwd,
)

__all__ = [
    "calc_lse_rescale_weight",
    "calc_lse_sink",
    "correct_attn_lse",
    "correct_attn_lse_with_sink",
    "correct_attn_out",
    "correct_attn_out_lse",
    "correct_attn_out_lse_with_sink",
    "correct_attn_out_with_sink",
    "safe_lse",
    "safe_softmax",
    "safe_subtract",
    "sink_bwd",
    "softmax_bwd",
]
