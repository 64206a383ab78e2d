# SPDX-License-Identifier: Apache-2.0
"""Every rank against every other: `torchrun ... -m magi_attention.benchmarking.collective`.

Times an all-reduce and a send between pairs of ranks, and compares versions, variables and clocks. Rank 0 prints a
table and one line that starts with ``PAIRWISE`` and holds everything as JSON, for `magi doctor`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from datetime import timedelta
from importlib import metadata
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from magi_attention.env import secrets
from magi_attention.version import __version__

MARK = "PAIRWISE "
MAX_RANKS_FOR_ALL_PAIRS = 16
_COMPARED = ("MAGI_ATTENTION_", "NCCL_", "NVSHMEM_", "TORCH_NCCL_", "GLOO_", "CUDA_DEVICE_MAX_CONNECTIONS")
_PACKAGES = ("torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--megabytes", type=int, help="of the all-reduce; 64 on GPUs, 8 on the CPU")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--timeout", type=int, default=60, help="seconds that one exchange may take")
    return parser.parse_args(argv)


def own_facts(device: torch.device) -> dict[str, Any]:
    """What must be equal on all ranks, and where this one is."""
    versions = {"magi_attention": __version__}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    mtus = {p.parent.name: p.read_text().strip() for p in Path("/sys/class/net").glob("*/mtu") if p.parent.name != "lo"}
    return {
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": versions,
        "environment": {n: secrets.shown(n, v) for n, v in sorted(os.environ.items()) if n.startswith(_COMPARED)},
        "mtu": mtus,
    }


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock_offset(rank: int, peer: int, device: torch.device) -> float:
    """Seconds by which the clock of ``peer`` is ahead of rank 0's; only rank 0 gets the number. The
    shortest of several round trips says most."""
    best = (float("inf"), 0.0)
    for _ in range(5):
        stamp = torch.zeros(2, dtype=torch.float64, device=device)
        if rank == 0:
            sent = time.time()
            dist.send(stamp, peer)
            dist.recv(stamp, peer)
            synchronise(device)
            received = time.time()
            theirs_in, theirs_out = stamp.tolist()
            offset = ((theirs_in - sent) + (theirs_out - received)) / 2
            best = min(best, (received - sent, offset))
        elif rank == peer:
            dist.recv(stamp, 0)
            synchronise(device)
            arrived = time.time()
            dist.send(torch.tensor([arrived, time.time()], dtype=torch.float64, device=device), 0)
    return best[1]


def pair_seconds(rank: int, a: int, b: int, data: torch.Tensor, repeats: int) -> float | None:
    """Median seconds for ``data`` to go from a to b and back, halved; on rank a only."""
    if rank not in (a, b):
        return None
    seconds = []
    for _ in range(repeats + 1):  # the first one opens the connection
        started = time.perf_counter()
        if rank == a:
            dist.send(data, b)
            dist.recv(data, b)
        else:
            dist.recv(data, a)
            dist.send(data, a)
        synchronise(data.device)
        seconds.append((time.perf_counter() - started) / 2)
    return median(seconds[1:])


def all_reduce_seconds(data: torch.Tensor, repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 2):
        dist.barrier()
        synchronise(data.device)
        started = time.perf_counter()
        dist.all_reduce(data)
        synchronise(data.device)
        seconds.append(time.perf_counter() - started)
    return median(seconds[2:])


def pairs_of(world: int) -> list[tuple[int, int]]:
    """All pairs, or each rank with the next where there are too many."""
    if world <= MAX_RANKS_FOR_ALL_PAIRS:
        return list(combinations(range(world), 2))
    return [(r, (r + 1) % world) for r in range(world)]


def measure(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Everything, gathered on every rank; numbers that only one rank has are those of that rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mebibytes = args.megabytes or (64 if device.type == "cuda" else 8)
    data = torch.ones(mebibytes * 2**20 // 4, dtype=torch.float32, device=device)
    expected = float(world)
    seconds = all_reduce_seconds(data.clone(), args.repeats)
    check = torch.ones(1024, device=device)
    dist.all_reduce(check)
    is_right = bool((check == expected).all())
    part = data[: max(data.numel() // 8, 1)]
    pairs = {}
    for a, b in pairs_of(world):
        found = pair_seconds(rank, a, b, part, args.repeats)
        if rank == a:
            pairs[f"{a}-{b}"] = part.numel() * 4 / found / 1e9
        dist.barrier()
    offsets = [clock_offset(rank, peer, device) for peer in range(1, world)]
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, {**own_facts(device), "pairs": pairs, "seconds": seconds, "is_right": is_right})
    slowest = max(entry["seconds"] for entry in everyone)
    return {
        "world": world,
        "backend": dist.get_backend(),
        "mebibytes": mebibytes,
        "all_reduce_ms": slowest * 1e3,
        # bus bandwidth as nccl-tests count it: every byte crosses the wire 2 (n - 1) / n times
        "bus_gb_per_s": data.numel() * 4 / slowest * 2 * (world - 1) / world / 1e9,
        "is_right": all(entry["is_right"] for entry in everyone),
        "clock_offsets_s": [0.0, *offsets],
        "pairs_gb_per_s": {name: rate for entry in everyone for name, rate in entry.pop("pairs").items()},
        "ranks": everyone,
    }


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    is_cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    device = torch.device("cpu")
    if is_cuda:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_cuda else "gloo", timeout=timedelta(seconds=args.timeout))
    try:
        found = measure(args, device)
        if dist.get_rank() == 0:
            print(
                f"{found['world']} ranks over {found['backend']}: all-reduce of {found['mebibytes']} MiB "
                f"{found['all_reduce_ms']:.2f} ms, {found['bus_gb_per_s']:.2f} GB/s on the bus"
            )
            for name, rate in found["pairs_gb_per_s"].items():
                print(f"  ranks {name}: {rate:.2f} GB/s")
            print(MARK + json.dumps(found), flush=True)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
