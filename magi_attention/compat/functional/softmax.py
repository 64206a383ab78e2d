# SPDX-License-Identifier: Apache-2.0
"""``functional.utils``: building blocks of softmax attention, safe for rows with nothing to attend to.

Five of them exist with ``_compiled`` after their name, under ``torch.compile``; so they load it when first asked for.
"""

from __future__ import annotations

from typing import Any

import torch

from magi_attention.errors import ContractError
from magi_attention.kernels.reference.correction import (
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
    "correct_attn_fwd_result",
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

_COMPILED = ("calc_lse_sink", "correct_attn_lse", "correct_attn_out", "correct_attn_out_lse_with_sink", "sink_bwd")


def __getattr__(name: str) -> Any:
    if name.endswith("_compiled") and name.removesuffix("_compiled") in _COMPILED:
        globals()[name] = torch.compile(globals()[name.removesuffix("_compiled")], dynamic=True)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def correct_attn_fwd_result(
    out_list: list[torch.Tensor], lse_list: list[torch.Tensor], inplace: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out (T, H, Dv), lse (T, H))`` of all partial results of the same rows; into the first ones if ``inplace``."""
    if not out_list or len(out_list) != len(lse_list):
        raise ContractError(f"{len(out_list)} partial outs and {len(lse_list)} lses; give one lse for each out.")
    out, lse = out_list[0], lse_list[0]
    for other_out, other_lse in zip(out_list[1:], lse_list[1:]):
        out, lse = correct_attn_out_lse(out, lse, other_out, other_lse, inplace=inplace)
    return out, lse
