# SPDX-License-Identifier: Apache-2.0
"""Measures the rates of this machine: `torchrun ... -m magi_attention.benchmarking.tune`, which `magi tune` starts.

All ranks compute at once and then exchange rows at once, as in training; what counts is the slowest rank. Kernels run
through ``flex_flash_attn_func`` and rows travel through the group of ``attend``. Rank 0 writes the file of rates, and
then compares what the rates predict with whole calls of ``attend`` that they were not made from.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist

from magi_attention.api import Mask, attend, flex_flash_attn_func, make_plan
from magi_attention.api.planning.rates import device_name
from magi_attention.comm.transport.base import Transport
from magi_attention.comm.transport.torch import as_transport
from magi_attention.config.rates import (
    BACKWARD_FLOPS,
    FORWARD_FLOPS,
    KernelRate,
    MachineRates,
    keep_rates,
    rates_file,
)
from magi_attention.meta.predict.budget import layer_times


@dataclass(frozen=True)
class Sizes:
    """What is measured: (query heads, kv heads, head dim), tokens of a causal mask, bytes that a rank receives, tokens
    of a rank in the comparison, and how often."""

    shapes: tuple[tuple[int, int, int], ...]
    tokens: tuple[int, ...]
    message_bytes: tuple[int, ...]
    tokens_of_rank: int
    dtype: torch.dtype
    repeats: int


KIB = 2**10
ON_GPU = Sizes(
    ((64, 8, 128), (32, 32, 128), (64, 8, 64), (32, 32, 64), (16, 16, 256)), (2048, 8192, 32_768),
    tuple(4**i * 64 * KIB for i in range(7)), 16_384, torch.bfloat16, 10,
)  # fmt: skip
ON_CPU = Sizes(
    ((4, 1, 64), (4, 4, 64), (4, 1, 128)), (256, 1024), tuple(4**i * 16 * KIB for i in range(6)), 1024, torch.float32, 3
)


class Stopwatch:
    """Median seconds of calls on all ranks at once, the slowest rank's."""

    def __init__(self, transport: Transport, device: torch.device, repeats: int) -> None:
        self._transport, self._device, self._repeats = transport, device, repeats

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def seconds(self, call: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
        """``before`` runs ahead of each call and is not timed; the first two calls do not count."""
        found = []
        for _ in range(self._repeats + 2):
            before()
            self._wait()
            self._transport.barrier()
            begin = perf_counter()
            call()
            self._wait()
            found.append(perf_counter() - begin)
        return max(self._transport.all_gather_object(median(found[2:])))


def random_rows(shape: Sequence[int], sizes: Sizes, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, dtype=sizes.dtype, device=device, requires_grad=True)


def measure_kernel(
    shape: tuple[int, int, int], tokens: int, sizes: Sizes, device: torch.device, watch: Stopwatch
) -> KernelRate:
    heads_q, heads_kv, dim = shape
    q, k, v = (random_rows((tokens, heads, dim), sizes, device) for heads in (heads_q, heads_kv, heads_kv))
    ranges, kind = torch.tensor([[0, tokens]], device=device), torch.ones(1, dtype=torch.int32, device=device)
    made: list[torch.Tensor] = []

    def forward() -> None:
        made[:] = [flex_flash_attn_func(q, k, v, ranges, ranges, kind)[0]]

    dout = torch.randn_like(q)
    seconds = watch.seconds(forward), watch.seconds(lambda: made[0].backward(dout), before=forward)
    values = tokens * (tokens + 1) // 2 * heads_q * dim
    return KernelRate(*shape, tokens, FORWARD_FLOPS * values / seconds[0], BACKWARD_FLOPS * values / seconds[1])


def measure_link(num_bytes: int, transport: Transport, device: torch.device, watch: Stopwatch) -> tuple[int, float]:
    """Bytes that a rank receives from all others together, and seconds of that."""
    others = transport.size - 1
    rows = max(num_bytes // KIB // others, 1)
    splits = [0 if rank == transport.rank else rows for rank in range(transport.size)]
    out, given = (torch.ones(rows * others, KIB // 4, device=device) for _ in range(2))
    seconds = watch.seconds(lambda: transport.all_to_all_v(out, given, splits, splits))
    return rows * others * KIB, seconds


def fit_link(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """``(seconds, bytes per second)`` of ``t = seconds + bytes / rate`` with the least squares of relative errors."""
    size, time = np.array(points, dtype=np.float64).T
    matrix = np.stack([1 / time, size / time], axis=1)
    latency, per_byte = np.linalg.lstsq(matrix, np.ones(len(time)), rcond=None)[0]
    if latency < 0 or per_byte <= 0:  # noise: the least time, and the rate of the largest
        return float(time.min()) if per_byte <= 0 else 0.0, float(size[-1] / time[-1])
    return float(latency), float(1 / per_byte)


def masks(total: int) -> dict[str, Mask]:
    """Those of the comparison; none is the mask of the rates on each rank."""
    ends = sorted({0, total, *np.random.default_rng(0).integers(1, total, 6).tolist()})
    return {"causal": Mask.causal(total), "documents": Mask.varlen(ends, causal=True), "full": Mask.full(total)}


def compare(rates: MachineRates, sizes: Sizes, device: torch.device, watch: Stopwatch, say: Callable) -> None:
    """Prints calls of ``attend``, predicted and measured."""
    world, (heads_q, heads_kv, dim) = dist.get_world_size(), sizes.shapes[0]
    say(f"\nattend over {world} ranks, {heads_q} query heads on {heads_kv} of dim {dim}, ms")
    say(f"{'mask':12s}{'tokens':>9s}{'forward':>10s}{'predicted':>11s}{'backward':>10s}{'predicted':>11s}")
    for name, mask in masks(sizes.tokens_of_rank * world).items():
        plan = make_plan(mask, world, num_heads_q=heads_q, num_heads_kv=heads_kv, head_dim=dim)
        rows = plan.shard_sizes[dist.get_rank()]
        q, k, v = (random_rows((rows, heads, dim), sizes, device) for heads in (heads_q, heads_kv, heads_kv))
        made: list[torch.Tensor] = []

        def forward(q=q, k=k, v=v, plan=plan, made=made) -> None:
            made[:] = [attend(q, k, v, plan)[0]]

        dout = torch.randn_like(q)
        found = watch.seconds(forward), watch.seconds(lambda m=made, d=dout: m[0].backward(d), before=forward)
        times = layer_times(plan, rates, rates.element_bytes)
        cells = [x * 1e3 for pair in zip(found, (t["seconds"] for t in times)) for x in pair]
        say(f"{name:12s}{plan.total_tokens:9d}{cells[0]:10.3f}{cells[1]:11.3f}{cells[2]:10.3f}{cells[3]:11.3f}")


def tune(device: torch.device, sizes: Sizes, path: Path, say: Callable[[str], None]) -> MachineRates:
    """Measures on all ranks; rank 0 writes the file."""
    transport = as_transport(None)
    watch, name = Stopwatch(transport, device, sizes.repeats), device_name(device)
    say(f"{transport.size} ranks on {name}, {str(sizes.dtype).removeprefix('torch.')}; results go to {path}")
    say(f"\n{'kernel, causal':22s}{'tokens':>9s}{'forward, GFLOP/s':>20s}{'backward, GFLOP/s':>20s}")
    kernels = []
    for shape in sizes.shapes:
        for tokens in sizes.tokens:
            rate = measure_kernel(shape, tokens, sizes, device, watch)
            kernels.append(rate)
            what = f"{shape[0]} on {shape[1]}, dim {shape[2]}"
            say(f"{what:22s}{tokens:9d}{rate.forward / 1e9:20,.1f}{rate.backward / 1e9:20,.1f}")
    points = [measure_link(n, transport, device, watch) for n in sizes.message_bytes]
    latency, per_second = fit_link(points)
    say(f"\n{'bytes that a rank receives':28s}{'us':>12s}{'predicted':>12s}{'GB/s':>9s}")
    for size, seconds in points:
        predicted = latency + size / per_second
        say(f"{size:<28,d}{seconds * 1e6:12.1f}{predicted * 1e6:12.1f}{size / seconds / 1e9:9.2f}")
    rates = MachineRates(
        device=name, ranks=transport.size, dtype=str(sizes.dtype).removeprefix("torch."),
        element_bytes=sizes.dtype.itemsize, kernels=tuple(kernels), link_bytes_per_s=per_second, link_latency_s=latency,
        is_measured=True,
    )  # fmt: skip
    if transport.rank == 0:
        keep_rates(path, rates)
    compare(rates, sizes, device, watch, say)
    return rates


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--file", type=Path, help="in place of MAGI_ATTENTION_RATES_FILE")
    args = parser.parse_args(argv)
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    try:
        is_first = dist.get_rank() == 0
        sizes = ON_GPU if args.device == "cuda" else ON_CPU
        tune(device, sizes, args.file or rates_file(), lambda text: print(text, flush=True) if is_first else None)
        gc.collect()  # nothing may keep the group alive beyond its end
        dist.barrier()  # a rank that leaves while another still works can abort as its connections close
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
