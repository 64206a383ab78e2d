# SPDX-License-Identifier: Apache-2.0
"""`magi simulate`: attention under a mask over many GPUs, in a model that says what it measured and what it assumes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from magi_attention.cli.common import UsageError, make_folder, need_matplotlib, show_table, token_count
from magi_attention.cli.plans.budget import rates_of
from magi_attention.cli.plans.masks import add_mask_options, build_mask, check_options, document_lengths

FOLDER = "runs/simulate"  # default of --out
PICTURED_TOKENS = 3_000_000  # in all, at least, of the largest size in the picture
LARGEST = 4096  # GPUs
ESTIMATE = (
    "~ is an estimate: no record has such a case, or the model is off there by over 10% "
    "(docs/guides/simulate-records.md)."
)


def size(text: str) -> int:
    """A number from 1 on, such as 8192 or 8K."""
    if (number := token_count(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is below 1; give 8192, 8K, ...")
    return number


def sizes(text: str) -> list[int]:
    found = [size(word) for word in text.split(",")]
    if max(found) > LARGEST:
        raise argparse.ArgumentTypeError(f"{max(found)} GPUs are more than the {LARGEST} that the model was tried with")
    return found


def way_names(text: str) -> list[str]:
    from magi_attention.tools.simulate import WAYS

    found = [word.strip().replace("_", " ") for word in text.split(",")]
    if unknown := [name for name in found if name not in WAYS]:
        known = ", ".join(name.replace(" ", "_") for name in WAYS)
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {known}")
    return found


def add_simulate(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("simulate", help="model attention over 8 to 4,096 GPUs, beside other ways")
    parser.set_defaults(function=command_simulate, mask_file=None, tokens=None)
    add_mask_options(parser)
    parser.add_argument("--gpus", type=sizes, default=[8, 64, 512], metavar="A,B", help="numbers of GPUs (8,64,512)")
    parser.add_argument("--node", type=size, default=8, help="GPUs of a node, joined by NVLink (8)")
    parser.add_argument("--tokens-per-gpu", type=size, default=8192, metavar="8K", help="tokens of each GPU (8K)")
    parser.add_argument("--network-gbs", type=float, default=50.0, help="GB/s of each GPU's link to other nodes (50)")
    parser.add_argument("--network-latency-us", type=float, default=10.0, help="of an exchange over the network (10)")
    levels = "two: a row crosses the network once for a node; flat: once for each GPU that needs it (two)"
    parser.add_argument("--levels", choices=("two", "flat"), default="two", help=levels)
    parser.add_argument("--ways", type=way_names, metavar="A,B", help="only these, such as one_launch,ring")
    parser.add_argument("--goal", type=float, default=0.9, help="efficiency that the last lines ask for (0.9)")
    parser.add_argument("--heads-q", type=int, default=64)
    parser.add_argument("--heads-kv", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rates", metavar="FILE", help="kernels and links of a node by a file of `magi tune`")
    parser.add_argument("--out", help=f"folder for the picture; {FOLDER} without it")
    parser.add_argument("--no-pictures", dest="pictures", action="store_false", help="print the tables only")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON, and nothing else")


# ---- what is asked for --------------------------------------------------------------------------------


def mask_maker(args: argparse.Namespace):
    """A function from tokens to the mask: documents of --docs again and again, the last one cut; if it is then shorter
    than --prefix, it goes to the document before it."""
    lengths = document_lengths(args) if args.docs is not None or args.doc_file is not None else None

    def mask_of(tokens: int):
        one = argparse.Namespace(**{**vars(args), "doc_file": None, "tokens": tokens, "docs": None})
        if lengths is not None:
            found = lengths * (tokens // sum(lengths) + 1)
            while (beyond := sum(found) - tokens) > 0:
                found[-1:] = [found[-1] - beyond] if found[-1] > beyond else []
            if len(found) > 1 and found[-1] < (args.prefix or 0):
                found[-2:] = [sum(found[-2:])]
            one.docs = ",".join(map(str, found))
        return build_mask(one)

    return mask_of


def cluster_of(args: argparse.Namespace):
    from magi_attention.config.rates import MachineRates
    from magi_attention.tools.simulate import Cluster

    if args.rates and not Path(args.rates).is_file():
        raise UsageError(f"{args.rates} is no file; `magi tune --file {args.rates}` writes it.")
    rates = rates_of(argparse.Namespace(rates=args.rates, cp=args.node)) if args.rates else MachineRates()
    return Cluster(
        node=args.node, network_bytes_per_s=args.network_gbs * 1e9, network_latency_s=args.network_latency_us / 1e6,
        levels=args.levels, heads_q=args.heads_q, heads_kv=args.heads_kv, head_dim=args.head_dim,
        element_bytes=rates.element_bytes, rates=rates,
    )  # fmt: skip


def origins(cluster) -> str:
    """What of the model is measured, and what is not."""
    known = "one H100 and NCCL and NVLink between two and four GPUs (docs/guides/simulate.md lists the records)"
    if cluster.rates.is_measured:
        known = f"{cluster.rates.words}, kernels by mask and NCCL in proportion to {known}"
    return (
        f"Measured: {known}. Modelled: all else. The network, {cluster.network_bytes_per_s / 1e9:g} GB/s and "
        f"{cluster.network_latency_s * 1e6:g} us for each GPU, is assumed; one launch over several nodes was "
        "measured over NVLink alone; USP and selective gather were never measured. All ranks are computed, none is "
        "sampled."
    )


# ---- the command --------------------------------------------------------------------------------------


def command_simulate(args: argparse.Namespace) -> int:
    from magi_attention.tools.simulate import WAYS, sweep

    if not 0 < args.goal < 1:
        raise UsageError(f"--goal is {args.goal:g}; give an efficiency between 0 and 1.")
    check_options(args)
    has_picture = args.pictures and not args.json
    if has_picture:
        need_matplotlib()
    out = make_folder(args.out or FOLDER, "--out") if has_picture else None
    cluster, mask_of, ways = cluster_of(args), mask_maker(args), args.ways or list(WAYS)
    if not args.json:
        print(origins(cluster))
    asked = sorted(set(args.gpus))
    every = sorted({*asked, *(pictured(args) if has_picture else ())})
    larger = [ranks for ranks in asked if ranks > args.node]
    with progress_bar() as bar:
        cases, found = {}, {}
        for case, one in bar.over(sweep(mask_of, every, args.tokens_per_gpu, cluster, ways), len(every) * len(ways)):
            found[one.ranks, one.way], cases[one.ranks] = one, case
        answers = [answer_of(cases[n], [found[n, w] for w in ways], mask_of, args.goal) for n in bar.over(larger)]
    answers = [one for one in answers if one is not None]
    if args.json:
        estimates = [asdict(found[n, way]) for n in asked for way in ways]
        about = {"origins": origins(cluster), "cluster": asdict(cluster), "tokens_per_gpu": args.tokens_per_gpu}
        print(json.dumps({**about, "estimates": estimates, "answers": [asdict(a) for a in answers]}))
        return 0
    for ranks in asked:
        show_size([found[ranks, way] for way in ways], cases[ranks])
    if out is not None:
        from magi_attention.tools.simulate.picture import draw

        title = f"{mask_of(args.node).name} mask, {args.tokens_per_gpu:,} tokens a GPU: a model, not a measurement"
        draw(out / "simulate.png", [found[n, way] for way in ways for n in every], title, args.goal)
        print(f"Picture: {out / 'simulate.png'}")
    for one in answers:
        print(sentence(one, cluster))
    return 0


def pictured(args: argparse.Namespace) -> Iterator[int]:
    """Powers of two from a node to the largest size, which has ``PICTURED_TOKENS`` at least."""
    ranks, most = args.node, max(*args.gpus, -(-PICTURED_TOKENS // args.tokens_per_gpu))
    while ranks < most and ranks * 2 <= LARGEST:
        yield ranks
        ranks *= 2
    yield ranks


def answer_of(case, estimates: list, mask_of, goal: float):
    """What the best of our ways needs for ``goal``; None if none of them was asked for."""
    from magi_attention.tools.simulate import OURS, answer

    mine = [one for one in estimates if one.way in OURS and one.reason is None]
    return answer(max(mine, key=lambda one: one.efficiency).way, case, mask_of, goal) if mine else None


class _Bar:
    """Steps of a long run on a terminal."""

    def __init__(self, progress) -> None:
        self._progress = progress

    def over(self, steps: Iterable[Any], total: int | None = None) -> Iterator[Any]:
        task = self._progress.add_task("", total=len(steps) if total is None else total)
        for step in steps:
            yield step
            self._progress.advance(task)


@contextmanager
def progress_bar() -> Iterator[_Bar]:
    """On standard error, so that what is printed stays as it is."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        yield _Bar(progress)


