# SPDX-License-Identifier: Apache-2.0
"""`magi tune`: measures kernels and links of this machine, for plans and predictions."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from magi_attention.cli.common import UsageError, child_environment, num_cores, run_child, show_table, torchrun
from magi_attention.cli.run import choose_device

MODULE = "magi_attention.benchmarking.tune"


def add_tune(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("tune", help="measure kernels and links of this machine, for plans and predictions")
    parser.set_defaults(function=command_tune)
    parser.add_argument("--ranks", type=int, help="one for each GPU, all of them; 2 on the CPU")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--file", help="in place of MAGI_ATTENTION_RATES_FILE or ~/.cache/magi_attention/rates.json")
    parser.add_argument("--show", action="store_true", help="measure nothing; print what the file holds")
    parser.add_argument("--json", action="store_true", help="with --show: as JSON")
    parser.add_argument("--dry-run", action="store_true", help="print what would be run, and run nothing")


def command_tune(args: argparse.Namespace) -> int:
    from magi_attention.config.rates import rates_file

    path = Path(args.file) if args.file else rates_file()
    if args.show:
        return show(path, args.json)
    if args.json:
        raise UsageError("--json goes with --show; a run writes its rates to the file.")
    if args.ranks is not None and args.ranks < 2:
        raise UsageError(f"--ranks is {args.ranks}, and links are between several; give at least 2.")
    device, ranks = choose_device(args.device, args.ranks or _all_gpus(args.device))
    ranks = (args.ranks or 2) if device == "cpu" else ranks
    command = [sys.executable, *torchrun(ranks), "-m", MODULE, "--device", device, "--file", str(path.absolute())]
    if args.dry_run:
        print(shlex.join(command))
        return 0
    if device == "cpu" and args.device == "auto":
        print(f"There are no two GPUs here: {ranks} processes on the CPU are measured, which says nothing about GPUs.")
    environment = child_environment(max(num_cores() // ranks, 1))
    return run_child(command, environment | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}))


def _all_gpus(wanted: str) -> int | None:
    """All GPUs of this machine if there are two or more; None leaves the choice."""
    import torch

    gpus = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    return gpus if gpus > 1 else None


def show(path: Path, as_json: bool) -> int:
    from magi_attention.config.rates import read_rates

    entries = read_rates(path)
    if as_json:
        print(json.dumps([asdict(entry) for entry in entries], indent=1))
        return 0
    if not entries:
        raise UsageError(f"{path} holds no rates; run `magi tune`.")
    for entry in entries:
        table = [["query heads on kv heads, dim", "tokens", "forward, TFLOP/s", "backward, TFLOP/s"]]
        for rate in entry.kernels:
            what = f"{rate.heads_q} on {rate.heads_kv}, dim {rate.head_dim}"
            table.append([what, f"{rate.tokens:,}", f"{rate.forward / 1e12:.3f}", f"{rate.backward / 1e12:.3f}"])
        show_table(f"{entry.ranks} ranks on {entry.device}, {entry.dtype}, version {entry.version}", table)
        rate, latency = entry.link_bytes_per_s / 1e9, entry.link_latency_s * 1e6
        print(f"A rank receives {rate:.2f} GB/s, and an exchange takes {latency:.1f} us at least.\n")
    return 0
