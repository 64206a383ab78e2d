# SPDX-License-Identifier: Apache-2.0
"""`magi explain --budget`: how long planning a mask takes here, beside the predicted attention of a training step."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from magi_attention.cli.common import UsageError, show_table
from magi_attention.cli.plans.masks import build_mask
from magi_attention.errors import UnsupportedError

LAYERS = 32  # default of --layers
RANKS_OF_A_HOST = 8  # up to so many take one launch, as over NVLink
_REPEATS = 5
_PARTS = {
    "mask": "the mask",
    "plan": "its plan: chunks, dispatch, remote keys",
    "rank": "the part of rank 0",
    "layout": "layouts of the rows that travel",
    "schedule": "tile plans and schedules of the kernels",
}


def check_budget_options(args: argparse.Namespace) -> None:
    if args.layers is not None and not args.budget:
        raise UsageError("--layers goes with --budget, and nothing else counts layers; add --budget or drop it.")
    if args.layers is not None and args.layers < 1:
        raise UsageError(f"--layers is {args.layers}; give at least 1.")
    if args.rates and not Path(args.rates).is_file():
        raise UsageError(f"{args.rates} is no file; `magi tune --file {args.rates}` writes it.")


def rates_of(args: argparse.Namespace):
    """Rates of --rates, else what `magi tune` measured on this machine, else assumed ones."""
    from magi_attention.api.planning.rates import device_name
    from magi_attention.config.rates import MachineRates, find_rates, rates_file, read_rates

    entries = read_rates(Path(args.rates) if args.rates else rates_file())
    device = device_name()
    if args.rates and device not in (devices := sorted({entry.device for entry in entries})):
        if len(devices) != 1:
            raise UsageError(f"{args.rates} has rates of {', '.join(devices) or 'nothing'}; keep those of one device.")
        device = devices[0]
    found = find_rates(entries, device, args.cp)
    if found is None and args.rates:
        raise UsageError(f"{args.rates} is of another version of the package; run `magi tune` again.")
    return found or MachineRates()


def tiles_of(args: argparse.Namespace) -> tuple[Any, str]:
    """Tiles of the kernels, and whose: this GPU's, else those of an H100."""
    import torch

    from magi_attention.api import kernel_tiles
    from magi_attention.kernels.ffa.ahead import KernelTiles
    from magi_attention.kernels.types import AttnOptions
    from magi_attention.native.ffa import FfaTile, ForwardTiles

    shape = {"num_heads_q": args.heads_q, "num_heads_kv": args.heads_kv, "head_dim": args.head_dim}
    is_fused = 1 < args.cp <= RANKS_OF_A_HOST
    found = kernel_tiles("cuda", torch.bfloat16, **shape) if torch.cuda.is_available() else None
    if found is not None:
        return found._replace(is_fused=is_fused), "the kernels of this GPU"
    tile, heads, options = FfaTile(128, 2, 1), (args.heads_q, args.heads_kv), AttnOptions(args.head_dim**-0.5)
    tiles = KernelTiles(ForwardTiles(tile), tile, heads, (args.head_dim, args.head_dim), 132, options, False, is_fused)
    return tiles, "the kernels of an H100"


def measure_planning(args: argparse.Namespace, tiles: Any, plan_for: Callable[..., Any]) -> dict[str, float | None]:
    """Median seconds of each part, each time for a mask that nothing has seen; None for what cannot be made here."""
    from magi_attention.functional.ahead import make_layouts, make_tables

    def tables(plan) -> bool:
        try:
            make_tables(plan, 0, tiles)
        except UnsupportedError:  # no planner library; what is printed says so
            return False
        return True

    found: dict[str, list[float]] = {part: [] for part in _PARTS}
    is_made = True
    for _ in range(_REPEATS + 1):
        times = [perf_counter()]
        mask = build_mask(args)
        times.append(perf_counter())
        plan = plan_for(mask, args.cp, args, args.dispatch, args.query_moves)
        times.append(perf_counter())
        plan.rank(0)
        times.append(perf_counter())
        make_layouts(plan, 0, tiles.is_fused)
        times.append(perf_counter())
        is_made = tables(plan)
        times.append(perf_counter())
        for part, begin, end in zip(_PARTS, times, times[1:]):
            found[part].append(end - begin)
    # The first one loads what has to be loaded.
    return {part: median(x[1:]) if part != "schedule" or is_made else None for part, x in found.items()}


def budget_of(plan, args: argparse.Namespace, plan_for: Callable[..., Any]) -> dict[str, Any]:
    """All figures, seconds and bytes, ready for JSON. ``plan_for`` makes the plan of a mask, as that of `explain`."""
    from magi_attention.meta.predict.budget import layer_times

    rates, (tiles, whose) = rates_of(args), tiles_of(args)
    planning, layers = measure_planning(args, tiles, plan_for), args.layers or LAYERS
    forward, backward = layer_times(plan, rates, rates.element_bytes)
    total, attention = sum(x or 0.0 for x in planning.values()), layers * (forward["seconds"] + backward["seconds"])
    left = max(total - attention, 0.0)  # what the attention of the step before does not hide
    return {
        "measured": {"planning_s": planning, "planning_total_s": total, "kernels": whose},
        "modelled": {
            "rates": rates.words, "is_measured": rates.is_measured, "element_bytes": rates.element_bytes,
            "layers": layers, "forward": forward, "backward": backward, "attention_s": attention,
        },
        "share_on_the_training_thread": total / (total + attention),
        "share_if_planned_ahead": left / (left + attention) if left else 0.0,
    }  # fmt: skip


def show_budget(budget: dict[str, Any]) -> None:
    from magi_attention.tools.report.describe import readable_bytes

    measured, modelled = budget["measured"], budget["modelled"]
    rows = [["planning, measured here", "ms"]]
    for part, words in _PARTS.items():
        seconds = measured["planning_s"][part]
        rows.append([words, "no planner library" if seconds is None else f"{seconds * 1e3:.3f}"])
    show_table("Budget of a step", [*rows, ["all of it", f"{measured['planning_total_s'] * 1e3:.3f}"]])
    table = [["attention of a layer, modelled", "ms", "of these exposed", "received by the busiest rank"]]
    for name in ("forward", "backward"):
        time = modelled[name]
        numbers = f"{time['seconds'] * 1e3:.3f}", f"{time['exposed_s'] * 1e3:.3f}"
        table.append([name, *numbers, readable_bytes(time["received_bytes"])])
    show_table("", table)
    print(f"Tile plans are those of {measured['kernels']}. Attention is modelled for {modelled['rates']}.")
    now, ahead = budget["share_on_the_training_thread"], budget["share_if_planned_ahead"]
    print(
        f"{modelled['layers']} layers take {modelled['attention_s'] * 1e3:.1f} ms. Planning on the training thread is "
        f"{now:.1%} of planning and attention; made one step ahead (plan_async), {ahead:.1%}. What else a step does "
        "makes both smaller."
    )