# ---- text ---------------------------------------------------------------------------------------------


def show_size(estimates: list, case) -> None:
    head = ["way", "forward", "backward", "exposed", "TFLOP/s", "efficiency"]
    from magi_attention.tools.simulate.support import is_supported

    rows, refusals, told = [head], [], set[str]()
    for one in estimates:
        if one.reason:
            refusals.append(f"{one.way}: {one.reason}.")
            continue
        marks = ["" if is_supported(error) else "~" for error in (one.forward_error, one.backward_error)]
        both = max(marks)
        times = [f"{mark}{ms:,.2f}" for mark, ms in zip(marks, (one.forward_ms, one.backward_ms))]
        rest = f"{one.exposed_ms:,.2f}", f"{one.tflops:.0f}", f"{one.efficiency:.2f}"
        rows.append([one.way, *times, *(both + text for text in rest)])
        told |= {both} - {""}
    size = f"{case.ranks:,} GPUs, {case.mask.total_q:,} tokens"
    show_table(f"{size}: modelled ms of a layer, and TFLOP/s of each GPU", rows)
    for line in [*(ESTIMATE for _ in told), *refusals, *padded(estimates, case)]:
        print(line)


def padded(estimates: list, case) -> Iterator[str]:
    """A sentence where documents in equal pieces are many more tokens than there are."""
    if any(one.way in ("ring", "all-gather") and one.reason is None for one in estimates):
        times = case.spread().rows * case.ranks / case.mask.total_q
        if times > 1.05:
            yield f"Ring and all-gather hold {times:.2f} times the tokens: documents are padded to equal pieces."


