# SPDX-License-Identifier: Apache-2.0
"""Published names with a line or two behind each, of modules that are otherwise ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from magi_attention.common.ranges import AttnRanges
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.meta.collection.comm_meta import GroupCollectiveArg
from magi_attention.meta.container import AttnSlice, MultiKAttnSlice

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


class NativeGroupCollectiveArg(GroupCollectiveArg):
    """Arguments of the native collectives, which take the plain ones here."""


# ---- what a rank computes ------------------------------------------------------------------------------


@dataclass
class HostRankEntry:
    """Ranges and slices of one rank; ``*_per_chunk`` by chunk of remote keys. Filled by whoever wants one."""

    host_q_ranges_global: AttnRanges
    host_k_ranges_global: AttnRanges
    attn_calc_slice_global_list: list[AttnSlice]
    attn_calc_host_slice_local_list: list[AttnSlice]
    remote_k_ranges_global: AttnRanges
    remote_k_ranges_global_per_chunk: list[AttnRanges]
    attn_calc_remote_slice_list_per_chunk: list[list[MultiKAttnSlice]]

    def __post_init__(self) -> None:
        ranges, slices = len(self.remote_k_ranges_global_per_chunk), len(self.attn_calc_remote_slice_list_per_chunk)
        if ranges != slices:
            raise ContractError(f"{ranges} chunks of remote ranges and {slices} of slices; give as many of both.")

    def get_host_calc_area(self) -> int:
        return sum(piece.area for piece in self.attn_calc_host_slice_local_list)

    def get_remote_calc_area(self, chunk_idx: int | None = None) -> int:
        """Pairs of one chunk, or of all."""
        chunks = self.attn_calc_remote_slice_list_per_chunk
        return sum(p.area for p in (chain.from_iterable(chunks) if chunk_idx is None else chunks[chunk_idx]))

    def get_remote_comm_size(self, chunk_idx: int | None = None) -> int:
        """Tokens of one chunk, or of all."""
        chunks = self.remote_k_ranges_global_per_chunk
        return sum(r.total_seqlen for r in (chunks if chunk_idx is None else [chunks[chunk_idx]]))


@dataclass
class RemoteRankEntry:
    """What one rank gets from the others for one chunk."""

    host_k_ranges_global: AttnRanges
    remote_k_ranges_global: AttnRanges
    attn_calc_remote_slice_local_list: list[MultiKAttnSlice]


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
