# SPDX-License-Identifier: Apache-2.0
"""Two checkouts, or builds of our own kernel library, beside each other: what does a change cost or gain?

    python benchmarks/builds.py OLD_CHECKOUT NEW_CHECKOUT [--functions attend] [--records FILE] [--out OUT]
    python benchmarks/builds.py old/libmagi_ffa_sm90.so new/libmagi_ffa_sm90.so
                                [--direction forward|backward] [--masks causal,varlen_full] [--seqlens 4K,32K] [--turns]
                                [--steps chosen,cleared,64,80,128] [--documents 4K] [--window 512]

Folders are checkouts, two of them: ``checkouts.py`` says how their public functions are compared, over the cells of the
committed records, or of --masks at --seqlens. It fails where the new one takes over 1% longer.

Files are libraries. All are loaded into one process and run in turns on the same inputs, because a machine on another
day, or the same one when it is hotter, differs by more than most changes do. Each result is compared with a float32
reference first. The table has TFLOP/s of the first build and the speed of the others over it; "-" where a build failed
on a draw. Files may be compressed by gzip; a build is named by its file, or by its folder where files have the same
name. With --steps each is run with steps of so many queries in place of those that it would choose, as NAME+64 and
NAME+80; or with those, but dq_accum cleared where the first writer would store, as NAME+cleared.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import checkouts  # noqa: E402
import torch  # noqa: E402
from case_options import DTYPES, add_case_options, cases_of, head_dims_of, list_of  # noqa: E402
from kernel import Result, flops_per_pair, make_inputs, prepare  # noqa: E402
from masks import ALL_NAMES, Case  # noqa: E402
from peers import forward_of  # noqa: E402
from peers_backward import OurGradients  # noqa: E402
from sparse_cases import NAMES as SPARSE_NAMES  # noqa: E402

from magi_attention.benchmarking.timing import interleaved_us, summary  # noqa: E402
from magi_attention.env import build as env  # noqa: E402
from magi_attention.kernels.ffa import backward as ffa_bwd  # noqa: E402
from magi_attention.kernels.ffa.backend import FfaBackend  # noqa: E402
from magi_attention.kernels.ffa.operands import DTYPES as CODES  # noqa: E402
from magi_attention.native.ffa import FfaLibrary  # noqa: E402
from magi_attention.native.loader import load  # noqa: E402
from magi_attention.native.planner.schedule import BwdSchedule  # noqa: E402
from magi_attention.native.toolchain import FFA_SM90, library_file  # noqa: E402

STEPS = ("chosen", "cleared", "64", "80", "128")  # queries of an m-block


def names_of(files: Sequence[Path]) -> dict[str, Path]:
    """A name for each file: the first part of its own name, or its folder's where that is not enough."""
    names = [f.name.partition(".")[0] for f in files]
    if len(set(names)) < len(files):
        names = [f.resolve().parent.name for f in files]
    if len(set(names)) < len(files):
        raise SystemExit("Two builds have the same file name and folder name; rename one.")
    return dict(zip(names, files))


def backend_of(file: Path, folder: Path) -> FfaBackend:
    """A backend of its own for the library in ``file``, which is put into the empty ``folder`` first."""
    folder.mkdir()
    target = folder / library_file(FFA_SM90)
    with gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as source, open(target, "wb") as to:
        shutil.copyfileobj(source, to)
    return FfaBackend(FfaLibrary(load(FFA_SM90, folder)))


def why_not(backend: FfaBackend, options: argparse.Namespace) -> str | None:
    """A sentence if the build lacks a kernel, which would be compiled from the sources of this checkout then."""
    dtype = CODES[DTYPES[options.dtype]]
    kinds = ("fwd",) if options.direction == "forward" else ("fwd", "bwd")
    lacks = [k for k in kinds if not backend.library.has(k, dtype, options.head_dim, options.head_dim)]
    return f"has no kernel {lacks[0]} for {options.dtype} and head dim {options.head_dim}" if lacks else None


