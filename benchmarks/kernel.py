# SPDX-License-Identifier: Apache-2.0
"""Attention kernels on six masks: ours beside what is installed, in one run, on the same inputs.

    python benchmarks/kernel.py [--masks causal,varlen_full] [--seqlens 4K,32K] [--out benchmarks/results/NAME]

Before anything is timed, every implementation is compared with a float32 reference on a sample of rows. TFLOP/s
count ``4 * area * heads * head_dim`` operations forward, where area is the number of unmasked (q, k) pairs.
Writes NAME.json with machine, versions and commit, and NAME.png where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from masks import NAMES, Case, make_case  # noqa: E402
from peers import OURS_PUBLIC, Unfit, available  # noqa: E402
from timing import as_graph, host_us, interleaved_us, summary  # noqa: E402

from magi_attention.common.slices import row_bounds  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
FLOPS_PER_PAIR = {"forward": 4}  # per head and head dim: one multiply-add in each of the two products
ROWS_CHECKED = 48
# Relative error (root mean square) of a bf16 or fp16 result; one rounding of P and one of out are about 0.003.
TOLERANCE = 0.01


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
    error: float = 0.0
    host_us: float | None = None
    reason: str | None = None
    samples: list[float] = field(default_factory=list)


def parse_size(text: str) -> int:
    """``"4K"`` is 4096, ``"1M"`` 1048576, ``"1000"`` 1000."""
    factor = {"K": 2**10, "M": 2**20}.get(text[-1:].upper(), 1)
    number = text[:-1] if factor > 1 else text
    if not number.isdigit() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no length; give one such as 4K or 1000.")
    return int(number) * factor


def _list_of(convert, allowed: Sequence[str] | None = None):
    def parse(text: str) -> list:
        items = [item.strip() for item in text.split(",") if item.strip()]
        for item in items:
            if allowed is not None and item not in allowed:
                raise argparse.ArgumentTypeError(f"{item!r} is unknown; choose from {', '.join(allowed)}.")
        if not items:
            raise argparse.ArgumentTypeError("give at least one, separated by commas.")
        return [convert(item) for item in items]

    return parse


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--masks", type=_list_of(str, NAMES), default=list(NAMES), metavar="A,B", help=", ".join(NAMES))
    default_lengths = "1K,2K,4K,8K,16K,32K,64K"
    add("--seqlens", type=_list_of(parse_size), default=default_lengths, metavar="4K,32K", help=default_lengths)
    add("--only", type=_list_of(str), metavar="magi,fa3", help="only these implementations")
    add("--no-peers", action="store_true", help="only ours")
    add("--heads", type=int, nargs=2, default=(64, 8), metavar=("Q", "KV"), help="query and kv heads (64 8)")
    add("--head-dim", type=int, default=128, help="head dim of q, k and v (128)")
    add("--dtype", choices=("bf16", "fp16"), default="bf16")
    add("--samples", type=int, default=4, help="draws of the documents of varlen masks, averaged (4)")
    add("--repeats", type=int, default=20, help="timed runs of each, of which the median counts (20)")
    add("--graph", action="store_true", help="time CUDA graph replays")
    add("--host", action="store_true", help="also measure host time per call of ours (use short lengths)")
    add("--out", type=Path, help="write OUT.json and OUT.png")
    return parser


def make_inputs(case: Case, heads: Sequence[int], head_dim: int, dtype: torch.dtype, device: str, seed: int = 0):
    """q, k, v (T, H, D), normal: zeros or constants would let the GPU run at a clock that real data do not allow."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes = [(case.seqlen, h, head_dim) for h in (heads[0], heads[1], heads[1])]
    return tuple(torch.randn(s, generator=generator, device=device, dtype=torch.float32).to(dtype) for s in shapes)


def seen_keys(case: Case, rows: np.ndarray) -> np.ndarray:
    """Boolean (rows, seqlen) of the chosen query rows, from the slices."""
    seen = np.zeros((len(rows), case.seqlen), dtype=bool)
    for row in case.mask.slices.array:
        start, end = row_bounds(row)
        for i in np.flatnonzero((rows >= row[0]) & (rows < row[1])):
            local = rows[i] - row[0]
            seen[i, start[local] : end[local]] = True
    return seen


