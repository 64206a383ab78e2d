# SPDX-License-Identifier: Apache-2.0
"""Block-sparse and index attention on one device: ours beside FlexAttention, cuDNN, FlashMLA and gathering, in one run.

    python benchmarks/sparse/sparse_bench.py [--masks b128_random_0.1,index_2048] [--seqlens 8K,32K] [--out NAME]

``sparse_cases`` has the patterns. TFLOP/s count the pairs that are computed for, as ``kernel`` counts them, so a whole
tile for a few pairs is not rewarded. ``dense`` is our full mask of as many tokens. Before anything is timed, results
are compared with a reference on a sample of rows. A case begins only while --seconds are not over, and those left out
are named, so one call takes no longer than a machine is lent for.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), *(str(p) for p in Path(__file__).resolve().parents[1:3])]

import torch  # noqa: E402
from case_options import DTYPES, list_of, parse_size  # noqa: E402
from kernel import Result, flops_per_pair, make_inputs, prepare, size_of, table  # noqa: E402
from parts import run_part, told  # noqa: E402
from peers import PEERS, Unfit, missing  # noqa: E402
from peers_backward import by_autograd  # noqa: E402
from picture import draw  # noqa: E402
from progress import steps  # noqa: E402
from result_file import plain_settings, write_results  # noqa: E402
from sparse_cases import DSA_HEAD_DIMS, NAMES, SparseCase, make_case, parse  # noqa: E402
from sparse_check import SparseBackwardCheck, SparseForwardCheck  # noqa: E402
from sparse_peers import available, dense  # noqa: E402

from magi_attention.benchmarking.timing import LONG_LEAD_CYCLES, interleaved_us, reason_of, summary  # noqa: E402


@dataclass
class SparseResult(Result):
    """One implementation on one pattern, length and direction; ``area`` in pairs of one head, ``density`` its share."""

    area: int = 0
    density: float = 0.0


PARTS = {
    "indexer": ("indexer_bench", "the best keys of an indexer, beside cuDNN"),
    "indexer_kl": ("indexer_kl_bench", "the loss of an indexer, beside the backward of attention"),
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog=told(PARTS))
    add = parser.add_argument
    add("--masks", type=list_of(str), default=list(NAMES), metavar="A,B", help=", ".join(NAMES))
    add("--seqlens", type=list_of(parse_size), default="8K,32K", metavar="8K,64K", help="tokens (8K,32K)")
    directions = list_of(str, ("forward", "backward"))
    add("--directions", type=directions, default="forward,backward", metavar="A,B", help="forward, backward")
    add("--heads", type=int, nargs=2, default=(64, 8), metavar=("Q", "KV"), help="heads of block patterns (64 8)")
    add("--index-heads", type=int, default=128, metavar="Q", help="query heads on one kv head, index and DSA (128)")
    add("--head-dim", type=int, default=128, help="of all patterns but DSA's, 576 and 512 (128)")
    add("--dtype", choices=tuple(DTYPES), default="bf16")
    add("--repeats", type=int, default=10, help="timed runs of each, of which the median counts (10)")
    add("--seconds", type=float, default=240.0, help="begin no case after so long (240)")
    add("--only", type=list_of(str), metavar="magi,flex", help="only these implementations")
    add("--out", type=Path, help="write OUT.json and OUT.png")
    return parser


def heads_of(options: argparse.Namespace, mask: str) -> tuple[int, int]:
    return tuple(options.heads) if mask.startswith("b") else (options.index_heads, 1)


def head_dims_of(options: argparse.Namespace, mask: str) -> tuple[int, int]:
    """The head dim of q and k, and that of the values."""
    return DSA_HEAD_DIMS if mask.startswith("dsa") else (options.head_dim, options.head_dim)


def inputs_of(
    case: SparseCase, options: argparse.Namespace, device: str, has_dout: bool
) -> tuple[torch.Tensor | None, ...]:
    """q, k, v and, if asked for, dout; v None where values are columns of k."""
    heads, (dim, dim_v) = heads_of(options, case.name), head_dims_of(options, case.name)
    q, k, v, *rest = make_inputs(case, heads, dim, DTYPES[options.dtype], device, has_dout=has_dout, head_dim_v=dim_v)
    return q, k, v if case.head_dim_v is None else None, *rest


def run_case(mask: str, seqlen: int, direction: str, options: argparse.Namespace, makers: dict) -> list[SparseResult]:
    """All implementations on one pattern; its tensors live as long as this function runs."""
    case = make_case(mask, seqlen)
    is_forward = direction == "forward"
    shared = {"direction": direction, "area": case.area, "density": case.area / seqlen**2}
    results = {n: SparseResult(mask, seqlen, n, **shared) for n in (*makers, *([] if options.only else ["dense"]))}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    as_made = (lambda make: make) if is_forward else partial(by_autograd, is_both=False)
    try:
        tensors = inputs_of(case, options, device, has_dout=not is_forward)
        check = (SparseForwardCheck if is_forward else SparseBackwardCheck)(case, *tensors)
        calls = prepare(case, tensors, {n: as_made(make) for n, make in makers.items()}, results, check)
        if "dense" in results:
            calls["dense"] = as_made(dense)(*tensors, case)
    except Unfit as reason:
        results["dense"].reason = str(reason)
    except torch.OutOfMemoryError as failure:
        return [SparseResult(**{**asdict(r), "reason": r.reason or reason_of(failure)}) for r in results.values()]
    failed: dict[str, str] = {}
    times = interleaved_us(calls, options.repeats, failed, LONG_LEAD_CYCLES, device)
    for name, result in results.items():
        result.reason = failed.get(name, result.reason)
        if name in times and not result.reason:
            area = seqlen**2 if name == "dense" else case.area
            for key, value in summary(times[name]).items():
                setattr(result, key, value)
            operations = flops_per_pair(direction, *head_dims_of(options, mask)) * area * heads_of(options, mask)[0]
            result.tflops = operations / result.median_us / 1e6
            result.samples = [result.tflops]
    return list(results.values())


def settings_of(options: argparse.Namespace) -> list[dict]:
    """One for each kind of pattern, as they differ in heads and head dims."""
    common, found = {**plain_settings(options, ["index_heads"]), "samples": 1}, []
    for kind in ("b", "index", "dsa"):
        if masks := [m for m in options.masks if m.startswith(kind)]:
            dim, dim_v = head_dims_of(options, masks[0])
            own = {"masks": masks, "heads": heads_of(options, masks[0]), "head_dim": dim}
            found.append({**common, **own, **({} if dim == dim_v else {"head_dim_v": dim_v})})
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    if (done := run_part(arguments, PARTS)) is not None:
        return done
    parser = make_parser()
    options = parser.parse_args(arguments)
    makers = available()
    if options.only:
        unknown = [n for n in options.only if n not in makers]
        if unknown:
            parser.error(f"{', '.join(unknown)}: not installed here; there are {', '.join(makers)}.")
        makers = {n: makers[n] for n in makers if n in options.only}
    cases = [(m, s, d) for s in options.seqlens for m in options.masks for d in options.directions]
    for mask, seqlen, _ in cases:
        try:
            parse(mask, seqlen)
        except ValueError as mistake:
            parser.error(str(mistake))
    if not torch.cuda.is_available():
        print("torch sees no GPU, so this runs on the CPU: give short lengths. The times say nothing about GPUs.")
    results: list[SparseResult] = []
    began, left_out = time.monotonic(), []
    for mask, seqlen, direction in steps(cases, lambda c: f"{c[2]} {c[0]}, {size_of(c[1])} tokens"):
        if time.monotonic() - began > options.seconds:
            left_out.append(f"{direction} {mask} {size_of(seqlen)}")
            continue
        found = run_case(mask, seqlen, direction, options, makers)
        results += found
        print(table(found, [r.name for r in found]), flush=True)
        gc.collect()  # graphs of autograd may be in cycles
        torch.cuda.empty_cache()
        if options.out:  # after every case, so that a run that is cut off keeps what it has
            rows = [asdict(r) for r in results]
            lacking = missing({"cudnn_flex": PEERS["cudnn_flex"]})
            write_results(options.out, settings_of(options), results=rows, missing=lacking)
            draw(Path(f"{options.out}.json"))
    if left_out:
        print(f"Left out, as --seconds {options.seconds:g} were over: {', '.join(left_out)}.")
    return 1 if any(r.name == "magi" and r.reason for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
