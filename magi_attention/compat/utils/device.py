# SPDX-License-Identifier: Apache-2.0
"""What the current device is."""

from __future__ import annotations

import torch

from magi_attention.errors import UnsupportedError


def default_device() -> torch.device:
    """CUDA if there is a device, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def get_num_sms(device=None) -> int:
    """Number of streaming multiprocessors of a CUDA device, the current one by default."""
    if not torch.cuda.is_available():
        raise UnsupportedError("Only CUDA devices have SMs and none is available; run on a GPU machine.")
    chosen = torch.cuda.current_device() if device is None else device
    return torch.cuda.get_device_properties(chosen).multi_processor_count


def _major() -> int:
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0


def is_ampere() -> bool:
    """Compute capability 8.x? False without CUDA."""
    return _major() == 8


def is_hopper() -> bool:
    """Compute capability 9.x? False without CUDA."""
    return _major() == 9


def is_blackwell() -> bool:
    """Compute capability 10.x? False without CUDA."""
    return _major() == 10
