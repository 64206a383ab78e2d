# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of the pages into docs/pictures: a mask by rank, kernel speeds from committed records, and the
figures of docs/design (``make_design_pictures.py``).

    python docs/make_pictures.py [--out docs/pictures]

The same inputs and the same matplotlib give the same bytes. Each file names its input in its PNG text
``Description``, by which a test sees that a committed picture is of the present plan and record.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import make_design_pictures as design  # noqa: E402

from magi_attention.api import Mask, Plan, make_plan  # noqa: E402
from magi_attention.meta.predict.cost import contiguous_areas  # noqa: E402
from magi_attention.tools.report.pictures import paint_mask, rank_colours  # noqa: E402

# What `magi bench kernel` wrote, by direction.
RECORDS = {d: ROOT / "benchmarks" / "results" / f"kernel_{d}_h100.json" for d in ("forward", "backward")}
Speeds = dict[tuple[str, str, int, str], float]
K = 1024
INK, FAINT = "#1f2328", "#dde2e8"
# Colour and label of each implementation, in the order of the bars.
STYLES = {
    "magi_attend": ("#1f4e96", "ours: attend (mask known on the host)"),
    "magi": ("#6f9fdc", "ours: flex_flash_attn_func (mask on the GPU)"),
    "fa4": ("#e08e36", "FlashAttention-4"),
    "cudnn_flex": ("#59a869", "cudnn.flex_attention"),
    "cudnn": ("#b7d7a8", "cuDNN by torch"),
    "flex": ("#c9a0dc", "FlexAttention of torch"),
}
TITLES = {
    "full": "full",
    "causal": "causal",
    "varlen_full": "documents,\nfull",
    "varlen_causal": "documents,\ncausal",
    "sliding_window_causal": "window of\n1,024",
    "varlen_block_causal": "documents,\nblock-causal",
}


# For each part of the picture's mask: what it is called, and where that is written, in units of 1,024 tokens.
LABELS = (
    ("causal document", 3.9, 2.6, "left"),
    ("a short one", 7.8, 6.9, "left"),
    ("block-causal document\n(video)", 18.4, 14.0, "left"),
    ("sliding window\nwith global tokens", 19.8, 23.6, "right"),
    ("prefix and\ncausal rest", 26.8, 29.6, "right"),
)


def readme_plan() -> Plan:
    """One packed sequence of 32K tokens for 8 ranks: four kinds of documents, none of which sees another."""
    parts = [
        Mask.varlen([0, 6 * K, 8 * K], causal=True),
        Mask.block_causal(12 * K, block=2 * K),
        Mask.sliding_window(7 * K, (1023, 0), global_prefix=256),
        Mask.prefix_lm(5 * K, prefix=2 * K),
    ]
    return make_plan(Mask.batched(parts), cp_size=8, num_heads_q=64, num_heads_kv=8, head_dim=128)


