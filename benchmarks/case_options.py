# SPDX-License-Identifier: Apache-2.0
"""Options that the benchmarks of kernels have in common, and the cases that they ask for."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import torch
from masks import ALL_NAMES, WINDOW, Case, make_case

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def parse_size(text: str) -> int:
    """``"4K"`` is 4096, ``"1M"`` 1048576, ``"1000"`` 1000."""
    factor = {"K": 2**10, "M": 2**20}.get(text[-1:].upper(), 1)
    number = text[:-1] if factor > 1 else text
    if not number.isdigit() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no length; give one such as 4K or 1000.")
    return int(number) * factor


def list_of(convert, allowed: Sequence[str] | None = None):
    def parse(text: str) -> list:
        items = [item.strip() for item in text.split(",") if item.strip()]
        for item in items:
            if allowed is not None and item not in allowed:
                raise argparse.ArgumentTypeError(f"{item!r} is unknown; choose from {', '.join(allowed)}.")
        if not items:
            raise argparse.ArgumentTypeError("give at least one, separated by commas.")
        return [convert(item) for item in items]

    return parse


def add_case_options(
    parser: argparse.ArgumentParser, masks: Sequence[str], seqlens: str, samples: int, has_more_masks: bool = False,
    has_more_heads: bool = False,
) -> None:  # fmt: skip
    """With these defaults. ``has_more_masks``: the program knows others and looks at names itself.
    ``has_more_heads``: it takes several pairs of heads, see ``pairs_of_heads``."""
    add = parser.add_argument
    names = None if has_more_masks else ALL_NAMES
    add("--masks", type=list_of(str, names), default=list(masks), metavar="A,B", help=", ".join(ALL_NAMES))
    add("--seqlens", type=list_of(parse_size), default=seqlens, metavar="4K,32K", help=seqlens)
    if has_more_heads:
        add("--heads", type=int, nargs="+", default=(64, 8), metavar="Q KV", help="pairs of query and kv heads (64 8)")
    else:
        add("--heads", type=int, nargs=2, default=(64, 8), metavar=("Q", "KV"), help="query and kv heads (64 8)")
    add("--head-dim", type=int, default=128, help="head dim of q, k and v (128)")
    add("--head-dim-v", type=int, metavar="128", help="head dim of v, where it is another one")
    add("--dtype", choices=tuple(DTYPES), default="bf16")
    add("--samples", type=int, default=samples, help=f"draws of the documents of varlen masks, averaged ({samples})")
    add("--documents", type=parse_size, metavar="4K", help="varlen masks: documents of so many tokens, none drawn")
    add("--window", type=parse_size, metavar="512", help=f"keys that a query sees in its window ({WINDOW})")
    add("--repeats", type=int, default=20, help="timed runs of each, of which the median counts (20)")


def pairs_of_heads(options: argparse.Namespace) -> list[tuple[int, int]]:
    """Query and kv heads of --heads, where a program takes several; ValueError says what is wrong."""
    pairs = list(zip(options.heads[::2], options.heads[1::2]))
    if len(options.heads) % 2 or any(kv < 1 or q < 1 or q % kv for q, kv in pairs):
        raise ValueError("--heads takes pairs, query heads and then kv heads that divide them, such as 64 8 32 32.")
    return pairs


def head_dims_of(options: argparse.Namespace) -> tuple[int, int]:
    """The head dim of q and k, and that of v."""
    return options.head_dim, options.head_dim_v or options.head_dim


def cases_of(options: argparse.Namespace, mask: str, seqlen: int) -> Iterator[Case]:
    """One, or one for each draw of its documents."""
    draws = options.samples if mask.startswith("varlen") and options.documents is None else 1
    for sample in range(draws):
        yield make_case(mask, seqlen, sample, options.documents, options.window)