def sentence(answer, cluster) -> str:
    """What keeps the goal, or what would."""
    start = f"An estimate of {answer.way} on {answer.ranks:,} GPUs: efficiency {answer.efficiency:.2f}."
    holds = answer.efficiency >= answer.goal
    parts = []
    if not answer.network_is_used:
        parts.append("Nothing crosses the network.")
    elif answer.network_bytes_per_s is None:
        parts.append(f"With an endless network it is {answer.endless:.2f}, so no bandwidth reaches {answer.goal:g}.")
    else:
        rate = f"{answer.network_bytes_per_s / 1e9:.3g} GB/s of network for each GPU"
        parts.append(f"It is {answer.goal:g} {'down to' if holds else 'from'} {rate}{'' if holds else ' on'}.")
    if answer.even > answer.efficiency + 0.01:
        parts.append(f"Were rows sent and received by all ranks alike, it would be {answer.even:.2f}.")
    if answer.latency_s is None:
        parts.append("Exchanges without any latency would not reach it.")
    else:
        how = "up to" if holds else "with at most"
        parts.append(f"It is {answer.goal:g} {how} {readable_seconds(answer.latency_s)} for each exchange.")
    if not holds:
        more = answer.tokens_per_gpu
        enough = f"It is {answer.goal:g} from {more:,} tokens a GPU on."
        parts.append(enough if more else "64 times the tokens would not reach it.")
    return " ".join([start, *parts])


def readable_seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
