# SPDX-License-Identifier: Apache-2.0
"""Attention under ``torch.autocast``: q, k and v take its dtype, as those of torch's own attention do.

Rotary embeddings multiply by float32 tables, so under autocast q and k come in float32 and v in its lower precision.
"""

from __future__ import annotations

import torch

_is_any_on = torch._C._is_any_autocast_enabled  # 40 ns; asking for a device takes a microsecond


def autocast_dtype(q: object) -> torch.dtype | None:
    """The dtype of autocast on the device of q; None where it is off, or where q is no tensor."""
    if not _is_any_on() or not isinstance(q, torch.Tensor):
        return None
    device = q.device.type
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)  # meta has none
    return torch.get_autocast_dtype(device) if is_on else None


def cast_operands(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """q, k and v in the dtype of autocast, if it is on. float64 stays, as does what is no floating-point tensor."""
    dtype = autocast_dtype(q)
    if dtype is None:
        return q, k, v
    return _cast(q, dtype), _cast(k, dtype), None if v is None else _cast(v, dtype)


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    is_cast = isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(dtype) if is_cast else x
