# SPDX-License-Identifier: Apache-2.0
"""`magi precompile`: kernels of FlashAttention-4 ahead of their first call, for this GPU or another one."""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path

from magi_attention.cli.common import UsageError, make_folder, num_cores


def add_precompile(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "precompile", help="compile kernels of FlashAttention-4 (backend fa4) before a run needs them"
    )
    parser.set_defaults(function=command_precompile)
    parser.add_argument("--capability", help="compute capability: 9.0, 10.0 or 10.3; that of this GPU without it")
    parser.add_argument("--sms", type=int, help="number of SMs of the GPU; that of this GPU without it")
    parser.add_argument("--head-dims", default="128", help="such as 64,128,192:128, the latter of q and k, and of v")
    parser.add_argument("--groups", default="8", help="query heads for each kv head, such as 1,4,8")
    parser.add_argument("--intervals", default="1,2", help="most intervals of keys that a query of a mask sees")
    parser.add_argument("--dtypes", default="bf16", help="bf16, fp16 or both with a comma")
    parser.add_argument("--softcap", type=float, default=0.0)
    parser.add_argument("--jobs", type=int, default=num_cores(), help="processes; each takes a core and 1 GB")
    parser.add_argument("--out", help="folder of the kernels; where calls on this machine look without it")


def command_precompile(args: argparse.Namespace) -> int:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from magi_attention.kernels.fa4 import objects, wheel
    from magi_attention.kernels.fa4.compile_jobs import compile_all
    from magi_attention.kernels.fa4.precompile import ARCHS

    if args.jobs < 1:
        raise UsageError(f"--jobs is {args.jobs}; give 1 or more processes.")
    if not wheel.is_installed():
        raise UsageError(f"flash-attn-4 is not installed; {wheel.HINT}.")
    capability, num_sms = _gpu(args)
    if capability not in ARCHS:
        known = ", ".join(f"{major}.{minor}" for major, minor in ARCHS)
        raise UsageError(f"FlashAttention-4 takes lists of blocks on {known} only; {args.capability} is another GPU.")
    shapes, begin, compiled = _shapes(args, capability), time.monotonic(), 0
    folder = make_folder(Path(args.out) if args.out else objects.own_folder().parent, "--out")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("kinds of calls", total=len(shapes))
        for done in compile_all(shapes, capability, num_sms, folder, args.jobs):
            compiled += done.compiled
            progress.advance(task)
    seconds = time.monotonic() - begin
    print(f"{compiled} kernels were compiled in {seconds:.0f} s; all of {len(shapes)} kinds of calls are in {folder}.")
    if args.out:
        print(f"Calls find them with MAGI_ATTENTION_FFA_FA4_CACHE_DIR={folder}.")
    return 0


def _gpu(args: argparse.Namespace) -> tuple[tuple[int, int], int]:
    """Compute capability and number of SMs, of the options or of the GPU here."""
    import torch

    if args.capability is None and args.sms is None and torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        return (device.major, device.minor), device.multi_processor_count
    if args.capability is None or args.sms is None:
        raise UsageError(
            "Say which GPU the kernels are for: --capability and --sms, such as --capability 10.0 --sms 148 for a B200."
        )
    major, dot, minor = args.capability.partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal()) or args.sms < 1:
        raise UsageError(f"--capability {args.capability} --sms {args.sms} name no GPU; give such as 10.0 and 148.")
    return (int(major), int(minor)), args.sms


def _shapes(args: argparse.Namespace, capability: tuple[int, int]) -> list:
    """Every combination of the options, once each, in order; a combination without kernels is refused."""
    from magi_attention.kernels.fa4.precompile import DTYPES, Shape, why_not

    dims = [_numbers("--head-dims", text, ":") for text in args.head_dims.split(",")]
    if any(len(pair) > 2 for pair in dims):
        raise UsageError(f"--head-dims is {args.head_dims}; give one number each, or two as 192:128.")
    dtypes = args.dtypes.split(",")
    if unknown := [name for name in dtypes if name not in DTYPES]:
        raise UsageError(f"--dtypes has {unknown[0]!r}; the kernels are for {' and '.join(DTYPES)}.")
    groups, intervals = (_numbers(f"--{name}", getattr(args, name), ",") for name in ("groups", "intervals"))
    shapes = [
        Shape(pair[0], pair[-1], group, most, dtype, args.softcap)
        for pair, group, most, dtype in itertools.product(dims, groups, intervals, dtypes)
    ]
    for shape in shapes:
        if reason := why_not(shape, capability):
            raise UsageError(reason)
    return list(dict.fromkeys(shapes))


def _numbers(option: str, text: str, separator: str) -> list[int]:
    words = text.split(separator)
    if not all(word.isdecimal() and int(word) for word in words):
        raise UsageError(f"{option} has {text!r}; give whole numbers above 0.")
    return [int(word) for word in words]
