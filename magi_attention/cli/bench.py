# SPDX-License-Identifier: Apache-2.0
"""`magi bench kernel | sparse | cp | comm | planner | train`: a benchmark, its page, and a baseline beside it.

The scripts of `benchmarks/` measure and write records; `benchmarks/report.py` makes the page of them. Both are in the
repository and not in the wheel. Here are the defaults, and the command lines.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from magi_attention.cli.common import (
    UsageError,
    child_environment,
    make_folder,
    need_matplotlib,
    num_cores,
    run_child,
    source_file,
    torchrun,
)
from magi_attention.cli.run import choose_device

ALL = "full,causal,varlen_full,varlen_causal,sliding_window_causal,varlen_block_causal"


@dataclass(frozen=True)
class Benchmark:
    """``options``: option of the command -> that of the script. ``gpu`` and ``cpu``: their values where none is given.
    ``gpu_fixed`` and ``cpu_fixed``: more arguments of the script. ``by_torchrun`` starts it once for each rank."""

    script: str
    text: str
    options: Mapping[str, str]
    gpu: Mapping[str, str] = field(default_factory=dict)
    cpu: Mapping[str, str] = field(default_factory=dict)
    gpu_fixed: str = ""
    cpu_fixed: str = ""
    by_torchrun: bool = False


_SHAPE = {"only": "--only", "heads": "--heads", "head_dim": "--head-dim", "dtype": "--dtype", "repeats": "--repeats"}
_SMALL = {"heads": "4,2", "head_dim": "32", "dtype": "fp32", "repeats": "5"}
BENCHMARKS = {
    "kernel": Benchmark(
        "kernel.py",
        "attention on one device, the functions that you call beside FlashAttention, cuDNN and FlexAttention",
        {"masks": "--masks", "sizes": "--seqlens", **_SHAPE},
        gpu={"sizes": "4K,16K"},
        cpu={"masks": "full,causal,varlen_causal", "sizes": "512,1K", "only": "magi,magi_attend,fa2", **_SMALL},
        gpu_fixed="--samples 1",
        cpu_fixed="--samples 1",
    ),
    "sparse": Benchmark(
        "sparse/sparse_bench.py",
        "block-sparse and index attention on one device, beside FlexAttention, cuDNN and gathering",
        {"masks": "--masks", "sizes": "--seqlens", **_SHAPE},
        cpu={
            "masks": "b64_random_0.2,b64_window,b64_video,index_32", "sizes": "512", "only": "magi,magi_blocks,gather",
            **_SMALL,
        },
        cpu_fixed="--index-heads 4",
    ),
    "cp": Benchmark(
        "context_parallel.py",
        "attention of one sequence over several ranks, beside ring, all-gather, Ulysses, USP and torch's",
        {"masks": "--masks", "sizes": "--tokens", **_SHAPE},
        gpu={"sizes": "8K"},
        cpu={
            "masks": "causal,varlen_causal", "sizes": "256", **_SMALL,
            "only": "one_gpu,magi,magi_a2av_0,magi_a2av_1,ring,all_gather,ulysses",
        },
        gpu_fixed="--packs 1 --rounds 3 --repeats 4 --wall-repeats 2",
        cpu_fixed="--packs 1 --wall-repeats 2 --wall-layers 2 --kernel-repeats 2",
        by_torchrun=True,
    ),
    "comm": Benchmark(
        "group_collectives.py",
        "rows of K and V between ranks, beside plain copies and torch's collectives",
        {"sizes": "--rows", "repeats": "--repeats"},
        cpu={"sizes": "64,1K", "repeats": "5"},
        by_torchrun=True,
    ),
    "planner": Benchmark(
        "planner.py",
        "what a new mask costs the host: from the mask to the plan of a rank, up to 4M tokens and 1,024 ranks",
        {"masks": "--masks", "repeats": "--repeats"},
    ),
    "train": Benchmark(
        "train.py",
        "training steps of a Llama with FSDP2, beside torch's attention",
        {"sizes": "--seq-lens", "only": "--only", "dtype": "--dtype", "repeats": "--steps"},
        gpu={"config": "1b"},
        cpu={"sizes": "1K", "repeats": "8", "dtype": "fp32"},
    ),
}  # fmt: skip
# option -> (metavar, help)
_HELP = {
    "masks": ("A,B", f"masks, such as {ALL.replace(',', ', ')}"),
    "sizes": ("4K,32K", "tokens of a sequence"),
    "only": ("A,B", "implementations; all that are installed without it"),
    "heads": ("Q,KV", "query and kv heads"),
    "head_dim": ("D", "head dim of q, k and v"),
    "dtype": ("T", "bf16, fp16, fp32"),
    "repeats": ("N", "timed runs of each"),
}
_OWN_HELP = {
    ("sparse", "masks"): ("A,B", "patterns, such as b128_random_0.1, b64_window, b128_video, index_2048, dsa_2048"),
    ("cp", "sizes"): ("8K,16K", "tokens of one rank"),
    ("comm", "sizes"): ("8,4K", "rows that a rank sends to each other rank"),
    ("planner", "masks"): (
        "A,B",
        "packed_128K, documents_1M, tree_4M, blocks_4M, window_4M, packed_4M; all of them without it",
    ),
    ("train", "repeats"): ("N", "steps, of which the second half is timed"),
}
_DEVICE = {"planner": "cpu"}  # where there is no choice


def add_bench(commands: argparse._SubParsersAction) -> None:
    bench = commands.add_parser(
        "bench", help="measure kernels, several ranks, communication, planning or training, and compare",
        description="Measures, and writes a folder runs/NAME with records (JSON), charts (PNG) and a page, "
        "report.html, which needs no network. Without a GPU it runs small sizes on the CPU, so that you can try it.",
    )  # fmt: skip
    bench.set_defaults(function=lambda args: bench.print_help() or 0)
    kinds = bench.add_subparsers(dest="benchmark", metavar="WHAT")
    for name, benchmark in BENCHMARKS.items():
        script = f"benchmarks/{benchmark.script}"
        one = kinds.add_parser(
            name, help=benchmark.text, description=f"Measures {benchmark.text}.",
            epilog=f"Further options of {script} go behind --; `python {script} --help` lists them.",
        )  # fmt: skip
        one.set_defaults(function=command_bench)
        for option in benchmark.options:
            metavar, text = _OWN_HELP.get((name, option), _HELP[option])
            places = (("on the CPU", benchmark.cpu), ("on GPUs", benchmark.gpu))
            told = "; ".join(f"{where} {values[option]}" for where, values in places if option in values)
            text += f" ({told})" if told else ""
            one.add_argument(f"--{option.replace('_', '-')}", metavar=metavar, help=text)
        if name not in _DEVICE:
            one.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
        if benchmark.by_torchrun or name == "train":
            one.add_argument("--ranks", type=int, help="one for each GPU, up to 4; 2 on the CPU")
        if name == "kernel":
            text = "of forward, backward, both; the first two without it"
            one.add_argument("--directions", default="forward,backward", help=text)
        one.add_argument("--name", help="folder under runs/; by the time without it")
        one.add_argument("--baseline", nargs="+", metavar="FILE", help="records to compare with, one benchmark's")
        one.add_argument(
            "--fail-above", type=float, metavar="RATIO",
            help="exit with 1 if a cell takes over RATIO times as long as the baseline, beyond its noise; such as 1.05",
        )  # fmt: skip
        one.add_argument("--show", nargs="+", metavar="FILE", help="measure nothing; make the page of these records")
        one.add_argument("--dry-run", action="store_true", help="print what would be run, and run nothing")


def device_and_ranks(args: argparse.Namespace) -> tuple[str, int]:
    """Where it runs; ("cpu", 1) for what needs one process there."""
    benchmark, wanted = BENCHMARKS[args.benchmark], _DEVICE.get(args.benchmark) or args.device
    if hasattr(args, "ranks"):
        if args.ranks is not None and args.ranks < 1:
            raise UsageError(f"--ranks is {args.ranks}; give at least 1.")
        if args.ranks == 1 and benchmark.by_torchrun:
            raise UsageError(f"--ranks is 1, and {args.benchmark} is about several; give at least 2.")
        device, ranks = choose_device(wanted, args.ranks)
        return device, (args.ranks or 2) if device == "cpu" else ranks
    if wanted == "cpu":
        return "cpu", 1
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda, but torch sees no GPU; `magi doctor` says why.")
    return ("cuda" if torch.cuda.is_available() else "cpu"), 1


def script_arguments(args: argparse.Namespace, device: str) -> list[str]:
    """Those of the script, with the defaults for this device; what stands behind -- comes last and wins."""
    benchmark, words = BENCHMARKS[args.benchmark], []
    defaults = benchmark.gpu if device == "cuda" else benchmark.cpu
    for option, flag in benchmark.options.items():
        value = getattr(args, option) or defaults.get(option)
        if value is not None:
            words += [flag, *(value.replace(",", " ").split() if option == "heads" else [value])]
    words += shlex.split(benchmark.gpu_fixed if device == "cuda" else benchmark.cpu_fixed)
    if args.benchmark == "train":
        words += ["--device", device, *(["--config", benchmark.gpu["config"], "--compile"] if device == "cuda" else [])]
    return [*words, *args.script_arguments]


def commands_of(args: argparse.Namespace, folder: Path, device: str, ranks: int) -> dict[Path, list[str]]:
    """Record -> the command that writes it."""
    benchmark = BENCHMARKS[args.benchmark]
    script, words = str(source_file("benchmarks", benchmark.script)), script_arguments(args, device)
    start = [sys.executable]
    if benchmark.by_torchrun:
        start += torchrun(ranks)
    if args.benchmark == "train":
        words = ["--ranks", str(ranks), *words]
    if args.benchmark != "kernel":
        out = folder / args.benchmark
        return {out.with_suffix(".json"): [*start, script, *words, "--out", str(out)]}
    found = {}
    for direction in args.directions.split(","):
        if direction not in ("forward", "backward", "both"):
            raise UsageError(f"--directions has {direction!r}; give forward, backward, both.")
        out = folder / direction
        found[out.with_suffix(".json")] = [*start, script, "--direction", direction, *words, "--out", str(out)]
    return found


def command_bench(args: argparse.Namespace) -> int:
    report = str(source_file("benchmarks", "report.py"))
    if args.fail_above is not None and not args.baseline:
        raise UsageError("--fail-above compares with a baseline; name its file with --baseline.")
    if missing := [file for file in [*(args.baseline or ()), *(args.show or ())] if not Path(file).is_file()]:
        raise UsageError(f"{missing[0]} is no file; benchmarks/results has the stored records.")
    folder = Path("runs") / (args.name or f"bench-{args.benchmark}-{time.strftime('%Y%m%d-%H%M%S')}")
    if args.show and args.script_arguments:
        raise UsageError("--show measures nothing, so there is nothing for arguments behind --; drop one of them.")
    device, ranks = ("cpu", 1) if args.show else device_and_ranks(args)
    todo = {} if args.show else commands_of(args, folder, device, ranks)
    page = [sys.executable, report, *(args.show or map(str, todo)), "--out", str(folder / "report.html")]
    page += ["--baseline", *args.baseline] if args.baseline else []
    page += ["--fail-above", str(args.fail_above)] if args.fail_above is not None else []
    if args.dry_run:
        print("\n".join(shlex.join(command) for command in [*todo.values(), page]))
        return 0
    need_matplotlib()
    if any(record.exists() for record in todo):
        raise UsageError(f"{folder} already holds a run; choose another --name.")
    make_folder(folder, "--name")
    if device == "cpu" and todo and args.benchmark not in _DEVICE:
        where = f"{ranks} processes on the CPU" if ranks > 1 else "the CPU"
        print(f"No GPU is used: small sizes on {where}, to try the command. The figures say nothing about GPUs.")
    threads = 1 if args.benchmark == "planner" else max(num_cores() // ranks, 1)
    environment = child_environment(threads) | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    code = 0
    for record, command in todo.items():
        print(f"$ {shlex.join(command)}", flush=True)
        code = run_child(command, environment) or code
        if not record.exists():
            print(f"magi bench: {record} was not written; the words above say why.", file=sys.stderr)
            return 1
    return run_child(page, child_environment(num_cores())) or int(code != 0)
