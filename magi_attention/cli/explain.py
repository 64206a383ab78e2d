# SPDX-License-Identifier: Apache-2.0
"""`magi explain`: plan a mask for any number of ranks, without starting any, in tables and pictures."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from magi_attention.cli.common import UsageError, make_folder, need_matplotlib, show_table
from magi_attention.errors import MagiError, NoBackendError
from magi_attention.launch.textfile import read_text

BLOCK, FOLDER = 1024, "runs/explain"  # defaults of --block and --out
_WORTH_SAYING = 0.95  # of the bytes
_MASK_KEYS = ("total", "q_ranges", "k_ranges", "types")
_LENGTHS = ("tokens", "docs", "doc_file")
_MASK_OF = {
    "window": "sliding-window", "global_prefix": "sliding-window", "block": "block-causal", "prefix": "prefix-lm",
}  # fmt: skip


def read_mask(path: Path):
    """Mask of a JSON file with the keys total, q_ranges, k_ranges and types."""
    from magi_attention.api import Mask
    from magi_attention.common.scalars import as_int

    text = read_text(path, "The mask file", UsageError)
    try:
        data = json.loads(text)
        if unknown := [key for key in data if key not in _MASK_KEYS]:
            raise TypeError(f"unknown key {unknown[0]!r}")
        q_ranges, k_ranges, types = data["q_ranges"], data["k_ranges"], data.get("types", "full")
        total = as_int(data["total"], "total")
        return Mask.from_slices(q_ranges, k_ranges, types, total, total).check()
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise UsageError(
            f'{path} is no mask ({error}); it must hold {{"total": N, "q_ranges": [[start, end], ...], '
            '"k_ranges": [[start, end], ...], "types": ["full", "causal", "inv_causal" or "bi_causal", ...]}.'
        ) from None
    except MagiError as error:
        raise UsageError(f"{path}: {error}") from None


def check_options(args: argparse.Namespace) -> None:
    """``UsageError`` for an option that the chosen mask would leave unread, and for two that say the same."""
    given = [name for name in (*_LENGTHS, "mask", *_MASK_OF) if getattr(args, name) is not None]
    if args.mask_file and given:
        raise UsageError(f"{_option(given[0])} and --mask-file exclude each other: the file holds the whole mask.")
    if args.docs is not None and args.doc_file is not None:
        raise UsageError("--docs and --doc-file both say how long the documents are; keep one of them.")
    mask = args.mask or "causal"
    for name, wanted in _MASK_OF.items():
        if name in given and mask != wanted:
            raise UsageError(f"{_option(name)} is for --mask {wanted}, and the mask is {mask}; drop one of them.")
    if args.out is not None and not args.pictures:
        raise UsageError("--out is the folder of the pictures, and --no-pictures makes none; drop one of them.")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def document_lengths(args: argparse.Namespace) -> list[int]:
    """Lengths from --docs or --doc-file, or one document of --tokens."""
    text = args.docs
    if args.doc_file is not None:
        text = read_text(Path(args.doc_file), "The file of --doc-file", UsageError)
    if text is None:
        if args.tokens is None:
            raise UsageError("Say how long the sequence is: --tokens, --docs, --doc-file or --mask-file.")
        return [args.tokens]
    try:
        lengths = [int(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        raise UsageError(
            f"The document lengths must be whole numbers, comma or space between: {error}."
        ) from None
    if not lengths or min(lengths) < 1:
        raise UsageError("Give at least one document, and each with at least one token.")
    if args.tokens is not None and args.tokens != sum(lengths):
        raise UsageError(f"--tokens is {args.tokens}, the documents have {sum(lengths)}; leave --tokens out.")
    return lengths


def build_mask(args: argparse.Namespace):
    from magi_attention.api import Mask

    if args.mask_file:
        return read_mask(Path(args.mask_file))
    cu_seqlens = [0]
    for length in document_lengths(args):
        cu_seqlens.append(cu_seqlens[-1] + length)
    if args.mask == "sliding-window":
        if args.window is None:
            raise UsageError(
                "--mask sliding-window needs --window, the tokens that a query sees before itself."
            )
        return Mask.varlen(cu_seqlens, window=(args.window, 0), global_prefix=args.global_prefix or 0)
    if args.mask == "block-causal":
        return Mask.block_causal(cu_seqlens, BLOCK if args.block is None else args.block)
    if args.mask == "prefix-lm":
        return Mask.prefix_lm(cu_seqlens, args.prefix or 0)
    return Mask.varlen(cu_seqlens, causal=args.mask != "full")


def plan_for(mask, cp_size: int, args: argparse.Namespace, dispatch: str = "min-heap"):
    from magi_attention import config
    from magi_attention.api import DispatchConfig, DistAttnConfig, OverlapConfig, make_plan
    from magi_attention.common.enum import AttnOverlapMode

    alg = {
        "min-heap": config.MinHeapDispatchAlg,
        "locality": config.LocalityDispatchAlg,
        "sequential": config.SequentialDispatchAlg,
    }[dispatch]()
    if args.degree == "dynamic":
        overlap = OverlapConfig(mode=AttnOverlapMode.DYNAMIC, degree=None)
    else:
        overlap = OverlapConfig(degree=args.degree)
    return make_plan(
        mask,
        cp_size,
        config=DistAttnConfig(DispatchConfig(chunk_size=args.chunk_size, alg=alg), overlap),
        num_heads_q=args.heads_q,
        num_heads_kv=args.heads_kv,
        head_dim=args.head_dim,
    )


def better_dispatch(mask, numbers: dict, args: argparse.Namespace) -> str | None:
    """A sentence if dispatch by locality would bring the busiest rank less, at a balance that is about as good."""
    from magi_attention.meta.explain import explain
    from magi_attention.report.describe import readable_bytes

    other = explain(plan_for(mask, args.cp, args, "locality"))
    now, then = (max(found["rows_received"]) * found["row_bytes"] for found in (numbers, other))
    if then >= _WORTH_SAYING * now or other["imbalance"] > numbers["imbalance"] + 0.01:
        return None
    return (
        f"With --dispatch locality (LocalityDispatchAlg) the busiest rank would receive {readable_bytes(then)} in "
        f"place of {readable_bytes(now)}, at an imbalance of {other['imbalance']:.4f}."
    )


def show_kernels(args: argparse.Namespace) -> None:
    """Which backend computes attention of these heads on this machine and why, and what the others say."""
    import torch

    from magi_attention.env import general
    from magi_attention.kernels import AttnOptions, Problem, default_registry

    has_gpu = torch.cuda.is_available()
    problem = Problem(
        "cuda" if has_gpu else "cpu", torch.bfloat16, args.heads_q, args.heads_kv, args.head_dim, args.head_dim,
        AttnOptions(args.head_dim**-0.5), needs_backward=True,
        capability=torch.cuda.get_device_capability() if has_gpu else None,
    )  # fmt: skip
    registry, asked = default_registry(), general.kernel_backend().value
    try:
        why = registry.select(problem, asked, general.is_kernel_backend_explicit())[1]
    except NoBackendError:
        why = f"Backend {asked!r} was asked for and cannot run."
    where = torch.cuda.get_device_name() if has_gpu else "the CPU"
    answers = [[name, reason or "can run"] for name, reason in registry.answers(problem).items()]
    show_table(f"Kernels on {where}, bfloat16", [["backend", "what it says"], *answers])
    print(why)


def command_explain(args: argparse.Namespace) -> int:
    if args.pictures:
        need_matplotlib()
    from magi_attention.meta.explain import explain
    from magi_attention.report import describe

    check_options(args)
    mask = build_mask(args)
    out = make_folder(args.out or FOLDER, "--out") if args.pictures else None
    started = time.perf_counter()
    plan = plan_for(mask, args.cp, args, args.dispatch)
    seconds = time.perf_counter() - started
    numbers = explain(plan)
    show_table(f"Plan for {args.cp} ranks, made in {seconds:.3f} s", describe.overview_table(plan, numbers))
    show_table("Ranks", describe.rank_table(plan, numbers))
    heads = f"{args.heads_kv} K/V heads of {args.head_dim}, 2 bytes an element"
    show_table(f"Communication, K and V ({heads})", describe.volume_table(plan, numbers))
    show_kernels(args)
    advice = None if args.dispatch == "locality" else better_dispatch(mask, numbers, args)
    if advice:
        print(advice)
    if out is not None:
        from magi_attention.report import sections
        from magi_attention.report.html import page

        parts = sections.plan_sections(plan, numbers)
        for section in parts:
            if section.picture is not None:
                name = section.title.lower().replace(",", "").replace(" ", "-")
                (out / f"{name}.png").write_bytes(section.picture)
        lead = f"{mask.name} mask of {mask.total_q:,} tokens over {args.cp} ranks; {heads}."
        text = page("Plan explained", lead, sections.plan_facts(plan, numbers), parts)
        (out / "report.html").write_text(text, encoding="utf-8")
        print(f"Pictures and page: {out / 'report.html'}")
    return 0
