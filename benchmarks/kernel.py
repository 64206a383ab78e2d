# SPDX-License-Identifier: Apache-2.0
"""Attention kernels on six masks: ours beside what is installed, in one run, on the same inputs.

    python benchmarks/kernel.py [--direction forward|backward|both] [--masks causal,varlen_full] [--seqlens 4K,32K]
                                [--out benchmarks/results/NAME]
    python benchmarks/kernel.py --show benchmarks/results/NAME.json
    python benchmarks/kernel.py layers | modes | refit | stalls [--help]

Before anything is timed, every implementation is compared with a float32 reference on a sample of rows. TFLOP/s
count the multiply-adds of the products of each unmasked (q, k) pair and head: forward those of the scores and of out,
backward five (the scores again and the gradients of P, q, k and v), for both all seven, the forward and backward of one
training step timed together. Scores and the gradients of q and k have the head dim of q, the others that of v.
Writes NAME.json with machine, versions and commit, and NAME.png where matplotlib is installed; --show prints what such
a file says, also where there is no GPU. If documents were drawn several times, figures are means, and below the
table are the ratios of single draws.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
from case_options import DTYPES, add_case_options, cases_of, head_dims_of, list_of, pairs_of_heads  # noqa: E402
from masks import NAMES, Case  # noqa: E402
from parts import run_part, told  # noqa: E402
from peers import PEERS, Unfit, available, missing  # noqa: E402
from peers_backward import gradient_makers  # noqa: E402
from picture import draw  # noqa: E402
from progress import steps  # noqa: E402
from reference import ROWS_CHECKED, BackwardCheck, ForwardCheck  # noqa: E402
from result_file import plain_settings, write_results  # noqa: E402

from magi_attention.benchmarking.timing import LONG_LEAD_CYCLES, as_graph, host_us, interleaved_us, reason_of, summary  # noqa: E402
from magi_attention.cli.common import table_text  # noqa: E402

# Per head and head dim: a multiply-add in each product, two of them forward and five backward.
FLOPS_PER_PAIR = {"forward": 4, "backward": 10, "both": 14}
_PRODUCTS = {"forward": (1, 1), "backward": (3, 2), "both": (4, 3)}  # with the head dim of q, and with that of v
# The public functions flex_flash_attn_func and attend; the kernels, with the mask known on the host.
OURS = {"magi", "magi_attend", "magi_host", "magi_det"}
PARTS = {
    "layers": ("layers", "sixteen layers as a training step calls them, with one mask and with new ones"),
    "modes": ("backward_modes", "what each mode of the backward is worth"),
    "refit": ("refit", "the times by which the planner schedules a backward, measured and fitted"),
    "stalls": ("stalls", "where the warps of a kernel wait, from a profile by ncu"),
}
TITLES = {"forward": "forward", "backward": "backward", "both": "forward + backward"}


@dataclass
class Result:
    """One implementation on one mask and length; means over samples."""

    mask: str
    seqlen: int
    name: str
    tflops: float = 0.0
    median_us: float = 0.0
    p10_us: float = 0.0
    p90_us: float = 0.0
    direction: str = "forward"
    error: float = 0.0  # the largest of ``errors``
    errors: dict[str, float] = field(default_factory=dict)  # of out, or of dq, dk and dv
    workspace_bytes: int | None = None  # of our backward
    host_us: float | None = None
    reason: str | None = None
    samples: list[float] = field(default_factory=list)
    heads: list[int] = field(default_factory=list)  # of q, and of k and v

    @property
    def cell(self) -> tuple[str, int, tuple[int, ...]]:
        """What all implementations of a row of the table have in common."""
        return self.mask, self.seqlen, tuple(self.heads)


def flops_per_pair(direction: str, head_dim: int, head_dim_v: int) -> int:
    """Floating point operations of one query head for a pair of a query and a key that it sees."""
    of_q, of_v = _PRODUCTS[direction]
    return 2 * (of_q * head_dim + of_v * head_dim_v)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog=told(PARTS))
    add = parser.add_argument
    directions = "what to time; both: forward and backward of one training step together (forward)"
    add("--direction", choices=tuple(FLOPS_PER_PAIR), default="forward", help=directions)
    add_case_options(parser, NAMES, "1K,2K,4K,8K,16K,32K,64K", samples=4, has_more_heads=True)
    add("--only", type=list_of(str), metavar="magi,fa3", help="only these implementations")
    add("--no-peers", action="store_true", help="only ours")
    add("--graph", action="store_true", help="time CUDA graph replays")
    add("--host", action="store_true", help="also measure host time per call of ours (use short lengths)")
    add("--out", type=Path, help="write OUT.json and OUT.png")
    add("--show", type=Path, metavar="FILE", help="only print the table of such a file; needs no GPU")
    return parser


def make_inputs(
    case: Case, heads: Sequence[int], head_dim: int, dtype: torch.dtype, device: str, seed: int = 0,
    has_dout: bool = False, head_dim_v: int | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """q, k, v and, if asked for, dout (T, H, D), normal: zeros would let the GPU run at a clock that real data do not.

    The first three do not depend on whether there is a fourth.
    """
    generator = torch.Generator(device).manual_seed(seed)
    dim_v = head_dim_v or head_dim
    rows = ((heads[0], head_dim), (heads[1], head_dim), (heads[1], dim_v), (heads[0], dim_v))
    shapes = [(case.seqlen, *row) for row in rows[: 3 + has_dout]]
    return tuple(torch.randn(s, generator=generator, device=device, dtype=torch.float32).to(dtype) for s in shapes)


def prepare(case: Case, tensors, makers: dict, results: dict[str, Result], check=None) -> dict:
    """Callables of the implementations that can run the case and are right; the others get a reason.

    ``tensors`` are q, k, v for calls that give out, and q, k, v, dout for calls that give gradients. ``check`` is by
    default that of ``reference``, by the slices of the case.
    """
    check = check or (ForwardCheck if len(tensors) == 3 else BackwardCheck)(case, *tensors)
    calls = {}
    for name, make in makers.items():
        result = results[name]
        try:
            call = make(*tensors, case)
            errors = check(call())
        except Unfit as reason:
            result.reason = str(reason)
            continue
        except Exception as failure:  # a peer's own failure is a finding, not the end of the run
            result.reason = reason_of(failure)
            continue
        result.errors = {n: max(e, result.errors.get(n, 0.0)) for n, e in errors.items()}
        result.error = max(result.errors.values())
        worst = max(errors, key=errors.__getitem__)
        if errors[worst] > check.tolerance:
            result.reason = f"wrong: relative error {errors[worst]:.3g} of {worst} on {ROWS_CHECKED} rows or fewer"
            continue
        calls[name] = call
    return calls


def graphs_of(calls: dict, results: dict[str, Result]) -> dict:
    """Replays of the calls; those that cannot be captured get a reason."""
    graphs = {}
    for name, call in calls.items():
        try:
            graphs[name] = as_graph(call)
        except Exception as failure:
            results[name].reason = reason_of(failure)
    return graphs


def run_sample(
    case: Case, heads: tuple[int, int], options: argparse.Namespace, makers: dict, results: dict[str, Result]
) -> dict:
    """Spread of the times of each implementation on one case. Its tensors live as long as this function runs."""
    dtype = DTYPES[options.dtype]
    is_forward = options.direction == "forward"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head_dim, head_dim_v = head_dims_of(options)
    tensors = make_inputs(case, heads, head_dim, dtype, device, has_dout=not is_forward, head_dim_v=head_dim_v)
    calls = prepare(case, tensors, {n: m for n, m in makers.items() if not results[n].reason}, results)
    for name in OURS & calls.keys():
        results[name].workspace_bytes = getattr(calls[name], "workspace_bytes", None)
        if options.host:
            calls[name]()
            results[name].host_us = host_us(calls[name])
    if options.graph:
        calls = graphs_of(calls, results)
    failed: dict[str, str] = {}
    # Peers may take the host a millisecond, so it gets a long lead.
    times = interleaved_us(calls, options.repeats, failed, LONG_LEAD_CYCLES, device)
    for name, reason in failed.items():
        results[name].reason = reason
    return {n: summary(t) for n, t in times.items()}


def run_mask(
    name: str, seqlen: int, heads: tuple[int, int], options: argparse.Namespace, makers: dict
) -> list[Result]:
    """All implementations on one mask and length, with ``heads`` of q and of k and v."""
    results = {n: Result(name, seqlen, n, direction=options.direction, heads=[*heads]) for n in makers}
    spread: dict[str, list[dict[str, float]]] = {n: [] for n in makers}
    for case in cases_of(options, name, seqlen):
        operations = flops_per_pair(options.direction, *head_dims_of(options)) * case.mask.area * heads[0]
        try:
            found = run_sample(case, heads, options, makers, results)
        except torch.OutOfMemoryError as failure:  # of the inputs or the reference
            found = {}
            for result in results.values():
                result.reason = result.reason or reason_of(failure)
        for n, times in found.items():
            spread[n].append(times)
            results[n].samples.append(operations / times["median_us"] / 1e6)
        torch.compiler.reset()  # so that FlexAttention's compilations of past cases do not pile up
        gc.collect()  # graphs of autograd may be in cycles
        torch.cuda.empty_cache()
    for n, result in results.items():
        if spread[n] and not result.reason:  # a mean over some of the samples would not compare
            result.tflops = fmean(result.samples)
            for key in ("median_us", "p10_us", "p90_us"):
                setattr(result, key, fmean(s[key] for s in spread[n]))
    return list(results.values())


def size_of(seqlen: int) -> str:
    return f"{seqlen // 1024}K" if seqlen % 1024 == 0 else str(seqlen)


def by_draws(results: Sequence[Result], names: Sequence[str]) -> list[str]:
    """Where documents were drawn several times, a line with ours over each peer draw by draw: mean, least and most.

    The mean of the ratios counts every draw alike, the ratio of the means those more that are fast.
    """
    lines = []
    for cell in dict.fromkeys(r.cell for r in results):
        of = {r.name: r.samples for r in results if r.cell == cell and r.tflops}
        mine = of.get("magi", [])
        pairs = {n: [a / b for a, b in zip(mine, of[n])] for n in names if n in of and n != "magi"}
        found = [f"/ {name} {fmean(p):.2f} ({min(p):.2f} to {max(p):.2f})" for name, p in pairs.items() if len(p) > 1]
        if found:
            lines.append(f"{cell[0]} {size_of(cell[1])}, {len(mine)} draws, mean of ratios: {', '.join(found)}")
    return lines


def table(results: Sequence[Result], names: Sequence[str]) -> str:
    """TFLOP/s of each implementation, our microseconds, ours over each peer, and the workspace of our backward; then
    ``by_draws`` and why there is no figure where there is none."""
    peers = [n for n in names if n != "magi"]
    has_workspace = any(r.workspace_bytes is not None for r in results)
    has_heads = len({r.cell[2] for r in results}) > 1
    header = ["mask", "seqlen", *(["heads"] if has_heads else []), *names, "us", *(f"/ {p}" for p in peers), "host us"]
    header += ["workspace bytes"] if has_workspace else []
    rows = [header]
    for cell in dict.fromkeys(r.cell for r in results):
        of, (mask, seqlen, heads) = {r.name: r for r in results if r.cell == cell}, cell
        mine = of.get("magi")
        rates = [of[n].tflops if n in of else 0.0 for n in names]
        cells = [f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}" if rate else "-" for rate in rates]
        ratios = [
            f"{mine.tflops / of[p].tflops:.2f}" if mine and mine.tflops and p in of and of[p].tflops else "-"
            for p in peers
        ]
        us = f"{mine.median_us:.1f}" if mine and mine.tflops else "-"
        host = f"{mine.host_us:.1f}" if mine and mine.host_us else "-"
        used = next((r.workspace_bytes for r in of.values() if r.workspace_bytes is not None), None)
        workspace = "-" if used is None else f"{used:,}"
        shape = [mask, size_of(seqlen), *(["/".join(map(str, heads))] if has_heads else [])]
        rows.append([*shape, *cells, us, *ratios, host, *([workspace] if has_workspace else [])])
    reasons = {f"{r.name} on {r.mask}, {r.seqlen} tokens: {r.reason}" for r in results if r.reason}
    title = ", ".join(TITLES[d] for d in dict.fromkeys(r.direction for r in results))
    text = table_text(f"Attention {title}, TFLOP/s", rows)
    return "\n".join([text, *by_draws(results, names), *sorted(reasons)])


def settings_of(options: argparse.Namespace) -> dict:
    """What decides what is measured: all options but those of files, and of the others those that are as usual."""
    unusual = ("documents", "window", "head_dim_v")
    return plain_settings(options, ["show", *(k for k in unusual if getattr(options, k) is None)])


def save(results: Sequence[Result], options: argparse.Namespace, out: Path) -> None:
    """Writes OUT.json and, with matplotlib, OUT.png."""
    write_results(out, settings_of(options), results=[asdict(r) for r in results], missing=missing(PEERS))
    draw(Path(f"{out}.json"))


def show(file: Path) -> str:
    """The table of a file that ``save`` wrote, behind its machine and commit; SystemExit says so of any other."""
    try:
        data = json.loads(file.read_text())
        results, of = [Result(**r) for r in data["results"]], data["environment"]
    except (OSError, ValueError, TypeError, KeyError) as failure:
        raise SystemExit(f"{file} is no file that --out of this benchmark wrote ({reason_of(failure)}).") from None
    text = table(results, list(dict.fromkeys(r.name for r in results)))
    return f"{of.get('gpu', 'no GPU')}, torch {of['torch']}, commit {of['commit']}, {of['time']}\n{text}"


def main(arguments: Sequence[str] | None = None) -> int:
    if (done := run_part(arguments, PARTS)) is not None:
        return done
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.show:
        print(show(options.show))
        return 0
    try:
        heads = pairs_of_heads(options)
    except ValueError as wrong:
        parser.error(str(wrong))
    if options.graph and options.direction == "backward" and options.only != ["magi_host"]:
        # Autograd runs a gradient on the stream of its forward, which is outside the capture.
        parser.error("--graph --direction backward captures --only magi_host; or time --direction both.")
    if not torch.cuda.is_available():
        if options.graph or options.host:
            parser.error("--graph and --host need a CUDA GPU, and torch sees none.")
        print("torch sees no GPU, so this runs on the CPU: give short lengths. The times say nothing about GPUs.")
    makers = available(options.no_peers)
    if options.direction != "forward":
        makers = gradient_makers(makers, is_both=options.direction == "both")
    if options.only:
        unknown = [n for n in options.only if n not in makers]
        if unknown:
            print(f"{', '.join(unknown)}: not installed here; there are {', '.join(makers)}.", file=sys.stderr)
            return 2
        makers = {n: makers[n] for n in makers if n in options.only}
    results: list[Result] = []
    cases = list(product(heads, options.masks, options.seqlens))
    for pair, mask, seqlen in steps(cases, lambda case: f"{options.direction} {case[1]}, {size_of(case[2])} tokens"):
        results += run_mask(mask, seqlen, pair, options, makers)
        print(table(results[-len(makers) :], list(makers)), flush=True)
        if options.out:  # after every case, so that a run that is cut off keeps what it has
            save(results, options, options.out)
    print("\n" + table(results, list(makers)))
    return 1 if any(r.name in OURS and r.reason for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
