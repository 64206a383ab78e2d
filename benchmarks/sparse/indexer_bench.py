# SPDX-License-Identifier: Apache-2.0
"""The best keys of an indexer on one device under a causal mask: ours beside torch and cuDNN, on the same inputs.

    python benchmarks/sparse/sparse_bench.py indexer [--seqlens 8K,32K] [--heads 64] [--keys 2048] [--out NAME]
    python benchmarks/sparse/sparse_bench.py indexer --block-size 64 --keys 32 --heads 4 --separate

With ``--block-size`` the best blocks of so many keys, a query's last one always; with ``--separate`` of each head.

``magi`` is the public function, ``torch`` what it runs where there are no kernels. ``cudnn`` is
``indexer_forward_wrapper`` and ``indexer_top_k_wrapper``, which hold the scores of all pairs; ``cudnn_ordered`` has its
lists ascend and ties go by position, as ours do. TFLOP/s count the multiply-adds of the scores of (query, key) pairs
that are visible. Before anything is timed our lists are compared with scores in float64 on a sample of queries. On a
GPU a second table has the milliseconds of each kernel.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), *(str(p) for p in Path(__file__).resolve().parents[1:3])]

import torch  # noqa: E402
from case_options import DTYPES, list_of, parse_size  # noqa: E402
from kernel import size_of  # noqa: E402
from peers import PEERS, _has, missing  # noqa: E402
from reference import sample_rows  # noqa: E402
from result_file import plain_settings, write_results  # noqa: E402

from magi_attention.api import indexer_topk, indexer_topk_blocks  # noqa: E402
from magi_attention.benchmarking.timing import LONG_LEAD_CYCLES, interleaved_us, reason_of, summary  # noqa: E402
from magi_attention.cli.common import show_table  # noqa: E402
from magi_attention.kernels.indexer import Blocks, Visible  # noqa: E402
from magi_attention.kernels.indexer.topk import best_blocks, best_keys  # noqa: E402
from magi_attention.testing.indexer import assert_best, assert_best_blocks  # noqa: E402

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # queries, keys and weights
Make = Callable[[Inputs, argparse.Namespace], Callable[[], torch.Tensor]]
SAMPLE = 16  # at most so many queries are compared
LOCAL_BLOCKS = 1


@dataclass
class Timed:
    """What an implementation took. ``kernels``: milliseconds of each kernel of one call, by its name."""

    seqlen: int
    name: str
    median_us: float = 0.0
    p10_us: float = 0.0
    p90_us: float = 0.0
    tflops: float = 0.0
    kernels: dict[str, float] = field(default_factory=dict)


@dataclass
class IndexerResult(Timed):
    reason: str = ""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sparse_bench.py indexer", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--seqlens", type=list_of(parse_size), default="8K,32K", metavar="8K,64K", help="tokens (8K,32K)")
    add("--heads", type=int, default=64, help="index heads (64)")
    add("--head-dim", type=int, default=128, help="of these (128)")
    add("--keys", type=int, default=2048, help="or blocks of keys, that each query keeps (2048)")
    add("--block-size", type=int, default=0, help="keys of a block; 0: lists of keys (0)")
    add("--separate", action="store_true", help="a list of blocks for each head, without weights")
    add("--dtype", choices=tuple(DTYPES), default="bf16")
    add("--repeats", type=int, default=10, help="timed runs of each, of which the median counts (10)")
    add("--only", type=list_of(str), metavar="magi,torch", help="only these implementations")
    add("--out", type=Path, help="write OUT.json")
    return parser


def _ours(inputs: Inputs, options: argparse.Namespace) -> Callable[[], torch.Tensor]:
    q, k, weights = inputs
    if options.block_size:
        more = options.keys, options.block_size
        return lambda: indexer_topk_blocks(*inputs, *more, local_blocks=LOCAL_BLOCKS).rows
    assert weights is not None
    return lambda: indexer_topk(q, k, weights, options.keys)


def _torch(inputs: Inputs, options: argparse.Namespace) -> Callable[[], torch.Tensor]:
    q, k, weights = inputs
    bounds = Visible(True, None, None, None, None).bounds(len(q), len(k), q.device)
    if options.block_size:
        more = options.keys, options.block_size, LOCAL_BLOCKS, Blocks(64, 1024)
        return lambda: best_blocks(*inputs, bounds, *more)
    assert weights is not None
    return lambda: best_keys(q, k, weights, bounds, options.keys, Blocks(64, max(1024, options.keys)))


def _cudnn(inputs: Inputs, options: argparse.Namespace, is_ordered: bool) -> Callable[[], torch.Tensor]:
    from cudnn.deepseek_sparse_attention.indexer_forward import indexer_forward_wrapper
    from cudnn.deepseek_sparse_attention.indexer_top_k import indexer_top_k_wrapper

    assert inputs[2] is not None
    q, k, weights = inputs[0][None], inputs[1][None, :, None], inputs[2][None]
    counts = torch.arange(1, q.shape[1] + 1, dtype=torch.int32, device=q.device)

    def run() -> torch.Tensor:
        scores = indexer_forward_wrapper(q, k, weights, ratio=1, qhead_per_kv_head=q.shape[2])["scores"][0]
        best: torch.Tensor = indexer_top_k_wrapper(
            scores, counts, options.keys, return_val=False, deterministic=is_ordered
        )["indices"]  # fmt: skip
        return best

    return run


def available(block_size: int = 0) -> dict[str, Make]:
    """Implementations by name, ours first."""
    found: dict[str, Make] = {"magi": _ours, "torch": _torch}
    if not block_size and _has("cudnn.deepseek_sparse_attention"):
        found |= {"cudnn": partial(_cudnn, is_ordered=False), "cudnn_ordered": partial(_cudnn, is_ordered=True)}
    return found


def draw(seqlen: int, options: argparse.Namespace, device: str) -> Inputs:
    generator = torch.Generator(device).manual_seed(seqlen)
    normal = partial(torch.randn, generator=generator, device=device)
    dtype, heads, dim = DTYPES[options.dtype], options.heads, options.head_dim
    weights = None if options.separate else normal(seqlen, heads)
    return normal(seqlen, heads, dim).to(dtype), normal(seqlen, dim).to(dtype), weights


def some_rows(q: torch.Tensor) -> torch.Tensor:
    """Those of the queries that are compared."""
    sample = sample_rows(len(q))
    return torch.from_numpy(sample[:: -(-len(sample) // SAMPLE)]).to(q.device)


def check(lists: torch.Tensor, inputs: Inputs, options: argparse.Namespace) -> None:
    """A sample of the queries against scores in float64."""
    q, k, weights = inputs
    rows = some_rows(q)
    bounds = torch.stack((torch.zeros_like(rows), rows + 1), 1)
    weights = None if weights is None else weights[rows]
    of = lists[rows], q[rows], k
    if options.block_size:
        assert_best_blocks(*of, weights, bounds, options.keys, options.block_size, LOCAL_BLOCKS)
    else:
        assert weights is not None
        assert_best(*of, weights, bounds, options.keys)


def kernels_of(call: Callable[[], torch.Tensor]) -> dict[str, float]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profile.key_averages():
        name = re.sub(r"[<(].*", "", event.key.removeprefix("void "))
        found[name] = found.get(name, 0.0) + event.device_time_total / 1e3
    return dict(sorted(((n, t) for n, t in found.items() if t > 0), key=lambda item: -item[1]))


def run_case(options: argparse.Namespace, makers: dict[str, Make], seqlen: int, device: str) -> list[IndexerResult]:
    """All implementations on one length."""
    inputs = draw(seqlen, options, device)
    results = {name: IndexerResult(seqlen, name) for name in makers}
    failed: dict[str, str] = {}
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    for name, make in makers.items():
        try:
            call = make(inputs, options)
            lists = call()
        except Exception as failure:
            failed[name] = reason_of(failure)
            continue
        if name == "magi":
            check(lists, inputs, options)
        calls[name] = call
        del lists
    times = interleaved_us(calls, options.repeats, failed, LONG_LEAD_CYCLES, device)
    operations = options.heads * options.head_dim * seqlen * (seqlen + 1)
    for name, result in results.items():
        result.reason = failed.get(name, "")
        if name in times and not result.reason:
            for key, value in summary(times[name]).items():
                setattr(result, key, value)
            result.tflops = operations / result.median_us / 1e6
            result.kernels = kernels_of(calls[name]) if device == "cuda" else {}
    return list(results.values())


def show(block_size: int, results: Sequence[IndexerResult]) -> None:
    rows = [("tokens", "", "ms", "TFLOP/s", "why not")]
    for r in results:
        figures = ("", "") if r.reason else (f"{r.median_us / 1e3:.3f}", f"{r.tflops:.0f}")
        rows.append((size_of(r.seqlen), r.name, *figures, r.reason))
    what = f"blocks of {block_size} keys" if block_size else "keys"
    show_table(f"Best {what} of an indexer, causal", rows)


def sweep(options: argparse.Namespace, run: Callable[[int, str], list], show: Callable[[list], None], **more) -> list:
    """Results of all lengths, shown and written length by length, ``more`` beside them. What ``run`` makes for a length
    and a device lives as long as it runs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        print("torch sees no GPU, so this runs on the CPU: give short lengths. The times say nothing about GPUs.")
    results: list = []
    for seqlen in options.seqlens:
        found = run(seqlen, device)
        show(found)
        parts = [(size_of(r.seqlen), r.name, n, f"{ms:.3f}") for r in found for n, ms in r.kernels.items()]
        if parts:
            show_table("Kernels", [("tokens", "", "kernel", "ms"), *parts])
        results += found
        if options.out:
            write_results(options.out, plain_settings(options), results=[asdict(r) for r in results], **more)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.separate and not options.block_size:
        parser.error("--separate is for lists of blocks; give --block-size, too.")
    makers = available(options.block_size)
    if options.only:
        unknown = [n for n in options.only if n not in makers]
        if unknown:
            parser.error(f"{', '.join(unknown)}: not installed here; there are {', '.join(makers)}.")
        makers = {n: makers[n] for n in makers if n in options.only}
    run, lacking = partial(run_case, options, makers), missing({"cudnn_flex": PEERS["cudnn_flex"]})
    results = sweep(options, run, partial(show, options.block_size), missing=lacking)
    return 1 if any(r.name == "magi" and r.reason for r in results) else 0
