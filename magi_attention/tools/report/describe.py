# SPDX-License-Identifier: Apache-2.0
"""The numbers of a plan as tables for the terminal and as sections of a page.

``numbers`` is everywhere the dict of ``magi_attention.meta.explain.explain``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from magi_attention.meta.plan import Plan
from magi_attention.tools.report.html import Fact

FEW = 16  # so many ranks get a row each; more are summed up
Table = list[list[str]]


def relative_differences(first: Sequence[float], second: Sequence[float]) -> np.ndarray:
    """|a - b| / |b| over the steps that both have."""
    steps = min(len(first), len(second))
    a, b = np.asarray(first[:steps]), np.asarray(second[:steps])
    return np.abs(a - b) / np.maximum(np.abs(b), 1e-30)


def readable_bytes(count: float) -> str:
    for limit, suffix in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= limit:
            return f"{count / limit:.2f} {suffix}"
    return f"{count:.0f} B"


def plan_facts(plan: Plan, numbers: dict) -> list[Fact]:
    """The figures for the head of a page."""
    share = numbers["bytes_total"] / max(numbers["all_gather_bytes"], 1)
    return [
        Fact(f"{plan.total_tokens:,}", "tokens"),
        Fact(f"{plan.cp_size}", "ranks"),
        Fact(f"{numbers['imbalance']:.4f}", "imbalance, max/mean"),
        Fact(readable_bytes(numbers["bytes_total"]), "moved per forward"),
        Fact(f"{share:.1%}", "of all-gather's volume"),
    ]


def overview_table(plan: Plan, numbers: dict) -> Table:
    """One row per figure."""
    pad = f" (+ {plan.pad_size:,} pad)" if plan.pad_size else ""
    dense, least = max(plan.total_tokens**2, 1), numbers["least_rows"]
    return [
        ["figure", "value"],
        ["tokens", f"{plan.total_tokens:,}{pad}"],
        ["slices", f"{len(plan.slices):,}"],
        ["area (allowed pairs)", f"{numbers['area']:,}"],
        ["share of the dense square", f"{numbers['area'] / dense:.2%}"],
        ["ranks", f"{plan.cp_size}"],
        ["chunks", f"{plan.num_chunks:,} of {plan.chunk_size:,} tokens"],
        ["ranges of tokens of a rank, at most", f"{max(numbers['fragments']):,}"],
        ["imbalance, max/mean", f"{numbers['imbalance']:.4f}"],
        ["the same for a contiguous split", f"{numbers['imbalance_contiguous']:.4f}"],
        ["rows of K and V fetched, all ranks", f"{sum(numbers['rows_received']):,}"],
        ["fewest rows at this balance", "not counted" if least is None else f"{least:,}"],
        ["overlap stages", f"{plan.num_stages}" + (" (degree 0: no overlap)" if plan.degree == 0 else "")],
        ["fingerprint", plan.fingerprint],
    ]


def about_rows(plan: Plan, numbers: dict) -> str:
    """What the two figures of rows mean, in sentences, and the heads by which bytes are counted."""
    fetched, least = sum(numbers["rows_received"]), numbers["least_rows"]
    text = (
        f"A row is K and V of one token: {plan.num_heads_kv} heads of {plan.head_dim}, "
        f"{readable_bytes(numbers['row_bytes'])}. A rank fetches the rows that its queries see and that it does not "
        f"hold: {fetched:,} in one forward, of all ranks. "
    )
    if least is None:
        return text + "How few it could be is not counted for a mask of this size."
    return text + (
        f"No plan fetches fewer than {least:,} whose heaviest rank has as little to compute and whose queries stay "
        "where they are. That is a lower bound: the best plan may need more."
    )


def rank_table(plan: Plan, numbers: dict) -> Table:
    """Tokens, area and rows of each rank, or smallest, mean and largest of more than 16."""
    areas = np.array(numbers["areas"], dtype=float)
    columns = [
        ("tokens", numbers["shard_sizes"], "{:,.0f}".format),
        ("area (M)", areas / 1e6, "{:,.2f}".format),
        ("/ mean", areas / max(areas.mean(), 1e-30), "{:.4f}".format),
        ("rows out", numbers["rows_sent"], "{:,.0f}".format),
        ("rows in", numbers["rows_received"], "{:,.0f}".format),
        ("bytes in", np.array(numbers["rows_received"]) * numbers["row_bytes"], readable_bytes),
    ]
    table = [["rank", *(name for name, _, _ in columns)]]
    if plan.cp_size <= FEW:
        for rank in range(plan.cp_size):
            table.append([str(rank), *(show(values[rank]) for _, values, show in columns)])
    else:
        for label, summary in (("smallest", np.min), ("mean", np.mean), ("largest", np.max)):
            table.append([label, *(show(float(summary(values))) for _, values, show in columns)])
    return table


def link_table(links: dict) -> Table:
    """Bytes on the network and inside nodes, of ``meta.explain.explain_links``, straight and by two levels; and under
    ``without_nodes`` those of a dispatch that does not know of nodes, if there are any."""
    table = [["forward", "network", "busiest rank", "inside nodes", "busiest rank"]]
    kinds = ("network_bytes", "busiest_network_bytes", "node_bytes", "busiest_node_bytes")
    for found, of in ((links, ""), (links.get("without_nodes"), ", dispatch without nodes")):
        for name, words in (("direct", "straight to each rank"), ("two_levels", "once to each node")) if found else ():
            table.append([words + of, *(readable_bytes(found[name][kind]) for kind in kinds)])
    return table


def volume_table(plan: Plan, numbers: dict) -> Table:
    """Bytes of K and V of every stage, and of ring P2P and all-gather for comparison."""
    unit, everything = numbers["row_bytes"], max(numbers["all_gather_bytes"], 1)
    stage_rows = np.array(numbers["stage_rows"], dtype=np.int64).reshape(plan.cp_size, -1)
    lines = [(f"stage {stage}", stage_rows[:, stage]) for stage in range(stage_rows.shape[1])]
    others = plan.padded_tokens - np.array(plan.shard_sizes)
    lines += [
        ("this plan, all stages", np.array(numbers["rows_received"])),
        (f"ring P2P, {plan.cp_size - 1} steps", others),
        ("all-gather", others),
    ]
    table = [["forward", "all ranks", "busiest rank receives", "of all-gather"]]
    for name, rows in lines:
        total, busiest = int(rows.sum()) * unit, int(rows.max()) * unit
        table.append([name, readable_bytes(total), readable_bytes(busiest), f"{total / everything:.1%}"])
    return table
