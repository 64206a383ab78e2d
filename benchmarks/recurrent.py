# SPDX-License-Identifier: Apache-2.0
"""A gated delta layer over several ranks, forward and backward: by states, contiguous shards and heads.

    torchrun --nproc-per-node 4 benchmarks/context_parallel.py recurrent --tokens 32K,64K,128K [--out OUT]

Packed documents are dispatched as attention wants them. ``consecutive`` is the same layer by states where each rank
holds consecutive tokens from the start, which attention pays for. Milliseconds are those of the slowest rank, the
median over rounds in which all take turns. Before that, outs of the three ways over one plan are compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from case_options import DTYPES, list_of, parse_size
from cp_timing import Clock, Step, device_ms, over_ranks, with_both
from layers import draw_mask
from picture import short
from progress import steps
from result_file import plain_settings, write_results

from magi_attention.api import (
    DispatchConfig,
    DistAttnConfig,
    Plan,
    RecurrentShape,
    SequentialDispatchAlg,
    make_plan,
    run_recurrent,
)
from magi_attention.cli.common import show_table
from magi_attention.functional.recurrent.layers import Kernel
from magi_attention.integrations.recurrent_kernels import attn_gym_kernel, fla_kernel

WAYS = ("states", "contiguous", "heads")
CONSECUTIVE = "consecutive"
KERNELS = ("fla", "attn_gym", "torch")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="context_parallel.py recurrent", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--tokens", type=list_of(parse_size), default="32K,64K,128K", help="of the sequence (32K,64K,128K)")
    add("--longest", type=parse_size, default="32K", help="documents have 16 to so many tokens (32K)")
    add("--heads", type=int, default=32, help="of values (32)")
    add("--key-heads", type=int, help="of queries and keys; as many as of values without it")
    add("--dims", type=int, nargs=2, default=(128, 128), metavar=("K", "V"), help="of a head (128 128)")
    add("--dtype", choices=tuple(DTYPES), default="bf16")
    add("--max-fragments", type=int, default=4, help="ranges of tokens of a rank (4)")
    add("--kernel", choices=KERNELS, help="fla on GPUs; on the CPU torch, by tokens, which only shows that it runs")
    add("--rounds", type=int, default=5)
    add("--repeats", type=int, default=5, help="timed runs of a round (5)")
    add("--out", type=Path, help="write OUT.json")
    return parser


def by_tokens(value: torch.Tensor, initial: torch.Tensor, cu_seqlens: torch.Tensor, *inputs: torch.Tensor):
    """The gated delta rule, one token after another."""
    times = value.shape[1] // inputs[0].shape[1]
    q, k = (x.repeat_interleave(times, dim=1).to(initial.dtype) for x in inputs[:2])
    decay, beta = (x.to(initial.dtype)[..., None] for x in inputs[2:])
    bounds, out, final = cu_seqlens.tolist(), [], []
    for begin, end, state in zip(bounds[:-1], bounds[1:], initial):
        for t in range(begin, end):
            state = decay[t].exp()[..., None] * state
            new = beta[t] * (value[t].to(initial.dtype) - torch.einsum("hk,hkv->hv", k[t], state))
            state = state + k[t][..., None] * new[:, None]
            out.append(q.shape[-1] ** -0.5 * torch.einsum("hk,hkv->hv", q[t], state))
        final.append(state)
    return torch.stack(out).to(value.dtype), torch.stack(final)


def kernel_of(name: str) -> Kernel:
    if name == "fla":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return fla_kernel(chunk_gated_delta_rule)
    if name == "attn_gym":
        from attn_gym.linear import chunk_gdn

        return attn_gym_kernel(chunk_gdn)
    return by_tokens


def plans_of(tokens: int, options: argparse.Namespace) -> dict[str, Plan]:
    """That of attention, and the one that gives each rank consecutive tokens."""
    mask, world = draw_mask(tokens, options.longest, 0), dist.get_world_size()
    few = DistAttnConfig(DispatchConfig(max_fragments=options.max_fragments))
    size = max(tokens // world // 8, 1)
    return {
        "attention": make_plan(mask, world, few),
        CONSECUTIVE: make_plan(mask, world, DistAttnConfig(DispatchConfig(size, alg=SequentialDispatchAlg()))),
    }


def inputs_of(plan: Plan, options: argparse.Namespace, device: torch.device) -> list[torch.Tensor]:
    """value, q, k, log decay, beta of this rank's tokens, and the gradient of out."""
    draw, rows = torch.Generator(device).manual_seed(dist.get_rank()), plan.shard_sizes[dist.get_rank()]
    heads, dtype, (key, width) = options.heads, DTYPES[options.dtype], options.dims

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(rows, *shape, generator=draw, device=device)

    q, k = (torch.nn.functional.normalize(normal(options.key_heads or heads, key), dim=-1).to(dtype) for _ in range(2))
    value, dout = (normal(heads, width).to(dtype) for _ in range(2))
    inputs = [value, q, k, -normal(heads).abs() / 8, normal(heads).sigmoid().to(dtype)]
    return [*(x.requires_grad_() for x in inputs), dout]


