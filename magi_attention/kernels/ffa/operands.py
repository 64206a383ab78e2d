# SPDX-License-Identifier: Apache-2.0
"""What forward and backward of the CUDA kernels share: the device's runtime, layouts and checks of operands."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import torch

from magi_attention.env import build as env
from magi_attention.errors import ContractError
from magi_attention.native import abi

_log = logging.getLogger("magi_attention.kernels")

MAX_HEAD_DIM = 256
DTYPES = {torch.bfloat16: abi.BF16, torch.float16: abi.FP16}
MAX_PREPARED = 512  # parameter blocks, of each direction


class CudaRuntime:
    """What a launch asks torch about the device, by the calls that take 0.1 us rather than 4."""

    def __init__(self) -> None:
        self.stream = torch._C._cuda_getCurrentRawStream  # (device index) -> address
        self.current_device = torch._C._cuda_getDevice
        self.is_capturing = torch._C._cuda_isCurrentStreamCapturing
        self._num_sms: dict[int, int] = {}

    @staticmethod
    def exists() -> bool:
        """Is this a torch with CUDA?"""
        return hasattr(torch._C, "_cuda_getCurrentRawStream")

    def on_device(self, index: int) -> Any:
        return torch.cuda.device(index)

    def capability(self, index: int) -> tuple[int, int]:
        """Compute capability of the device."""
        return torch.cuda.get_device_capability(index)

    def event(self) -> torch.cuda.Event:
        """To be recorded on one stream and waited for by another."""
        return torch.cuda.Event()

    def to_host(self, x: torch.Tensor) -> torch.Tensor:
        """A copy in pinned memory, complete when the stream gets there."""
        return x.to("cpu", non_blocking=True)

    def num_sms(self, index: int) -> int:
        """SMs of the device. Each call of a backward asks for them."""
        found = self._num_sms.get(index)
        if found is None:
            found = self._num_sms[index] = torch.cuda.get_device_properties(index).multi_processor_count
        return found

    def stream_object(self) -> torch.cuda.Stream:
        """The current stream. As an object it takes as long as a launch."""
        return torch.cuda.current_stream()


def remember(memo: dict[tuple[object, ...], Any], key: tuple[object, ...], prepared: Any) -> None:
    """Keeps a prepared call, unless the user wants the kernel library to be looked up for each call."""
    if env.is_no_build_cache():
        return
    if len(memo) >= MAX_PREPARED:
        memo.clear()
    memo[key] = prepared


def minus_inf(q: torch.Tensor) -> torch.Tensor:
    return torch.full((q.shape[1],), float("-inf"), dtype=torch.float32, device=q.device)


def strides_of(x_THD: torch.Tensor) -> tuple[int, int]:
    """Token and head stride in elements; of a dim of size 1, where any is right, a multiple of 8."""
    dense = (x_THD.shape[1] * x_THD.shape[2], x_THD.shape[2])
    return tuple(x_THD.stride(i) if x_THD.shape[i] > 1 else dense[i] for i in (0, 1))  # type: ignore[return-value]


def stride_fields(**operands: torch.Tensor) -> dict[str, int]:
    """The stride fields of a parameter block."""
    fields: dict[str, int] = {}
    for name, x in operands.items():
        fields[f"{name}_stride_token"], fields[f"{name}_stride_head"] = strides_of(x)
    return fields


def is_loadable(x_THD: torch.Tensor) -> bool:
    token, head = strides_of(x_THD)
    return x_THD.stride(2) == 1 and token % 8 == 0 and head % 8 == 0 and token > 0 and head > 0


def dense(x: torch.Tensor) -> torch.Tensor:
    """``x``, copied if the copy engine cannot follow its layout."""
    is_fine = is_loadable(x) and not x.data_ptr() & 15
    return x if is_fine else x.clone(memory_format=torch.contiguous_format)


def odd_strides(**operands: torch.Tensor) -> str:
    """Names and strides of the operands that need a copy; "" if there are none."""
    return ", ".join(f"{name} {tuple(x.stride())}" for name, x in operands.items() if not is_loadable(x))


@lru_cache(maxsize=64)
def log_copy(what: str) -> None:
    # The memo makes it once per process and layout; it holds no result.
    _log.warning(
        "Strides of %s do not suit the GPU's copy engine, so each call copies them; make the last dim contiguous "
        "and the other strides multiples of 8 elements.",
        what,
    )


def check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    shapes = f"q {tuple(q.shape)} {q.dtype}, k {tuple(k.shape)} {k.dtype}, v {tuple(v.shape)} {v.dtype}"
    if not q.dim() == k.dim() == v.dim() == 3 or k.shape[:2] != v.shape[:2] or q.shape[2] != k.shape[2]:
        raise ContractError(f"{shapes} do not fit; give (tokens, heads, head dim) each, as many rows in k and v.")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES or not q.device == k.device == v.device:
        raise ContractError(f"{shapes}: cast all three to bfloat16 or all to float16, on one device.")
    if q.shape[1] == 0 or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ContractError(f"{shapes}: the number of query heads must be a multiple of that of kv heads.")
    for dim in (q.shape[2], v.shape[2]):
        if dim % 8 or not 0 < dim <= MAX_HEAD_DIM:
            raise ContractError(f"{shapes}: head dims must be multiples of 8 up to {MAX_HEAD_DIM}; pad them.")
    if max(q.shape[0], k.shape[0]) >= 2**31:
        raise ContractError(f"{shapes}: fewer than 2**31 tokens fit; split the sequence.")


def check_buffer(name: str, buffer: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raises ``ContractError`` unless the accumulation buffer ``name`` has this shape in float32."""
    if tuple(buffer.shape) != tuple(shape) or buffer.dtype != torch.float32:
        have = f"{tuple(buffer.shape)} {buffer.dtype}"
        raise ContractError(f"The accumulation buffer {name} is {have}; make it {tuple(shape)} float32.")
