# SPDX-License-Identifier: Apache-2.0
"""Records of one benchmark as a page that needs no network, and beside a baseline; the last step of `magi bench`.

    python benchmarks/report.py runs/NAME/forward.json runs/NAME/backward.json --out runs/NAME/report.html
                                [--baseline benchmarks/results/NAME.json] [--fail-above 1.05]

How records are compared stands in ci/compare_results.py. Only cells that both have are. The noise of a ratio is half of
what lies between the 10% and the 90% quantile of the repeats, of both records in quadrature. Exit codes: 0, or 1 if
--fail-above finds something, 2 if nothing can be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent), str(FOLDER.parent / "ci")]

from compare_results import Verdict, above, compare, merge  # noqa: E402
from peers import CP_PEERS, PEERS  # noqa: E402
from picture import BOUNDS, colours_of, is_variant, names_of, short, unit_of, value_of, words  # noqa: E402
from result_files import (  # noqa: E402
    CONTEXT_PARALLEL,
    GROUP_COLLECTIVES,
    KERNEL,
    PLANNER,
    RANGE_OPS,
    SPARSE,
    TRAIN,
    Cell,
    Incomparable,
    Run,
    load,
)

TITLES = {
    KERNEL: "Attention on one device", CONTEXT_PARALLEL: "Attention over several ranks",
    GROUP_COLLECTIVES: "Rows between ranks", RANGE_OPS: "Rows on one GPU", PLANNER: "Planning a new mask",
    TRAIN: "Training steps", SPARSE: "Sparse attention on one device",
}  # fmt: skip
LEADS = {
    KERNEL: "One packed sequence on one device, forward and backward timed apart. Sizes are tokens.",
    CONTEXT_PARALLEL: "One packed sequence over all ranks. Sizes are tokens of one rank; rates are of one rank.",
    GROUP_COLLECTIVES: "Each rank sends its rows of K and V to all others, or adds up what it gets. Sizes are rows.",
    RANGE_OPS: "Moves and sums of rows. Sizes are the elements of a row.",
    PLANNER: "From a new mask to the plan of a rank, on one thread of the host; best of the repeats. Less is better.",
    SPARSE: "Blocks, or single keys, of one sequence; rates count the pairs that are seen. Sizes are tokens.",
    TRAIN: "Whole steps of a Llama on packed causal documents with FSDP2. Sizes are tokens of a sequence.",
}
LABELS: dict[str, dict[str, str]] = {
    KERNEL: {
        "magi": "flex_flash_attn_func", "magi_attend": "attend", "magi_host": "our kernels, called directly",
        "magi_det": "our kernels, deterministic", "magi_fa4": "ours on FlashAttention-4's wheel",
        "magi_cudnn_flex": "ours on cudnn.flex_attention's wheel", **{n: p.label for n, p in PEERS.items()},
    },
    CONTEXT_PARALLEL: {
        "magi": "calc_attn, nothing set", "magi_fused": "ours, one launch over NVLink",
        "attend_keys": "attend, keys move", "attend_auto": "attend, queries move where it saves",
        "attend_moves": "attend, whatever is cheapest moves",
        "magi_a2av_0": "ours, needed rows first", "magi_a2av_1": "ours, at most 1 stage",
        "magi_a2av_2": "ours, 2 stages",
        "magi_nodes": "ours, each GPU a node, NVSHMEM", "magi_nodes_a2av": "ours, each GPU a node, all-to-all-v",
        "magi_nodes_2": "ours, nodes of 2, NVSHMEM", "magi_nodes_2_a2av": "ours, nodes of 2, all-to-all-v",
        "magi_nodes_4": "ours, nodes of 4, NVSHMEM",
        "magi_nodes_fused": "ours, each GPU a node, one launch", "magi_nodes_2_fused": "ours, nodes of 2, one launch",
        "magi_nodes_4_fused": "ours, nodes of 4, one launch",
        "one_gpu": "equal share, nothing sent", "all_gather": "all-gather",
        "ring": "ring, zigzag", "ulysses": "Ulysses", "usp": "USP", **{n: p.label for n, p in CP_PEERS.items()},
        "torch_flash": "context parallelism of torch, FlashAttention-2",
    },
    GROUP_COLLECTIVES: {
        "native": "ours, over NVLink", "all-to-all": "ours, by all-to-all",
        "torch": "torch: all-gather, reduce-scatter", "copy": "plain copies",
    },
    SPARSE: {
        "magi": "flex_flash_attn_func, index_attn_func", "magi_blocks": "block_sparse_attn_func",
        "magi_attend": "attend", "gather": "keys gathered by PyTorch",
        "dense": "ours, full mask", **{n: p.label for n, p in PEERS.items()},
    },
    RANGE_OPS: {"magi": "ours"},
    PLANNER: {
        "magi": "mask to rank's plan", "magi_mask": "of it: the mask", "magi_plan": "of it: make_plan",
        "magi_rank": "of it: the plan of the rank",
    },
    TRAIN: {
        "magi": "attend, a sequence over all ranks", "magi_data_parallel": "attend, a sequence for each rank",
        "sdpa": "scaled_dot_product_attention, a sequence for each rank",
    },
}  # fmt: skip


def cells_of(run: Run) -> list[Cell]:
    """As they were measured, one operation after another."""
    directions = list(dict.fromkeys(c.direction for c in run.results))
    return sorted(run.results, key=lambda cell: directions.index(cell.direction))


def label_of(run: Run, name: str) -> str:
    return LABELS[run.benchmark].get(name, words(name))


def role_of(run: Run, name: str) -> str:
    if name == run.ours:
        return "ours"
    return "variant" if is_variant(run, name) else "bound" if name in BOUNDS else "peer"


def notice_of(run: Run) -> str:
    if run.environment.get("gpu") or run.benchmark == PLANNER:
        return ""
    return "This ran on the CPU, to try the command. Its figures say nothing about GPUs."


# ---- the page ---------------------------------------------------------------------------------------------


def facts_of(run: Run) -> list[tuple[str, str]]:
    """Machine, versions, commit and settings, as rows of a table."""
    facts = [(key, value) for key, value in run.environment.items() if value not in (None, "", {})]
    settings = [(f"settings{f' {n}' if len(run.settings) > 1 else ''}", s) for n, s in enumerate(run.settings, 1)]
    return [(k, v if isinstance(v, str) else json.dumps(v)) for k, v in [*facts, *settings]]


def cell_of(run: Run, cell: Cell) -> dict[str, Any]:
    speeds, values = run.speeds(cell), {}
    for name, row in run.results[cell].items():
        shown = value_of(run, cell, name) if name in speeds else None
        values[name] = {
            "speed": speeds.get(name), "shown": shown, "ms": row.get("ms"), "noise": row.get("noise"),
            "reason": row.get("reason"),
        }  # fmt: skip
    return {
        "direction": cell.direction, "mask": words(cell.mask), "size": short(cell.seqlen), "values": values,
        "where": f", {cell.world} ranks" if cell.world > 1 else "",
    }  # fmt: skip


def data_of(run: Run, baseline: dict[str, Any] | None) -> dict[str, Any]:
    """What the page shows, as JSON."""
    cells, environment, colours = cells_of(run), run.environment, colours_of(run)
    where = environment.get("gpu") or environment.get("cpu") or environment.get("host") or "an unknown machine"
    versions = [f"torch {environment.get('torch')}", f"commit {environment.get('commit')}", environment.get("time")]
    names = [
        {"name": n, "label": label_of(run, n), "role": role_of(run, n), "colour": colours[n]} for n in names_of(run)
    ]
    return {
        "title": TITLES[run.benchmark], "lead": f"{LEADS[run.benchmark]} {where}; {', '.join(map(str, versions))}.",
        "notice": notice_of(run), "unit": unit_of(run)[0], "less": run.benchmark == PLANNER, "ours": run.ours,
        "names": names,
        "directions": list(dict.fromkeys(c.direction for c in run.results)),
        "masks": list(dict.fromkeys(words(c.mask) for c in run.results)),
        "sizes": [short(n) for n in sorted({c.seqlen for c in cells})],
        "cells": [cell_of(run, c) for c in cells], "missing": run.missing, "facts": facts_of(run),
        "baseline": baseline,
        "alone": all(n["role"] in ("ours", "variant") for n in names),
    }  # fmt: skip


def page(data: dict[str, Any]) -> str:
    """The page with its data inside."""
    from magi_attention.tools.report.html import in_script

    text = in_script(json.dumps(data, allow_nan=False))
    return (FOLDER / "page.html").read_text(encoding="utf-8").replace("/*DATA*/", text)


# ---- the baseline -------------------------------------------------------------------------------------------


def beside(run: Run, baseline: Run) -> tuple[list[Verdict], list[str]]:
    """Verdicts on the cells that both have, and notes; ``Incomparable`` if there are none."""
    if run.benchmark != baseline.benchmark:
        raise Incomparable(f"The baseline is of {baseline.benchmark}, not of {run.benchmark}; name one of the same.")
    shared = {cell: rows for cell, rows in baseline.results.items() if cell in run.results}
    if not shared:
        raise Incomparable(
            f"No cell of the baseline was measured. It has, for one, {next(iter(baseline.results))!r}, and this has "
            f"{next(iter(run.results))!r}; measure with the settings of the baseline."
        )
    left = len(baseline.results) - len(shared)
    verdicts, notes = compare(replace(baseline, results=shared), run)
    return verdicts, [*notes, *([f"{left} cells of the baseline were not measured."] if left else [])]


def rows_of(verdicts: Sequence[Verdict], limit: float | None) -> list[dict[str, Any]]:
    bad = [id(v) for v in above(verdicts, limit)] if limit is not None else []
    rows = []
    for v in verdicts:
        ratio, noise = v.ratio, v.noise
        is_same = ratio is not None and abs(ratio - 1) <= (noise or 0.0)
        change = "same" if is_same else "" if ratio is None else "slower" if ratio > 1 else "faster"
        word = f"above {limit:g}" if id(v) in bad and ratio is not None else change or v.status
        rows.append({
            "cell": str(v.cell), "ratio": ratio, "noise": noise, "measure": v.measure,
            "verdict": "; ".join([word, *v.notes]), "bad": id(v) in bad,
        })  # fmt: skip
    return rows


def sentence(rows: Sequence[dict[str, Any]], limit: float) -> str:
    """Which cells fail."""
    bad = [r for r in rows if r["bad"]]
    if not bad:
        return f"No cell takes more than {limit:g} times as long as the baseline, beyond its noise."
    told = [f"{r['cell']} ({r['verdict'] if r['ratio'] is None else format(r['ratio'], '.2f')})" for r in bad]
    verb = "cell takes" if len(bad) == 1 else "cells take"
    return f"{len(bad)} {verb} more than {limit:g} times as long as the baseline, beyond noise: {', '.join(told)}."


# ---- the terminal ---------------------------------------------------------------------------------------------


def summary(run: Run) -> list[list[str]]:
    """For each cell ours, the fastest peer and how many times as fast ours is."""
    rows = [["", run.ours, "fastest peer", "ours / peer"]]
    for cell in cells_of(run):
        speeds = run.speeds(cell)
        if run.ours not in speeds:
            rows.append([str(cell), "-", run.results[cell].get(run.ours, {}).get("reason") or "not measured", ""])
            continue
        peers = {n: s for n, s in speeds.items() if role_of(run, n) == "peer"}
        best = max(peers, key=peers.__getitem__, default=None)
        told = ["-", ""]
        if best is not None:
            told = [f"{value_of(run, cell, best):.4g} {best}", f"{speeds[run.ours] / peers[best]:.2f}"]
        rows.append([str(cell), f"{value_of(run, cell, run.ours):.4g}", *told])
    return rows


def compared(run: Run, options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Exit code, and what the page says of the baseline."""
    from magi_attention.cli.common import show_table

    try:
        verdicts, notes = beside(run, merge([load(path) for path in options.baseline]))
    except Incomparable as reason:
        print(f"magi bench: {reason}", file=sys.stderr)
        return 2, {"rows": [], "notes": [str(reason)]}
    rows = rows_of(verdicts, options.fail_above)
    table = [["", "time / old", "noise", "by", "verdict"]]
    for r in rows:
        ratio, noise = ("-" if x is None else f"{x:.3f}" for x in (r["ratio"], r["noise"]))
        table.append([r["cell"], ratio, noise, r["measure"], r["verdict"]])
    show_table("Beside the baseline", table)
    if options.fail_above is not None:
        notes.append(sentence(rows, options.fail_above))
    print(*notes, sep="\n")
    return 1 if any(r["bad"] for r in rows) else 0, {"rows": rows, "notes": notes}


def main(arguments: Sequence[str] | None = None) -> int:
    from magi_attention.cli.common import show_table

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("records", type=Path, nargs="+", help="that --out of the same benchmark wrote")
    add("--out", type=Path, required=True, help="the page")
    add("--baseline", type=Path, nargs="+", metavar="FILE", help="records to compare with")
    add("--fail-above", type=float, metavar="RATIO", help="1.05 fails where ours takes over 1.05 times as long")
    options = parser.parse_args(arguments)
    try:
        run = merge([load(path) for path in options.records])
    except Incomparable as reason:
        print(f"magi bench: {reason}", file=sys.stderr)
        return 2
    title = f"{TITLES[run.benchmark]}, {unit_of(run)[0]}; ours is {label_of(run, run.ours)}"
    show_table(title, summary(run))
    for label, how in run.missing.items():
        print(f"Not installed: {label} ({how})")
    if notice := notice_of(run):
        print(notice)
    code, told = compared(run, options) if options.baseline else (0, None)
    options.out.write_text(page(data_of(run, told)), encoding="utf-8")
    print(f"Page: {options.out}")
    return code


if __name__ == "__main__":
    sys.exit(main())
