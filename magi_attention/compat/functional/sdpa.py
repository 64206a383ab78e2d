# SPDX-License-Identifier: Apache-2.0
"""The torch reference backends as plain forward and backward functions, without autograd.

``sdpa_*`` is dense, O(Tq * Tk) memory; ``sdpa_online_*`` is blocked, O(tokens) memory. Arguments are those of
``fa4_fwd`` and ``fa4_bwd``; float16, bfloat16, float32 and float64 are computed, the last in float64.
"""

from __future__ import annotations

from magi_attention.compat.functional.backend_call import BackendCalls
from magi_attention.compat.functional.sdpa_parts import (  # noqa: F401
    sdpa_bwd_calc,
    sdpa_bwd_dqdkdv_rearrange,
    sdpa_bwd_postprocess,
    sdpa_bwd_preprocess,
    sdpa_bwd_qkvodo_lse_rearrange,
    sdpa_bwd_recalc_fwd,
    sdpa_fwd_calc,
    sdpa_fwd_out_lse_rearrange,
    sdpa_fwd_preprocess,
    sdpa_fwd_qkv_rearrange,
)
from magi_attention.kernels.reference.sdpa import SdpaBackend
from magi_attention.kernels.reference.sdpa_online import SdpaOnlineBackend

_DENSE = BackendCalls(lambda _: SdpaBackend())
_BLOCKED = BackendCalls(lambda _: SdpaOnlineBackend())

sdpa_fwd, sdpa_bwd = _DENSE.fwd, _DENSE.bwd
sdpa_online_fwd, sdpa_online_bwd = _BLOCKED.fwd, _BLOCKED.bwd