def _figure(width: float, height: float) -> Figure:
    """Opaque and white, so that it can be read on a dark page too."""
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def mask_by_rank(plan: Plan) -> Figure:
    """The mask coloured by rank, and beside it the work of each rank."""
    figure = _figure(9.6, 4.9)
    left, right = figure.subplots(1, 2, width_ratios=(1.3, 1))
    paint_mask(left, plan)
    cells = 512 * K / plan.padded_tokens  # of the image, for 1,024 tokens
    ticks = range(0, plan.padded_tokens // K + 1, 8)
    for set_ticks in (left.set_xticks, left.set_yticks):
        set_ticks([t * cells - 0.5 for t in ticks], [f"{t}K" if t else "0" for t in ticks])
    for name, x, y, side in LABELS:
        left.text(x * cells, y * cells, name, ha=side, va="center", fontsize=9, color=INK)
    left.set_title("Which query sees which key. Colours are ranks.", fontsize=10, loc="left", color=INK)
    left.spines[["top", "right"]].set_visible(False)
    _work(right, plan)
    return figure


def _work(axis, plan: Plan) -> None:
    """Bars: allowed pairs of each rank, beside an equal split of the sequence."""
    equal, planned = contiguous_areas(plan) / 1e6, plan.areas / 1e6
    ranks = np.arange(plan.cp_size)
    axis.barh(ranks - 0.2, planned, 0.4, color=rank_colours(plan.cp_size))
    axis.barh(ranks + 0.2, equal, 0.4, color=FAINT)
    axis.set_yticks(ranks, [f"rank {r}" for r in ranks])
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlim(0, equal.max() * 1.08)
    axis.set_xlabel("million (query, key) pairs to compute")
    axis.set_title("Work of each rank", fontsize=10, loc="left", color=INK)
    handles = [
        tuple(Patch(color=colour) for colour in rank_colours(3)),
        Patch(color=FAINT),
    ]
    labels = [
        f"this plan: heaviest / mean {plan.imbalance:.2f}",
        f"equal runs of tokens: {equal.max() / equal.mean():.2f}",
    ]
    handlers = {tuple: HandlerTuple(ndivide=None, pad=0)}
    axis.legend(handles, labels, handler_map=handlers, handlelength=2.4, frameon=False, fontsize=8.5, loc="lower right")


def read_records() -> dict[str, dict]:
    return {direction: json.loads(path.read_text()) for direction, path in RECORDS.items()}


def speeds(records: dict[str, dict]) -> Speeds:
    """TFLOP/s by (direction, mask, length, name of ``STYLES``). Of the two forms of cudnn.flex_attention the faster."""
    found: Speeds = {}
    for direction, record in records.items():
        for row in record["results"]:
            key = (direction, row["mask"], row["seqlen"], row["name"].removesuffix("_thd"))
            if key[-1] in STYLES and row["tflops"]:
                found[key] = max(row["tflops"], found.get(key, 0.0))
    return found


def _places(found: Speeds) -> dict[tuple[str, int], float]:
    """x of the bars of every (mask, length); masks in the order of TITLES, a gap between two."""
    cells = {(mask, seqlen) for _, mask, seqlen, _ in found}
    places, at, last = {}, 0.0, None
    for mask, seqlen in sorted(cells, key=lambda cell: (list(TITLES).index(cell[0]), cell[1])):
        at += 1.0 if mask == last else 1.5
        places[mask, seqlen], last = at, mask
    return places


def kernel_speed(records: dict[str, dict]) -> Figure:
    """A bar for each implementation: forward above, backward below."""
    figure = _figure(10.4, 6.0)
    axes = figure.subplots(2, 1, sharex=True)
    found = speeds(records)
    places = _places(found)
    for axis, direction in zip(axes, RECORDS):
        _bars(axis, found, places, direction)
    axes[1].set_xticks(list(places.values()), [f"{seqlen // K}K" for _, seqlen in places])
    for mask, title in TITLES.items():
        middle = float(np.mean([x for (name, _), x in places.items() if name == mask]))
        place = {"xy": (middle, -0.13), "xycoords": ("data", "axes fraction"), "annotation_clip": False}
        axes[1].annotate(title, **place, ha="center", va="top", fontsize=10, color=INK)
    handles = [Patch(color=colour, label=label) for colour, label in STYLES.values()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9.5)
    where = records["forward"]["environment"]
    figure.suptitle(
        f"Attention kernels on one {where['gpu']}: TFLOP/s, more is better\n"
        f"64 query heads on 8, head dim 128, bf16; {where['time'][:10]}, commit {where['commit']}",
        fontsize=11, color=INK,
    )  # fmt: skip
    return figure


def _bars(axis, found: Speeds, places: dict, direction: str) -> None:
    width = 0.84 / len(STYLES)
    for order, (name, (colour, _)) in enumerate(STYLES.items()):
        shift = (order - (len(STYLES) - 1) / 2) * width
        bars = [
            (at + shift, found[key])
            for (mask, seqlen), at in places.items()
            if (key := (direction, mask, seqlen, name)) in found
        ]
        axis.bar(*zip(*bars), width * 0.95, color=colour, zorder=2)
    axis.grid(axis="y", color="#e4e7eb", lw=0.8, zorder=0)
    axis.set_ylim(0, 760)
    axis.set_xlim(min(places.values()) - 0.7, max(places.values()) + 0.7)
    axis.set_ylabel(direction, fontsize=11, color=INK)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(length=0)


def save(figure: Figure, path: Path, description: str) -> None:
    """A PNG without the time and the version of the program that wrote it."""
    metadata = {"Software": None, "Description": description}
    figure.savefig(path, format="png", metadata=metadata)


def descriptions() -> dict[str, str]:
    """Name of each picture -> the input that it shows."""
    plan = readme_plan()
    drawn = plan.slices.array.tobytes() + repr((plan.padded_tokens, plan.chunk_size, plan.partitions)).encode()
    data = b"".join(path.read_bytes() for path in RECORDS.values())
    mask, record = (hashlib.sha256(x).hexdigest() for x in (drawn, data))
    names = ", ".join(path.name for path in RECORDS.values())
    readme = {"mask_by_rank.png": f"slices and partitions {mask}", "kernel_speed.png": f"{names} {record}"}
    return {**readme, **design.descriptions()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures", help="folder (docs/pictures)")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    figures = {
        "mask_by_rank.png": mask_by_rank(readme_plan()),
        "kernel_speed.png": kernel_speed(read_records()),
        **design.figures(),
    }
    for name, description in descriptions().items():
        save(figures[name], out / name, description)
        print(out / name)


if __name__ == "__main__":
    main()
