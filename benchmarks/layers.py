# SPDX-License-Identifier: Apache-2.0
"""Sixteen layers of attention, forward and backward, as a training step calls them, with one mask and with new ones.

    python benchmarks/kernel.py layers [--tokens 8K] [--layers 16] [--steps 12] [--longest 2K] [--out OUT]

Each way of calling is timed over whole steps, without a synchronisation between them, once with the same mask in every
step and once with documents that are drawn anew, whose ranges or plans are made within the step. Milliseconds are the
median over rounds; all ways take turns in one process.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from case_options import parse_size
from result_file import plain_settings, write_results

from magi_attention.api import Mask, attend, flex_flash_attn_func, make_plan

SHORTEST = 16
Step = Callable[[Mask], None]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kernel.py layers", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--tokens", type=parse_size, default="8K")
    add("--layers", type=int, default=16)
    add("--steps", type=int, default=12, help="of one round (12)")
    add("--rounds", type=int, default=5)
    add("--longest", type=parse_size, default="2K", help=f"documents have {SHORTEST} to so many tokens (2K)")
    add("--heads", type=int, nargs=2, default=(64, 8), metavar=("Q", "KV"))
    add("--head-dim", type=int, default=128)
    add("--device", default="cuda", choices=("cuda", "cpu"), help="cpu only shows that it runs")
    add("--out", type=Path, help="write OUT.json")
    return parser


def draw_mask(total: int, longest: int, seed: int) -> Mask:
    rng, cu = random.Random(seed), [0]
    while cu[-1] < total:
        cu.append(min(cu[-1] + rng.randint(SHORTEST, longest), total))
    return Mask.varlen(cu, causal=True)


def ways(options: argparse.Namespace) -> dict[str, Callable[[], tuple[Callable[[Mask], object], Callable]]]:
    """For each way of calling: what is made of a mask once a step, and the call of a layer with it."""
    device = torch.device(options.device)

    def on_gpu(mask: Mask):
        q, k, types = (x.pin_memory() if device.type == "cuda" else x for x in host_ranges(mask))
        return tuple(x.to(device, non_blocking=True) for x in (q, k, types))

    def host_ranges(mask: Mask):
        rows = torch.from_numpy(mask.slices.array.astype("int32"))
        return rows[:, 0:2].contiguous(), rows[:, 2:4].contiguous(), rows[:, 4].contiguous()

    return {
        "flex_flash_attn_func": (on_gpu, lambda q, k, v, made: flex_flash_attn_func(q, k, v, *made)[0]),
        "flex_flash_attn_func, ranges on the CPU": (
            host_ranges, lambda q, k, v, made: flex_flash_attn_func(q, k, v, *made)[0],
        ),
        "attend": (lambda mask: make_plan(mask, 1), lambda q, k, v, made: attend(q, k, v, made)[0]),
    }  # fmt: skip


def step_of(make, call, inputs, layers: int) -> Callable[[object], None]:
    q, k, v, dout = inputs

    def step(made: object) -> None:
        outs = [call(q, k, v, made) for _ in range(layers)]
        for out in reversed(outs):
            torch.autograd.grad(out, (q, k, v), dout)

    return step


def main(arguments: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    heads, heads_kv = options.heads
    generator = torch.Generator(options.device).manual_seed(0)
    shapes = [(options.tokens, h, options.head_dim) for h in (heads, heads_kv, heads_kv, heads)]
    inputs = [torch.randn(s, generator=generator, device=options.device).bfloat16() for s in shapes]
    for x in inputs[:3]:
        x.requires_grad_()
    is_gpu = options.device == "cuda"
    synchronize = torch.cuda.synchronize if is_gpu else (lambda: None)
    seeds = itertools.count(1)
    fixed = draw_mask(options.tokens, options.longest, 0)
    times: dict[tuple[str, str], list[float]] = {}
    for round_number in range(options.rounds + 1):  # the first one warms up
        for name, (make, call) in ways(options).items():
            step, known = step_of(make, call, inputs, options.layers), make(fixed)
            step(known)
            for kind in ("one mask", "a new mask each step"):
                new = [draw_mask(options.tokens, options.longest, next(seeds)) for _ in range(options.steps)]
                synchronize()
                start = time.perf_counter()
                for mask in new:
                    step(known if kind == "one mask" else make(mask))
                synchronize()
                if round_number:
                    elapsed = (time.perf_counter() - start) / options.steps
                    times.setdefault((name, kind), []).append(1e3 * elapsed)
    report = {f"{name}: {kind}": round(statistics.median(t), 3) for (name, kind), t in times.items()}
    for name, ms in report.items():
        print(f"{ms:8.2f} ms a step  {name}")
    if options.out:
        write_results(options.out, plain_settings(options), ms_per_step=report)
    return 0