def step_of(run: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor], dout: torch.Tensor) -> Step:
    def backward(outs: list) -> list:
        return [torch.autograd.grad(out, inputs, dout) for out in reversed(outs)]

    return Step(run, backward)


def measure(tokens: int, options: argparse.Namespace, clock: Clock) -> list[dict[str, Any]]:
    """A row for each way and ``consecutive``."""
    plans, kernel, key = plans_of(tokens, options), kernel_of(options.kernel), options.dims[0]
    shape = RecurrentShape(
        options.heads, *options.dims, key_heads=options.key_heads, element_bytes=DTYPES[options.dtype].itemsize
    )
    explained = {name: plan.explain(recurrent=shape) for name, plan in plans.items()}
    tensors = {name: inputs_of(plan, options, clock.device) for name, plan in plans.items()}
    names = {way: ("attention", way) for way in WAYS if explained["attention"]["recurrent"][way] is not None}
    names[CONSECUTIVE] = (CONSECUTIVE, "states")

    def call(of: str, way: str) -> torch.Tensor:
        value, *inputs, _ = tensors[of]
        return run_recurrent(kernel, value, key, plans[of], inputs=inputs, way=way)

    with torch.no_grad():
        outs = {way: call(*names[way]) for way in names if way != CONSECUTIVE}
        scale = outs["states"].abs().max()
        differences = {way: float((out - outs["states"]).abs().max() / scale) for way, out in outs.items()}
        del outs
    times: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    # The first round warms up: kernels of libraries are compiled in it, which takes minutes.
    todo = [(number, name) for number in range(options.rounds + 1) for name in names]
    for number, name in steps(todo, lambda x: f"{short(tokens)} tokens, round {x[0]}, {x[1]}", dist.get_rank() == 0):
        of, way = names[name]
        step = step_of(lambda of=of, way=way: call(of, way), tensors[of][:-1], tensors[of][-1])
        found = with_both(over_ranks(device_ms(step, clock, 1, options.repeats), clock.device))
        if number:
            for phase, values in found.items():
                times[name].setdefault(phase, []).append(statistics.median(values))
    return [
        {
            "tokens": tokens, "way": name, "ms": {p: round(statistics.median(t), 4) for p, t in times[name].items()},
            "rounds_ms": [round(t, 4) for t in times[name]["both"]], "imbalance": explained[of]["imbalance"],
            "fragments": max(explained[of]["fragments"]), "difference": differences.get(name),
            **explained[of]["recurrent"][way], "is_auto": explained[of]["recurrent"]["way"] == way,
        }
        for name, (of, way) in names.items()
    ]  # fmt: skip


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Milliseconds, both as a multiple of ``consecutive``, and MiB that come to the rank which gets most."""
    base = {row["tokens"]: row["ms"]["both"] for row in rows if row["way"] == CONSECUTIVE}
    lines = [["tokens", "way", "auto", "forward", "backward", "both", "ratio", "MiB"]]
    for row in rows:
        ms, moved = row["ms"], row["busiest_bytes"] / 2**20
        numbers = [f"{ms[phase]:.2f}" for phase in ("forward", "backward", "both")]
        share = f"{ms['both'] / base[row['tokens']]:.2f}"
        lines.append([f"{row['tokens']:,}", row["way"], "*" * row["is_auto"], *numbers, share, f"{moved:.1f}"])
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        parser.error("run it by torchrun, with two ranks or more.")
    has_gpu = torch.cuda.is_available()
    options.kernel = options.kernel or ("fla" if has_gpu else "torch")
    try:
        kernel_of(options.kernel)
    except ImportError as missing:
        parser.error(f"--kernel {options.kernel}: {missing}; install it, or give another of {', '.join(KERNELS)}.")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo", timeout=timedelta(seconds=300))
    try:
        clock = Clock(device)
        rows = [row for tokens in options.tokens for row in measure(tokens, options, clock)]
        if dist.get_rank() == 0:
            show_table(f"Gated delta rule on {dist.get_world_size()} ranks, {options.kernel}, ms", table(rows))
            print("Ratio: both beside consecutive. MiB: to the rank that gets most, in a forward. auto takes *.")
            if options.out is not None:
                write_results(options.out, plain_settings(options) | {"world": dist.get_world_size()}, results=rows)
    finally:
        dist.destroy_process_group()
    return 0
