# SPDX-License-Identifier: Apache-2.0
"""Published names with a line or two behind each, of modules that are otherwise ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from magi_attention.errors import UnsupportedError

# ---- types ---------------------------------------------------------------------------------------------

OutMaybeWithLSE: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
GeneralWorkItem: TypeAlias = dist.Work | torch.cuda.Stream | torch.cuda.Event


class SingletonMeta(type):
    """Metaclass of classes with one instance: every call gives the same one."""

    _instances: dict[type, Any] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in cls._instances:
            cls._instances[cls] = super().__call__(*args, **kwargs)
        return cls._instances[cls]


# ---- profilers and benchmarks --------------------------------------------------------------------------


def nvtx_range_push(name: str) -> None:
    """Begins a range on the timeline of a CUDA profiler; nothing without CUDA."""
    if torch.cuda.is_initialized():
        torch.cuda.nvtx.range_push(name)


def nvtx_range_pop() -> None:
    """Ends the range begun last."""
    if torch.cuda.is_initialized():
        torch.cuda.nvtx.range_pop()


def maybe_dist_sync() -> None:
    """Waits for the device and for all ranks, if there is a process group."""
    if dist.is_available() and dist.is_initialized():
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        dist.barrier()


@contextmanager
def nvml_context() -> Iterator[None]:
    """NVML is in use inside; ``UnsupportedError`` without ``pynvml``."""
    try:
        import pynvml
    except ImportError:
        raise UnsupportedError("nvml_context needs pynvml; pip install nvidia-ml-py.") from None
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()