def reference_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, rows: torch.Tensor):
    """Attention of the chosen rows in float32, (rows, Hq, Dv); one kv head at a time, for memory."""
    share = q.shape[1] // k.shape[1]
    parts = []
    for head in range(k.shape[1]):
        q_rows = q[rows, head * share : (head + 1) * share].float()
        s = torch.einsum("rhd,kd->rhk", q_rows, k[:, head].float()) * q.shape[2] ** -0.5
        p = s.masked_fill_(~seen[:, None], float("-inf")).softmax(-1).nan_to_num_(0.0)
        parts.append(p @ v[:, head].float())
    return torch.cat(parts, 1)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Root mean square of the difference over that of the reference; inf if anything is not finite."""
    got = got.float()
    if not torch.isfinite(got).all():
        return float("inf")
    return ((got - want).norm() / want.norm().clamp_min(1e-30)).item()


def prepare(case: Case, tensors, makers: dict, results: dict[str, Result]) -> dict:
    """Callables of the implementations that can run the case and are right; the others get a reason."""
    rows_np = np.unique(np.linspace(0, case.seqlen - 1, ROWS_CHECKED).astype(np.int64))
    rows = torch.from_numpy(rows_np).to(tensors[0].device)
    want = reference_rows(*tensors, torch.from_numpy(seen_keys(case, rows_np)).to(rows.device), rows)
    calls = {}
    for name, make in makers.items():
        try:
            call = make(*tensors, case)
            error = relative_error(call()[rows], want)
        except Unfit as reason:
            results[name].reason = str(reason)
            continue
        except Exception as failure:  # a peer's own failure is a finding, not the end of the run
            results[name].reason = f"{type(failure).__name__}: {str(failure).partition(chr(10))[0][:200]}"
            continue
        results[name].error = max(results[name].error, error)
        if error > TOLERANCE:
            results[name].reason = f"wrong: relative error {error:.3g} on {len(rows_np)} rows"
            continue
        calls[name] = call
    return calls


def run_mask(name: str, seqlen: int, options: argparse.Namespace, makers: dict) -> list[Result]:
    """All implementations on one mask and length."""
    results = {n: Result(name, seqlen, n) for n in makers}
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[options.dtype]
    samples = options.samples if name.startswith("varlen") else 1
    spread: dict[str, list[dict[str, float]]] = {n: [] for n in makers}
    for sample in range(samples):
        case = make_case(name, seqlen, sample)
        tensors = make_inputs(case, options.heads, options.head_dim, dtype, "cuda")
        calls = prepare(case, tensors, {n: m for n, m in makers.items() if not results[n].reason}, results)
        if options.host and "magi" in calls:
            public = OURS_PUBLIC(*tensors, case)
            public()
            results["magi"].host_us = host_us(public)
        if options.graph:
            calls = {n: as_graph(c) for n, c in calls.items()}
        operations = FLOPS_PER_PAIR["forward"] * case.mask.area * options.heads[0] * options.head_dim
        for n, times in interleaved_us(calls, options.repeats).items():
            spread[n].append(summary(times))
            results[n].samples.append(operations / spread[n][-1]["median_us"] / 1e6)
        torch.compiler.reset()  # so that FlexAttention's compilations of past cases do not pile up
    for n, result in results.items():
        if spread[n]:
            result.tflops = fmean(result.samples)
            for key in ("median_us", "p10_us", "p90_us"):
                setattr(result, key, fmean(s[key] for s in spread[n]))
    return list(results.values())


def table(results: Sequence[Result], names: Sequence[str]) -> str:
    """TFLOP/s of each implementation, our microseconds, and ours over each peer."""
    peers = [n for n in names if n != "magi"]
    header = ["mask", "seqlen", *names, "us", *(f"/ {p}" for p in peers), "host us"]
    rows = [header]
    for mask, seqlen in dict.fromkeys((r.mask, r.seqlen) for r in results):
        of = {r.name: r for r in results if (r.mask, r.seqlen) == (mask, seqlen)}
        mine = of.get("magi")
        cells = [f"{of[n].tflops:.0f}" if n in of and of[n].tflops else "-" for n in names]
        ratios = [
            f"{mine.tflops / of[p].tflops:.2f}" if mine and mine.tflops and p in of and of[p].tflops else "-"
            for p in peers
        ]
        us = f"{mine.median_us:.1f}" if mine and mine.tflops else "-"
        host = f"{mine.host_us:.1f}" if mine and mine.host_us else "-"
        size = f"{seqlen // 1024}K" if seqlen % 1024 == 0 else str(seqlen)
        rows.append([mask, size, *cells, us, *ratios, host])
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths))) for r in rows]
    reasons = {f"{r.name} on {r.mask}: {r.reason}" for r in results if r.reason}
    return "\n".join([*lines, *sorted(reasons)])


def environment() -> dict:
    """Machine, versions and commit, so that a number can be traced."""
    git = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True)
    found = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": git.stdout.strip() or None,
        "host": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "sms": properties.multi_processor_count, "memory": properties.total_memory}
        found["cudnn"] = torch.backends.cudnn.version()
        fields = "driver_version,power.limit,clocks.max.sm"
        query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-i", "0"]
        try:
            found["nvidia_smi"] = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            found["nvidia_smi"] = None
    return found


def draw(results: Sequence[Result], names: Sequence[str], path: Path, title: str) -> bool:
    """One panel per mask, TFLOP/s over length; False without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    masks = list(dict.fromkeys(r.mask for r in results))
    columns = min(3, len(masks))
    rows = -(-len(masks) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(5 * columns, 3.6 * rows), squeeze=False, sharey=True)
    for axis in axes.flat[len(masks) :]:
        axis.axis("off")
    for axis, mask in zip(axes.flat, masks):
        for i, name in enumerate(names):
            points = [(r.seqlen, r.tflops) for r in results if r.mask == mask and r.name == name and r.tflops]
            if points:
                width = 2.4 if name == "magi" else 1.2
                axis.plot(*zip(*points), marker="o", markersize=3, linewidth=width, label=name, color=f"C{i}")
        lengths = sorted({r.seqlen for r in results if r.mask == mask})
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [f"{n // 1024}K" if n >= 1024 else str(n) for n in lengths])
        axis.set(title=mask.replace("_", " "), xlabel="tokens", ylabel="TFLOP/s", ylim=(0, None))
        axis.grid(alpha=0.3)
    handles = {label: h for axis in axes.flat for h, label in zip(*axis.get_legend_handles_labels())}
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=len(handles), frameon=False)
    figure.suptitle(title)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def save(results: Sequence[Result], names: Sequence[str], options: argparse.Namespace, out: Path) -> None:
    """Writes OUT.json and, with matplotlib, OUT.png."""
    out.parent.mkdir(parents=True, exist_ok=True)
    settings = {k: v for k, v in vars(options).items() if k != "out"}
    data = {"environment": environment(), "settings": settings, "results": [asdict(r) for r in results]}
    Path(f"{out}.json").write_text(json.dumps(data, indent=1) + "\n")
    shape = f"{options.heads[0]}:{options.heads[1]} heads, head dim {options.head_dim}, {options.dtype}"
    draw(results, names, Path(f"{out}.png"), f"Attention forward, {data['environment'].get('gpu', 'no GPU')}, {shape}")


def main(arguments: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA GPU, and torch sees none.", file=sys.stderr)
        return 2
    makers = available(options.no_peers)
    if options.only:
        unknown = [n for n in options.only if n not in makers]
        if unknown:
            print(f"{', '.join(unknown)}: not installed here; there are {', '.join(makers)}.", file=sys.stderr)
            return 2
        makers = {n: makers[n] for n in makers if n in options.only}
    results: list[Result] = []
    for mask in options.masks:
        for seqlen in options.seqlens:
            results += run_mask(mask, seqlen, options, makers)
            print(table(results[-len(makers) :], list(makers)), flush=True)
            if options.out:  # after every case, so that a run that is cut off keeps what it has
                save(results, list(makers), options, options.out)
    print("\n" + table(results, list(makers)))
    return 1 if any(r.name == "magi" and r.reason for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