def anew(case: Case) -> Case:
    """The same case with a mask of its own: plans and lists are kept with a mask, and each build makes its own."""
    return replace(case)


@contextmanager
def forced_steps(steps: str) -> Iterator[None]:
    """Backwards take one of ``STEPS``, whatever the mask."""
    chosen = ffa_bwd.select_schedule

    def select_schedule(q_shape, v_shape, mask, options, processors) -> BwdSchedule:
        if steps == "cleared":
            return chosen(q_shape, v_shape, mask, options, processors)._replace(first_writer=False)
        if not options.deterministic or steps != "64":
            return BwdSchedule(int(steps), 0)
        # With softcap there are m-blocks of 64 alone, so halves of the heads are all that is chosen.
        narrow = chosen(q_shape, v_shape, mask, replace(options, softcap=1.0), processors)
        return BwdSchedule(64, narrow.num_head_splits)

    if steps != "chosen":
        ffa_bwd.select_schedule = select_schedule
    try:
        yield
    finally:
        ffa_bwd.select_schedule = chosen


class GradientsBySteps(OurGradients):
    """``OurGradients`` with one of ``STEPS``."""

    def __init__(self, steps: str, *arguments, **options) -> None:
        self._steps = steps
        super().__init__(*arguments, **options)

    def __call__(self):
        with forced_steps(self._steps):
            return super().__call__()


def makers_of(backends: dict[str, FfaBackend], options: argparse.Namespace) -> dict:
    """By name what ``kernel.prepare`` wants; with ``--turns`` each build a second time, as NAME+turns."""
    if options.direction == "forward":
        return {n: lambda q, k, v, case, b=b: forward_of(b, q, k, v, anew(case)) for n, b in backends.items()}
    found = {}
    for n, b in backends.items():
        for steps, is_ordered in product(options.steps, (False, True) if options.turns else (False,)):
            name = n + (f"+{steps}" if steps != "chosen" else "") + "+turns" * is_ordered
            found[name] = lambda q, k, v, dout, case, b=b, s=steps, d=is_ordered: GradientsBySteps(
                s, q, k, v, dout, anew(case), is_both=False, deterministic=d, backend=b
            )
    return found


def measure(case: Case, makers: dict, options: argparse.Namespace) -> tuple[dict[str, float], dict[str, str]]:
    """Median microseconds of each build that is right on the case, and why the others have none."""
    is_forward = options.direction == "forward"
    dtype = DTYPES[options.dtype]
    head_dim, head_dim_v = head_dims_of(options)
    tensors = make_inputs(
        case, options.heads, head_dim, dtype, "cuda", has_dout=not is_forward, head_dim_v=head_dim_v
    )
    results = {n: Result(case.name, case.seqlen, n, direction=options.direction) for n in makers}
    calls = prepare(case, tensors, makers, results)
    failed = {n: r.reason for n, r in results.items() if r.reason}
    times = interleaved_us(calls, options.repeats, failed)
    return {n: summary(t)["median_us"] for n, t in times.items()}, failed


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    text = "libraries, or two checkouts; the first is what the others are compared with"
    add("builds", type=Path, nargs="+", metavar="BUILD", help=text)
    add("--direction", choices=("forward", "backward"), help="libraries: backward without it; checkouts: both")
    add("--turns", action="store_true", help="backward: also with dq summed in a fixed order")
    add("--steps", type=list_of(str, STEPS), default=["chosen"], metavar="A,B", help="backward: " + ", ".join(STEPS))
    add_case_options(parser, [], "", samples=1, has_more_masks=True)
    parser.set_defaults(masks=None, seqlens=None)
    checkouts.add_options(parser)
    return parser


