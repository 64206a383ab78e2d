# SPDX-License-Identifier: Apache-2.0
"""What the numbers of ``pairwise`` mean: bandwidth, links, clocks, versions and variables over all ranks."""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from statistics import median
from typing import Any

from magi_attention.tools.doctor.finding import ERROR, OK, SKIPPED, WARNING, Finding
from magi_attention.tools.doctor.gpu_checks import no_gpu
from magi_attention.tools.doctor.system import System

MARK = (
    "PAIRWISE "  # of the line of benchmarking/collective.py, which this module does not import because it needs torch
)
# GPU name -> GB/s on the bus that a 64 MiB all-reduce inside one NVLink domain must reach; a healthy machine has
# about twice as much, one whose rows go through the host a fraction.
LEAST_BUS_GB_PER_S = {"H100": 80, "H200": 80, "H800": 40, "B200": 150, "B300": 150, "GB200": 150, "A100": 60}
MAX_SKEW_S = 1.0
SLOW_PAIR = 0.5  # of the median


def parse_output(text: str) -> dict[str, Any] | None:
    """The numbers of a run of benchmarking/collective.py from what it printed; None if it did not get that far."""
    match = re.search(rf"{MARK}(\{{.*\}})\s*$", text, re.MULTILINE)
    return json.loads(match[1]) if match else None


def check_all_reduce(data: dict[str, Any]) -> Finding:
    rate, world = data["bus_gb_per_s"], data["world"]
    if world < 2:
        return Finding("nccl", SKIPPED, "one rank has nobody to talk to")
    evidence = (
        f"all-reduce of {data['mebibytes']} MiB over {world} ranks ({data['backend']}): {rate:.2f} GB/s on the bus"
    )
    if not data["is_right"]:
        return Finding("nccl", ERROR, f"{evidence}; the sum is wrong", "NCCL_DEBUG=INFO magi doctor --pairwise")
    names = {entry["device"] for entry in data["ranks"]}
    least = min((LEAST_BUS_GB_PER_S[k] for k in LEAST_BUS_GB_PER_S if any(k in n for n in names)), default=None)
    if data["backend"] != "nccl" or least is None or len({e["host"] for e in data["ranks"]}) > 1:
        return Finding("nccl", OK, evidence)
    if rate < least:
        remedy = "NCCL_DEBUG=INFO shows the transport; see p2p and env, and unset NCCL_P2P_DISABLE"
        return Finding("nccl", WARNING, f"{evidence}; at least {least} are usual for these GPUs", remedy)
    return Finding("nccl", OK, f"{evidence}, at least {least} are usual")


def check_pairs(data: dict[str, Any]) -> Finding:
    """Are some links much slower than others of their kind, inside a host and between hosts?"""
    hosts = [entry["host"] for entry in data["ranks"]]
    kinds = defaultdict(dict)
    for name, rate in data["pairs_gb_per_s"].items():
        a, b = map(int, name.split("-"))
        kinds["inside hosts" if hosts[a] == hosts[b] else "between hosts"][name] = rate
    parts, slow = [], []
    for kind, rates in sorted(kinds.items()):
        middle = median(rates.values())
        worst = min(rates, key=rates.__getitem__)
        parts.append(f"{kind} {middle:.2f} GB/s (slowest {rates[worst]:.2f}, ranks {worst})")
        if rates[worst] < SLOW_PAIR * middle:
            a, b = map(int, worst.split("-"))
            slow.append(f"ranks {worst} ({hosts[a]}, {hosts[b]})")
    evidence = "; ".join(parts) or "one rank has no pairs"
    if slow:
        return Finding(
            "link", WARNING, f"{evidence}: {slow[0]} is far behind", "magi doctor on both hosts; nvidia-smi topo -m"
        )
    return Finding("link", OK, evidence)


def check_clock_skew(data: dict[str, Any]) -> Finding:
    offsets = data["clock_offsets_s"]
    rank = max(range(len(offsets)), key=lambda r: abs(offsets[r]))
    host = data["ranks"][rank]["host"]
    evidence = f"clocks differ by up to {abs(offsets[rank]):.4f} s (rank {rank} on {host})"
    if abs(offsets[rank]) > MAX_SKEW_S:
        return Finding("time", WARNING, evidence, f"systemctl restart chronyd (on {host})")
    return Finding("time", OK, evidence)


def check_equal(data: dict[str, Any], field: str, check: str, status: str, remedy: str) -> Finding:
    """``field`` of every rank holds the same words."""
    first = data["ranks"][0]
    for rank, entry in enumerate(data["ranks"]):
        mine, theirs = first[field], entry[field]
        for name in sorted({*mine, *theirs}):
            if mine.get(name) != theirs.get(name):
                evidence = (
                    f"{name} is {mine.get(name, 'unset')} on rank 0 ({first['host']}) and "
                    f"{theirs.get(name, 'unset')} on rank {rank} ({entry['host']})"
                )
                return Finding(check, status, evidence, remedy.format(name=name))
    return Finding(check, OK, f"{field} equal on {len(data['ranks'])} ranks")


def group_findings(data: dict[str, Any]) -> list[Finding]:
    return [
        check_all_reduce(data),
        check_pairs(data),
        check_clock_skew(data),
        check_equal(data, "versions", "same", ERROR, "install the same {name} on every node, or use one image"),
        check_equal(data, "environment", "envs", WARNING, "--env {name}=... sets it on every node"),
        check_equal(data, "mtu", "mtu", WARNING, "ip link set {name} mtu ... to the same value on every node"),
    ]


def check_bandwidth(system: System) -> Finding:
    """All GPUs of this machine in one all-reduce."""
    if reason := no_gpu(system):
        return Finding("nccl", SKIPPED, reason)
    if len(system.gpus) < 2:
        return Finding("nccl", SKIPPED, "one GPU has nobody to talk to")
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    argv += [
        "--nproc-per-node",
        str(len(system.gpus)),
        "-m",
        "magi_attention.benchmarking.collective",
        "--device",
        "cuda",
    ]
    data = parse_output(system.run([*argv, "--timeout", "30"], 120) or "")
    if data is None:
        evidence = f"an all-reduce over {len(system.gpus)} GPUs failed or took more than two minutes"
        return Finding("nccl", ERROR, evidence, "NCCL_DEBUG=INFO magi doctor --pairwise")
    return check_all_reduce(data)
