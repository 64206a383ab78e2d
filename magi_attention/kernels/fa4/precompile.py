# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels of FlashAttention-4 ahead, for any of its GPUs and without one.

FlashAttention-4 runs on tensors without values, so it compiles what a call of these shapes needs and launches nothing.
What it compiles for is told by the environment of the process (``environment_of``), so each target has processes of its
own::

    python -m magi_attention.kernels.fa4.precompile '{"head_dim": 128, "head_dim_v": 128, "group": 8}' ...

A line on standard output says of each kernel whether it was compiled: {"index": 0, "compiled": 3, "seconds": 9.1}.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import torch

from magi_attention.kernels.fa4.backend import Fa4Backend, block_size
from magi_attention.kernels.fa4.blocks import num_endpoints
from magi_attention.kernels.fa4.objects import KINDS, Target, target_here
from magi_attention.kernels.fa4.wheel import Lists, Wheel, load_wheel
from magi_attention.kernels.types import AttnOptions, Problem

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Compute capability -> target. One kernel serves 10.0 and 10.3.
ARCHS = {(9, 0): "sm_90a", (10, 0): "sm_100f", (10, 3): "sm_100f"}
_TOKENS, _KV_HEADS = 4096, 2  # any that need more than one block


@dataclass(frozen=True)
class Shape:
    """What kernels are compiled for: forward and backward of one kind of calls.

    ``group`` is the number of query heads for each kv head, ``intervals`` the most intervals of keys that a query sees.
    """

    head_dim: int
    head_dim_v: int
    group: int
    intervals: int = 1
    dtype: str = "bf16"
    softcap: float = 0.0


# What the wheel of kernels for 10.0 and 10.3 brings, for each number of SMs: B200 has 148, GB200 152, a whole B300 160.
SHIPPED_SMS = (148, 152, 160)
SHIPPED = tuple(
    Shape(*dims, group, intervals)
    for dims, groups in (((128, 128), (1, 2, 4, 8)), ((64, 64), (1, 4, 8)), ((192, 128), (1,)))
    for group in groups
    for intervals in (1, 2)
)


def environment_of(capability: tuple[int, int], num_sms: int) -> dict[str, str]:
    """What tells FlashAttention-4 and its compiler the target. 10.3 runs what is compiled for 10.0."""
    major = capability[0]
    return {
        "FLASH_ATTENTION_ARCH": f"sm_{major}0",
        "CUTE_DSL_ARCH": ARCHS[capability],
        "FLASH_ATTENTION_NUM_SMS": str(num_sms),
    }


def compile_shapes(shapes: Iterable[Shape], target: Target) -> Iterator[tuple[int, float]]:
    """(kernels that had to be compiled, seconds) of each shape, for the target that the environment says."""
    from flash_attn.cute import interface
    from torch._subclasses.fake_tensor import FakeTensorMode

    wheel = load_wheel()
    _say_target(target)
    tables = [getattr(interface, name).compile_cache for name in KINDS.values()]
    for shape in shapes:
        before, begin = sum(table.compiled for table in tables), time.perf_counter()
        with FakeTensorMode():
            _call(wheel, shape, (9, 0) if target.arch == "sm_90a" else (10, 0))
        yield sum(table.compiled for table in tables) - before, time.perf_counter() - begin


def _say_target(target: Target) -> None:
    """The schedulers of FlashAttention-4 ask the GPU how many CTAs it holds; here the target answers."""
    import cutlass.utils
    import flash_attn.cute.tile_scheduler as tile_scheduler

    class HardwareInfo:
        def __init__(self, device_id: int = 0) -> None:
            pass

        def get_device_multiprocessor_count(self) -> int:
            return target.num_sms

        def get_max_active_clusters(self, cluster_size: int) -> int:
            return target.num_sms // cluster_size

    cutlass.utils.HardwareInfo = tile_scheduler.HardwareInfo = HardwareInfo


def why_not(shape: Shape, capability: tuple[int, int], needs_backward: bool = False) -> str | None:
    """Why calls of this shape have no kernel on such a GPU, as a sentence; None if they have one."""
    options = AttnOptions(softmax_scale=shape.head_dim**-0.5, softcap=shape.softcap)
    problem = Problem("cuda", DTYPES[shape.dtype], shape.group, 1, shape.head_dim, shape.head_dim_v, options,
                      needs_backward=needs_backward, capability=capability)  # fmt: skip
    return Fa4Backend().why_not(problem)


def _call(wheel: Wheel, shape: Shape, capability: tuple[int, int]) -> None:
    """A forward and, if there is one, a backward, on tensors without values."""
    size = block_size(capability, shape.head_dim)

    def empty(*sizes: int, dtype: torch.dtype = DTYPES[shape.dtype]) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="cuda")

    def lists(rows: int, columns: int) -> tuple[Lists, Lists]:
        partial, full = (
            Lists(empty(1, 1, rows, dtype=torch.int32), empty(1, 1, rows, columns, dtype=torch.int32)) for _ in "pf"
        )
        return partial, full

    q, k, v = (
        empty(1, _TOKENS, heads, dim)
        for heads, dim in (
            (_KV_HEADS * shape.group, shape.head_dim), (_KV_HEADS, shape.head_dim), (_KV_HEADS, shape.head_dim_v),
        )
    )  # fmt: skip
    endpoints = empty(num_endpoints(shape.intervals), _TOKENS, dtype=torch.int32)
    rows, columns = _TOKENS // size.queries, -(-_TOKENS // size.keys)
    options = {"softmax_scale": shape.head_dim**-0.5, "softcap": shape.softcap}
    mask = wheel.mask_of(endpoints, lists(rows, columns), size)
    out, lse, *_ = wheel.forward(q, k, v, pack_gqa=False, return_lse=True, **options, **mask)
    if why_not(shape, capability, needs_backward=True) is None:
        mask = wheel.mask_of(endpoints, lists(columns, rows), size)
        wheel.backward(q, k, v, out, torch.empty_like(out), lse, **options, **mask)


def as_argument(shape: Shape) -> str:
    """A shape as this module's command line takes it."""
    return json.dumps(asdict(shape))


def main(arguments: list[str]) -> int:
    shapes = [Shape(**json.loads(text)) for text in arguments]
    for index, (compiled, seconds) in enumerate(compile_shapes(shapes, target_here())):
        print(json.dumps({"index": index, "compiled": compiled, "seconds": round(seconds, 1)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
