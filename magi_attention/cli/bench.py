# SPDX-License-Identifier: Apache-2.0
"""`magi bench`: the benchmarks of the repository, here or in a session."""

from __future__ import annotations

import argparse
import shlex
import sys

from magi_attention.cli import launch
from magi_attention.cli.common import UsageError, child_environment, num_cores, run_child, source_file

# name -> (what torchrun or python starts, does it run on one rank, what it measures)
BENCHMARKS = {
    "kernel": ("benchmarks/kernel.py", True, "attention kernels on one GPU, ours beside cuDNN and FlexAttention"),
    "context_parallel": (
        "benchmarks/context_parallel.py",
        False,
        "distributed attention, ours beside ring, all-gather, Ulysses, USP and torch's, on the same kernel",
    ),
    "collective": ("-m magi_attention.benchmarking.collective", False, "all-reduce and pairs of ranks, NCCL or gloo"),
}


def command_bench(args: argparse.Namespace) -> int:
    if args.benchmark is None:
        if launch.launch_options_given(args) or args.script_arguments:
            raise UsageError("Options and arguments belong to a benchmark; `magi bench` lists them.")
        for name, (_, _, text) in sorted(BENCHMARKS.items()):
            print(f"  {name:16} {text}")
        return 0
    what, is_single, _ = BENCHMARKS[args.benchmark]
    command = what.split() if what.startswith("-m") else [str(source_file(what))]
    command += args.script_arguments
    if not is_single or launch.launch_options_given(args):
        if not is_single and not args.session and not args.spec:
            args.ranks_per_node = args.ranks_per_node or 2
        return launch.launch(args, command, f"bench-{args.benchmark}")
    if args.dry_run:
        print(shlex.join([sys.executable, *command]))
        return 0
    return run_child([sys.executable, *command], child_environment(num_cores()))
