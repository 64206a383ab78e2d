# SPDX-License-Identifier: Apache-2.0
"""The indexer's loss over lists beside the backward of the attention that it learns from, in one run, with equal lists.

    python benchmarks/sparse/sparse_bench.py indexer_kl [--seqlens 8K,32K] [--heads 64] [--keys 2048] [--out NAME]

Attention is MLA's: one kv head of 576 columns, 512 of them values. Each query has random keys of all. ``forward`` and
``backward`` are those of ``indexer_kl`` by prepared lists. ``backward in order`` runs under
``torch.use_deterministic_algorithms``, by the inverted lists that the prepared ones keep; ``inverting`` is what the
first call before it takes to make them.
``attention`` is the backward of ``index_attn_func``, and "share" a time over that one. TFLOP/s count products: in the
forward those of queries and keys of both kinds, in the backward dots, queries' and keys' gradients. Before anything is
timed, divergences and gradients of a sample of queries are compared with those in float64.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

sys.path[:0] = [str(Path(__file__).resolve().parent), *(str(p) for p in Path(__file__).resolve().parents[1:3])]

import torch  # noqa: E402
from case_options import DTYPES, list_of, parse_size  # noqa: E402
from indexer_bench import Timed, kernels_of, some_rows, sweep  # noqa: E402
from kernel import size_of  # noqa: E402

from magi_attention.api import index_attn_func, indexer_kl, prepare_indices  # noqa: E402
from magi_attention.benchmarking.timing import LONG_LEAD_CYCLES, interleaved_us, summary  # noqa: E402
from magi_attention.cli.common import show_table  # noqa: E402
from magi_attention.kernels.index_attn import with_readers  # noqa: E402
from magi_attention.testing.indexer_kl import KlProblem, assert_near  # noqa: E402

Call = Callable[[], object]
T = TypeVar("T")


@dataclass
class KlResult(Timed):
    share: float = 0.0  # of the time of the attention's backward


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sparse_bench.py indexer_kl", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--seqlens", type=list_of(parse_size), default="8K,32K", metavar="8K,64K", help="tokens (8K,32K)")
    add("--heads", type=int, default=64, help="query heads of attention (64)")
    add("--head-dims", type=int, nargs=2, default=(576, 512), metavar=("K", "V"), help="of attention (576 512)")
    add("--index-heads", type=int, default=64, help="heads of the indexer (64)")
    add("--index-dim", type=int, default=128, help="of these (128)")
    add("--keys", type=int, default=2048, help="of each query (2048)")
    add("--dtype", choices=tuple(DTYPES), default="bf16")
    add("--repeats", type=int, default=10, help="timed runs of each, of which the median counts (10)")
    add("--out", type=Path, help="write OUT.json")
    return parser


def draw(seqlen: int, options: argparse.Namespace, device: str) -> KlProblem:
    """The lse is that of attention over the lists."""
    generator = torch.Generator(device).manual_seed(seqlen)
    normal = partial(torch.randn, generator=generator, device=device)
    dtype, (dim, dim_v) = DTYPES[options.dtype], options.head_dims
    q, k = normal(seqlen, options.heads, dim).to(dtype), normal(seqlen, 1, dim).to(dtype)
    lists = torch.randint(0, seqlen, (seqlen, options.keys), generator=generator, device=device, dtype=torch.int32)
    lse = index_attn_func(q, k, None, prepare_indices(lists[:, None], seqlen), head_dim_v=dim_v)[1].lse
    q_index = normal(seqlen, options.index_heads, options.index_dim).to(dtype)
    k_index = normal(seqlen, options.index_dim).to(dtype)
    weights = normal(seqlen, options.index_heads) * (options.index_heads * options.index_dim) ** -0.5
    return KlProblem(q_index, k_index, weights, q, k, lse, lists, dim**-0.5, normal(seqlen))


def check(of: KlProblem, divergence: torch.Tensor, grads: Sequence[torch.Tensor]) -> None:
    """Those of a sample of queries; gradients of keys are sums over all queries."""
    rows = some_rows(of.q)
    want, dq, _, dweights = of.of_queries(rows).truth()
    assert_near("divergence", divergence[rows], want, 1e-4)
    assert_near("dq_index", grads[0][rows], dq, 1e-2)
    assert_near("dweights", grads[2][rows], dweights, 1e-2)


def in_order(call: Callable[[], T]) -> T:
    torch.use_deterministic_algorithms(True)
    try:
        return call()
    finally:
        torch.use_deterministic_algorithms(False)


def calls_of(of: KlProblem, dim_v: int) -> dict[str, Call]:
    """What is timed, by name; checks results first."""
    leaves = [x.requires_grad_() for x in (of.q_index, of.k_index, of.weights)]
    lists = prepare_indices(of.lists[:, None], len(of.k))
    forward = partial(indexer_kl, *leaves, of.q, of.k, of.lse, lists)
    divergence = forward()
    backward = partial(torch.autograd.grad, divergence, leaves, of.grad, retain_graph=True)
    check(of, divergence.detach(), backward())
    ordered = in_order(forward)  # its lists are inverted
    backward_in_order = partial(torch.autograd.grad, ordered, leaves, of.grad, retain_graph=True)
    check(of, ordered.detach(), in_order(backward_in_order))
    attended = [x.detach().requires_grad_() for x in (of.q, of.k)]
    out = index_attn_func(*attended, None, lists, head_dim_v=dim_v)[0]
    dout = torch.randn_like(out)
    attention = partial(torch.autograd.grad, out, attended, dout, retain_graph=True)
    return {
        "forward": forward, "backward": backward, "backward in order": partial(in_order, backward_in_order),
        "inverting": partial(in_order, partial(with_readers, lists)), "attention": attention,
    }  # fmt: skip


def operations(options: argparse.Namespace, seqlen: int) -> dict[str, int]:
    pairs, (dim, dim_v) = 2 * seqlen * options.keys, options.head_dims
    of_dots = options.index_heads * options.index_dim
    backward = 3 * of_dots * pairs
    return {
        "forward": (options.heads * dim + of_dots) * pairs, "backward": backward, "backward in order": backward,
        "inverting": 0, "attention": options.heads * (3 * dim + 2 * dim_v) * pairs,
    }  # fmt: skip


def run_case(options: argparse.Namespace, seqlen: int, device: str) -> list[KlResult]:
    """All of one length."""
    calls = calls_of(draw(seqlen, options, device), options.head_dims[1])
    failed: dict[str, str] = {}
    times = {n: summary(t) for n, t in interleaved_us(calls, options.repeats, failed, LONG_LEAD_CYCLES, device).items()}
    if failed:
        raise RuntimeError(f"{', '.join(failed)} failed while it was timed: {'; '.join(failed.values())}")
    of_attention = times["attention"]["median_us"]
    return [
        KlResult(
            seqlen, name, **times[name], tflops=count / times[name]["median_us"] / 1e6,
            share=times[name]["median_us"] / of_attention, kernels=kernels_of(calls[name]) if device == "cuda" else {},
        )
        for name, count in operations(options, seqlen).items()
    ]  # fmt: skip


def show(results: Sequence[KlResult]) -> None:
    rows = [("tokens", "", "ms", "TFLOP/s", "share")]
    rows += [
        (size_of(r.seqlen), r.name, f"{r.median_us / 1e3:.3f}", f"{r.tflops:.0f}", f"{r.share:.2f}") for r in results
    ]
    of = {r.name: r for r in results}
    ms, share = (sum(getattr(of[n], x) for n in ("forward", "backward")) for x in ("median_us", "share"))
    rows.append((size_of(results[0].seqlen), "forward and backward", f"{ms / 1e3:.3f}", "", f"{share:.2f}"))
    show_table("The indexer's loss beside the attention's backward", rows)


def main(arguments: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    sweep(options, partial(run_case, options), show)
    return 0