def compare_checkouts(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """What ``main`` gives where folders are named."""
    if len(options.builds) != 2 or not all((f / "magi_attention").is_dir() for f in options.builds):
        parser.error("name two checkouts, each a folder with magi_attention in it, or libraries.")
    if options.turns or options.steps != ["chosen"]:
        parser.error("--turns and --steps are for libraries.")
    if wrong := [name for name in options.masks or () if not checkouts.is_mask(name)]:
        parser.error(f"{', '.join(wrong)}: no mask; there are {', '.join((*ALL_NAMES, *SPARSE_NAMES))}.")
    if min(options.rounds, options.repeats, options.samples) < 1:
        parser.error("--rounds, --repeats and --samples must be 1 or more.")
    options.directions = checkouts.DIRECTIONS if options.direction is None else (options.direction,)
    return checkouts.compare(*options.builds, options)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    if any(path.is_dir() for path in options.builds):
        return compare_checkouts(parser, options)
    options.direction = options.direction or "backward"
    options.masks, options.seqlens = options.masks or ["full", "causal"], options.seqlens or [4096, 16384]
    if wrong := [name for name in options.masks if name not in ALL_NAMES]:
        parser.error(f"{', '.join(wrong)}: no mask of dense kernels; choose from {', '.join(ALL_NAMES)}.")
    if options.direction == "forward" and (options.turns or options.steps != ["chosen"]):
        parser.error("--turns and --steps are for --direction backward.")
    missing = [str(f) for f in options.builds if not f.is_file()]
    if missing:
        parser.error(f"no such file: {', '.join(missing)}.")
    if not torch.cuda.is_available():
        parser.error("there is no GPU to time anything on.")
    if env.is_force_jit_build():
        parser.error("MAGI_ATTENTION_FORCE_JIT_BUILD=1 passes over all builds; unset it.")
    with tempfile.TemporaryDirectory() as folder:
        files = names_of(options.builds)
        backends = {n: backend_of(f, Path(folder) / n) for n, f in files.items()}
        for n, backend in backends.items():
            reason = why_not(backend, options)
            if reason:
                parser.error(f"{files[n]} {reason}; build it with `python -m magi_attention.native.build`.")
        makers = makers_of(backends, options)
    reference, *others = makers
    print(f"{'mask':<24}{'seqlen':>8}  {reference:>10}" + "".join(f"  {n:>10}" for n in others), flush=True)
    is_wrong = False
    for mask in options.masks:
        for seqlen in options.seqlens:
            speed, ratios = means_of(mask, seqlen, makers, options)
            is_wrong |= None in (speed, *ratios.values())
            cells = ["-" if speed is None else f"{speed:.1f}"]
            cells += ["-" if r is None else f"{r:.3f}" for r in ratios.values()]
            print(f"{mask:<24}{seqlen:>8}" + "".join(f"  {c:>10}" for c in cells), flush=True)
    return int(is_wrong)


def means_of(
    mask: str, seqlen: int, makers: dict, options: argparse.Namespace
) -> tuple[float | None, dict[str, float | None]]:
    """TFLOP/s of the first build and the others' speed over it, each a mean over draws; None if it failed on any."""
    reference, *others = makers
    speeds: list[float] = []
    ratios: dict[str, list[float]] = {n: [] for n in others}
    cases = list(cases_of(options, mask, seqlen))
    for sample, case in enumerate(cases):
        us, failed = measure(case, makers, options)
        for n, reason in failed.items():
            print(f"{n} on {mask}, {seqlen} tokens, draw {sample}: {reason}", flush=True)
        if reference not in us:
            continue
        operations = flops_per_pair(options.direction, *head_dims_of(options)) * case.mask.area * options.heads[0]
        speeds.append(operations / us[reference] / 1e6)
        for n in us.keys() & ratios.keys():
            ratios[n].append(us[reference] / us[n])
    mean = lambda values: fmean(values) if len(values) == len(cases) else None  # noqa: E731
    return mean(speeds), {n: mean(r) for n, r in ratios.items()}


if __name__ == "__main__":
    sys.exit(main())
