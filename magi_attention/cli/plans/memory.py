# SPDX-License-Identifier: Apache-2.0
"""`magi explain --memory`: predicted bytes per GPU of a training step, and the longest context that the GPUs hold."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from magi_attention.cli.common import UsageError, show_table, token_count
from magi_attention.cli.plans.budget import RANKS_OF_A_HOST

DEFAULT_GIGABYTES = 80.0
ACTIVATIONS = ("kept", "checkpointed", "offloaded")
LOSSES = ("checkpointed", "torch")
_REMEDIES = "--activations offloaded, --logits-chunk 2048, --mlp-chunk 8192, --head-chunks 2, --offload-parameters"
_NEEDS_MEMORY = {
    "activations": "checkpointed", "keep_attention": False, "mlp_chunk": None, "logits_chunk": None,
    "loss": "checkpointed",
    "offload_parameters": False, "head_chunks": 1, "expert_parallel": 1, "shards": None, "gigabytes": DEFAULT_GIGABYTES,
    "longest_context": False,
}  # fmt: skip


def add_memory_options(explain: argparse.ArgumentParser) -> None:
    group = explain.add_argument_group("memory", "bytes per GPU of a training step; see docs/guides/long-context.md")
    add = group.add_argument
    add("--memory", metavar="CONFIG", help="config.json of a transformers model, which also gives the heads")
    add("--activations", choices=ACTIVATIONS, default="checkpointed", help="of the blocks, between the two passes")
    add("--keep-attention", action="store_true", help="checkpoints have outputs of attention, too")
    add("--mlp-chunk", type=token_count, help="tokens of an MLP at a time; all without it")
    add("--logits-chunk", type=token_count, help="tokens with logits at a time; all without it")
    add("--loss", choices=LOSSES, default="checkpointed", help="of such chunks: torch is its linear_cross_entropy")
    add("--offload-parameters", action="store_true", help="parameters, gradients and optimizer on the host")
    add("--head-chunks", type=int, default=1, help="parts of the kv heads, one after the other")
    add("--expert-parallel", type=int, default=1, help="GPUs over which the experts of a block are spread")
    add("--shards", type=int, help="GPUs over which FSDP shards; --cp without it")
    add("--gigabytes", type=float, default=DEFAULT_GIGABYTES, help="of a GPU, 1e9 bytes each")
    add("--longest-context", action="store_true", help="the longest causal sequence that fits")


def read_memory_options(args: argparse.Namespace) -> None:
    """Reads the config into ``args.shape``, None without --memory, and takes heads from it that were not given."""
    args.shape = None
    if args.memory is None:
        changed = [f"--{name.replace('_', '-')}" for name, x in _NEEDS_MEMORY.items() if getattr(args, name) != x]
        if changed:
            raise UsageError(f"{changed[0]} goes with --memory CONFIG; add it, or drop {', '.join(changed)}.")
        return
    from magi_attention.api import ModelShape

    try:
        config = json.loads(Path(args.memory).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--memory {args.memory} is no config.json of a model: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"--memory {args.memory} holds no JSON object; give the config.json of a model.")
    args.shape = ModelShape.of_config(config)
    known = {"heads_q": args.shape.num_heads_q, "heads_kv": args.shape.num_heads_kv, "head_dim": args.shape.head_dim}
    for name, value in known.items():
        given = getattr(args, name)
        if given not in (None, value):
            raise UsageError(f"--{name.replace('_', '-')} is {given}, and {args.memory} has {value}; drop the option.")
        setattr(args, name, value)


def _is_one_launch(args: argparse.Namespace) -> bool:
    """Up to 8 ranks are taken for one host, where attention is one launch over NVLink."""
    return args.node_size is None and 1 < args.cp <= RANKS_OF_A_HOST


def memory_of(plan: Any, args: argparse.Namespace) -> dict[str, Any]:
    """All figures, bytes and tokens, ready for JSON."""
    from magi_attention.api import TrainingSetup, longest_context

    setup = TrainingSetup(
        shards=args.shards, activations=args.activations, keeps_attention=args.keep_attention,
        mlp_chunk=args.mlp_chunk, logits_chunk=args.logits_chunk, loss=args.loss,
        offloads_parameters=args.offload_parameters, expert_parallel=args.expert_parallel,
        head_chunks=args.head_chunks, is_one_launch=_is_one_launch(args),
    )  # fmt: skip
    use = plan.memory(args.shape, setup)
    found = {**asdict(use), "peak_bytes": use.peak_bytes, "host_bytes": use.host_bytes}
    longest = longest_context(args.shape, args.cp, args.gigabytes, setup) if args.longest_context else None
    return {**found, "num_parameters": args.shape.num_parameters, "longest_context": longest}


def show_memory(found: dict[str, Any], args: argparse.Namespace) -> None:
    from magi_attention.tools.report.describe import readable_bytes

    busiest = max(found["moments"], key=found["moments"].__getitem__)
    rows = [["what", "on the GPU", "on the host"]]
    for name in dict.fromkeys((*found["held"], *found["host"])):
        sizes = (found[where].get(name, 0) for where in ("held", "host"))
        rows.append([name, *(readable_bytes(size) if size else "-" for size in sizes)])
    for name, size in found["moments"].items():
        mark = ", the largest" if name == busiest else ""
        rows.append([f"at a time: {name}{mark}", readable_bytes(size), "-"])
    rows.append(["in all", readable_bytes(found["peak_bytes"]), readable_bytes(found["host_bytes"])])
    title = f"Memory of a training step, {found['num_parameters'] / 1e9:.2f}B parameters, {found['tokens']:,} tokens"
    show_table(f"{title} on rank {found['rank']}", rows)
    way = "in one launch over NVLink" if _is_one_launch(args) else "stage by stage"
    kind = "dense decoder" if args.shape.experts is None else "decoder with experts, each of which gets as many tokens,"
    print(
        f"Predicted for a {kind} in eager PyTorch: bf16, parameters and Adam in float32 under FSDP2, attention {way}. "
        "What CUDA, NCCL and the allocator take is not counted."
    )
    if found["peak_bytes"] > args.gigabytes * 1e9:
        print(f"That is more than a GPU of {args.gigabytes:g} GB has. What makes it less: {_REMEDIES}; more ranks.")
    if args.longest_context:
        print(
            f"{args.cp} GPUs of {args.gigabytes:g} GB hold a causal sequence of {found['longest_context']:,} tokens, "
            "with 6% of a GPU left to CUDA, NCCL and the allocator."
        )
