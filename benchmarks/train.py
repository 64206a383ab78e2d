# SPDX-License-Identifier: Apache-2.0
"""Whole training steps of examples/fsdp2_llama.py on packed causal documents: ours beside torch's attention.

    python benchmarks/train.py [--seq-lens 16K,32K] [--ranks 2] [--config 1b] [--out benchmarks/results/NAME]

``magi`` spreads each sequence over all ranks. ``magi_data_parallel`` gives each rank sequences of its own, and ``sdpa``
does the same with torch's ``scaled_dot_product_attention``, document by document. A step has the plan, forward,
backward, the sums of FSDP2 and the optimizer. The time is the median over the second half of the steps.

With ``--long`` the steps are those of examples/long_context.py, and the peers other ways of context parallelism, all of
them in one run of benchmarks/long_train.py:

    python benchmarks/train.py --long --config llama3-8b --layers 4 --seq-lens 128K --steps 3 --one-sequence
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
from case_options import list_of, parse_size  # noqa: E402
from parts import run_part  # noqa: E402
from picture import draw, short  # noqa: E402
from progress import steps  # noqa: E402
from result_file import ROOT, plain_settings, write_results  # noqa: E402

from magi_attention.benchmarking.timing import middle_and_quantiles  # noqa: E402

PROGRAM = (str(ROOT / "examples" / "fsdp2_llama.py"),)
PARTS = {"ranks": ("long_train", "what --long starts on every rank")}
LONG_PROGRAM = (str(Path(__file__).resolve()), "ranks")
# heads and head dim of the configurations of the examples
SHAPES = {"tiny": ((4, 2), 16), "1b": ((32, 8), 64), "llama3-8b": ((32, 8), 128), "qwen3-8b": ((32, 8), 128)}
WAYS = ("magi", "magi_data_parallel", "sdpa")
LONG_WAYS = ("magi", "ring", "all_gather", "ulysses", "torch_cudnn", "torch_flash")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--seq-lens", type=list_of(parse_size), default="16K", metavar="16K,32K", help="tokens of a sequence (16K)")
    add("--ranks", type=int, default=2)
    add("--config", choices=tuple(SHAPES), default="tiny", help="size of the model (tiny)")
    ways = f"{', '.join(WAYS)}; with --long {', '.join(LONG_WAYS)}"
    add("--only", type=list_of(str, (*WAYS, *LONG_WAYS)), metavar="A,B", help=ways)
    add("--long", action="store_true", help="steps of examples/long_context.py, beside other context parallelism")
    add("--layers", type=int, help="with --long, blocks of the model; those of --config without it")
    add("--one-sequence", action="store_true", help="with --long, one causal document in place of packed ones")
    add("--keeps-attention", action="store_true", help="with --long, checkpoints have results of attention, too")
    add("--steps", type=int, default=14, help="of which the second half is timed (14)")
    add("--dtype", choices=("bf16", "fp32"), default="bf16")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--compile", action="store_true", help="compile each block")
    add("--out", type=Path, help="write OUT.json and OUT.png")
    return parser


def measure(way: str, seq_len: int, options: argparse.Namespace) -> dict:
    """One row of the record; ``reason`` says why there are no times."""
    row = {
        "name": way, "seq_len": seq_len, "tokens_per_second": None, "ms": None, "p10_ms": None, "p90_ms": None,
        "peak_bytes": None, "reason": None,
    }  # fmt: skip
    sequences = 1 if way == "magi" else options.ranks
    with tempfile.TemporaryDirectory() as folder:
        more = ["--cp", str(options.ranks // sequences), "--attention", "sdpa" if way == "sdpa" else "magi"]
        reason = run(PROGRAM, folder, seq_len, options, more)
        if reason:
            return row | {"reason": reason}
        curve = json.loads((Path(folder) / "curve.json").read_text())
    seconds = curve["seconds"][len(curve["seconds"]) // 2 :]
    middle, low, high = middle_and_quantiles(seconds)
    rates = {"tokens_per_second": seq_len * sequences / middle, "peak_bytes": curve["peak_bytes"]}
    return row | rates | {"ms": middle * 1e3, "p10_ms": low * 1e3, "p90_ms": high * 1e3}


def run(
    program: Sequence[str], folder: str, seq_len: int, options: argparse.Namespace, more: Sequence[str]
) -> str | None:
    """Runs ``program`` on all ranks; what went wrong, or None."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(options.ranks), *program, "--out", folder, "--device", options.device]
    command += ["--config", options.config, "--dtype", options.dtype, "--steps", str(options.steps)]
    command += ["--seq-len", str(seq_len), "--max-document", str(seq_len), *more]
    command += ["--compile"] if options.compile else []
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if not done.returncode:
        return None
    lines = [text for text in done.stderr.splitlines() if "Error" in text]
    return (lines or [f"it ended with {done.returncode}"])[0].strip()[:200]


def measure_long(seq_len: int, options: argparse.Namespace) -> list[dict]:
    """Rows of all ways, which one run of all ranks takes in turn."""
    more = ["--ways", ",".join(options.only)] + (["--one-sequence"] if options.one_sequence else [])
    more += ["--layers", str(options.layers)] if options.layers else []
    more += ["--keeps-attention"] if options.keeps_attention else []
    with tempfile.TemporaryDirectory() as folder:
        reason = run(LONG_PROGRAM, folder, seq_len, options, more)
        written = Path(folder) / "rows.json"
        rows = json.loads(written.read_text()) if written.exists() else []
    missing = options.only[len(rows) :]
    none = dict.fromkeys(("tokens_per_second", "ms", "p10_ms", "p90_ms", "peak_bytes", "mfu", "losses"))
    return rows + [{"name": way, "seq_len": seq_len, "reason": reason, **none} for way in missing]


def main(arguments: Sequence[str] | None = None) -> int:
    if (done := run_part(arguments, PARTS)) is not None:
        return done
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.steps < 2 or options.ranks < 1:
        parser.error("give at least 2 --steps and 1 of --ranks.")
    known = LONG_WAYS if options.long else WAYS
    options.only = list(known) if options.only is None else options.only
    if unknown := [way for way in options.only if way not in known]:
        parser.error(f"--only {unknown[0]} is not measured {'with' if options.long else 'without'} --long.")
    is_for_long = options.layers or options.one_sequence or options.keeps_attention
    if not options.long and (is_for_long or options.config not in ("tiny", "1b")):
        parser.error(
            "--layers, --one-sequence, --keeps-attention and configurations of 8B parameters go with --long; add it."
        )
    rows: list[dict] = []
    ways = ["all ways"] if options.long else options.only
    parts = [(way, seq_len) for seq_len in options.seq_lens for way in ways]
    for way, seq_len in steps(parts, lambda part: f"{part[0]}, {short(part[1])} tokens"):
        found = measure_long(seq_len, options) if options.long else [measure(way, seq_len, options)]
        rows += found
        for row in found:
            told = row["reason"] or f"{row['tokens_per_second']:,.0f} tokens/s, {row['ms']:.0f} ms a step"
            print(f"{row['name']}, {short(seq_len)} tokens: {told}", flush=True)
        if options.out:
            heads, head_dim = SHAPES[options.config]
            settings = plain_settings(options) | {"heads": heads, "head_dim": head_dim, "world": options.ranks}
            write_results(options.out, settings, results=rows)
    if options.out:
        draw(Path(f"{options.out}.json"))
    return 1 if any(row["reason"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
