# SPDX-License-Identifier: Apache-2.0
"""The model of `magi simulate` beside the records of two and four GPUs, cell by cell.

A record says how many rows its plan moved and how well it was balanced. Where one of our dispatches gives such a plan,
the model has that one; else it has today's, and the row of the table has a star.

    python benchmarks/simulated.py [--cells] [--write] [--records benchmarks/results/NAME.json ...]

The page has two tables. The records of the first are older than the rule by which a single stage may be waited for.
They have both, so they say whether the rule is right, too. Those of the second are newer, and so those of ``--records``
are taken to be. A record from before ``FASTER_FORWARD`` is compared with the forward of its time.

``--cells`` prints milliseconds, measured and modelled, of every cell. ``--write`` puts the tables and their summary
into docs/guides/simulate-records.md, and the largest errors into the model's ``support``.

Records may have implementations over logical nodes, all of one machine. Their network is NVLink, then: as fast as puts
are there by NVSHMEM, as fast as NCCL by all-to-all-v. In one launch the same CTAs put what goes to other nodes and what
stays. Plans over nodes are those of today.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import numpy as np  # noqa: E402
from cp_layout import Layout, make_cases  # noqa: E402
from simulated_tables import (  # noqa: E402
    NAMES,
    NODE_SIZES,
    CellError,
    Choice,
    cell_lines,
    largest_errors,
    node_way,
    summary,
    table,
    write_page,
    write_support,
)

from magi_attention.common.intervals import merge_intervals  # noqa: E402
from magi_attention.common.mask import Mask  # noqa: E402
from magi_attention.common.slices import SliceTable  # noqa: E402
from magi_attention.config import DispatchConfig, DistAttnConfig, LocalityDispatchAlg, OverlapConfig, links  # noqa: E402
from magi_attention.meta.chunking import Cut, chunk_bounds  # noqa: E402
from magi_attention.meta.plan import Plan  # noqa: E402
from magi_attention.meta.planner import PlanOptions, build_plan, plan_for_partitions  # noqa: E402
from magi_attention.meta.solver.links import count_rows  # noqa: E402
from magi_attention.meta.solver.locality import (  # noqa: E402
    TOLERATED,
    Areas,
    lower_bound,
    order_of_chunks,
    swap_down,
    two_ended,
)
from magi_attention.meta.solver.ownership import owners  # noqa: E402
from magi_attention.meta.solver.partition import min_heap, sequential  # noqa: E402
from magi_attention.tools.simulate import ours  # noqa: E402
from magi_attention.tools.simulate.events import Outcome  # noqa: E402
from magi_attention.tools.simulate.machine import Calibration, Cluster  # noqa: E402
from magi_attention.tools.simulate.one_launch import one_launch  # noqa: E402
from magi_attention.tools.simulate.ways import WAYS, Case, share_seconds  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results"
BLOCK = 64  # queries of a step of the backward
RECORDS = ("context_parallel_h100x2.json", "context_parallel_h200x2.json", "context_parallel_h200x4.json")
NEW_RECORDS = ("context_parallel_nodes_h100x4.json", "context_parallel_nodes_h200x2.json")
FASTER_FORWARD = "2026-11-27"  # from this day on records have the forward with three consumer warpgroups
MEASURED_WAYS = WAYS | {NAMES["magi_a2av_1"]: lambda case, *rest: ours.staged(case.plan_work(1), *rest, may_wait=False)}


@cache
def cases_of(
    mask: str, tokens: int, cluster: Cluster, packs: int, seed: int, measured: tuple[tuple[int, int, float], ...]
) -> tuple[tuple[Case, bool, frozenset[str]], ...]:
    """Cases of a record; the GPUs of ``cluster`` are one node. ``measured``: of the plan of each the chunk size, the
    rows of the rank that received most, and the balance. With each case whether its plan is like that, and in which
    ways some call has blind rows."""
    found = []
    for case, (chunk, rows, balance) in zip(make_cases(mask, tokens * cluster.node, packs, seed), measured):
        partitions = partitions_like(case.mask, cluster.node, chunk, rows, balance)
        plan_of = None if partitions is None else partial(plan_by, case.mask, chunk, partitions, cluster)
        calls = [*calls_of_peers(Layout(case, cluster.node)), *(calls_of_stages(plan_of) if plan_of else ())]
        blind = frozenset(way for way, table, queries in calls if has_blind_rows(table, queries))
        found.append((Case(case.mask, cluster.node, cluster, plan_of=plan_of), partitions is not None, blind))
    return tuple(found)


Call = tuple[str, SliceTable, int]  # of a kernel: way, slices, queries


def calls_of_peers(layout: Layout) -> Iterator[Call]:
    for rank in range(layout.parts):
        yield "all-gather", layout.local_slices(rank), layout.rows
        for other in range(layout.parts):
            yield "ring", layout.local_slices(rank, other), layout.rows


def calls_of_stages(plan_of: Callable[[int], Plan]) -> Iterator[Call]:
    for way, degree in ((NAMES["magi_a2av_1"], 1), ("two stages", 2)):
        plan = plan_of(degree)
        for part in map(plan.rank, range(plan.cp_size)):
            for slices in (part.host, *(stage.slices for stage in part.stages)):
                yield way, slices, part.num_tokens


def has_blind_rows(table: SliceTable, queries: int) -> bool:
    """Has a block of ``BLOCK`` queries some that see nothing beside others that see keys? Of such blocks the backward
    kernel clears rows in every step."""
    change = np.zeros(-(-queries // BLOCK) * BLOCK + 1, dtype=np.int64)
    seen = merge_intervals(table.array[:, :2])
    change[seen[:, 0]], change[seen[:, 1]] = 1, -1
    counts = np.cumsum(change)[:-1].reshape(-1, BLOCK).sum(axis=1)
    whole = np.minimum(queries - BLOCK * np.arange(len(counts)), BLOCK)
    return bool(((counts > 0) & (counts < whole)).any())


def partitions_like(mask: Mask, world: int, chunk: int, rows: int, balance: float) -> Sequence[Sequence[int]] | None:
    """Chunks of each rank by one of our dispatches that moves as many rows and is as balanced; None if none is."""
    bounds = chunk_bounds(mask.total_q, chunk)
    cut = Cut.of(mask.slices.array, bounds)
    work = cut.work
    areas, limit = work.tolist(), int(TOLERATED * lower_bound(work, world))
    order = order_of_chunks(cut.document, work).tolist()
    blocks, dealt = sequential(areas, world)[1], min_heap(areas, world)[1]
    tried = (two_ended(Areas(areas), order, world, limit), blocks, dealt, swap_down(blocks, Areas(areas), limit))
    for partitions in tried:
        if partitions is None:
            continue
        owner = owners(partitions, len(bounds))
        loads = np.bincount(owner, weights=work, minlength=world)
        most = count_rows(cut, owner, world).max()
        if most == rows and abs(loads.max() / loads.mean() - balance) < 1e-3:
            return partitions
    return None


def plan_by(mask: Mask, chunk: int, partitions: Sequence[Sequence[int]], cluster: Cluster, degree: int) -> Plan:
    return plan_for_partitions(
        mask.slices, mask.total_q, 0, chunk, partitions,
        PlanOptions(cluster.heads_q, cluster.heads_kv, cluster.head_dim), overlap=OverlapConfig(degree=degree),
    )  # fmt: skip


def cluster_of(data: dict) -> Cluster:
    """The machine of a record, as one node, with the forward that the record has."""
    settings, known = data["settings"], Calibration()
    if data["environment"]["time"] < FASTER_FORWARD:
        known = replace(known, forward_pace=1.0)
    (heads_q, heads_kv), dim = settings["heads"], settings["head_dim"]
    return Cluster(node=settings["world"], heads_q=heads_q, heads_kv=heads_kv, head_dim=dim, calibration=known)


def node_errors(record: str, cell: dict, settings: dict, flat: Cluster) -> Iterator[CellError]:
    """A cell over logical nodes of the machine ``flat``."""
    name = cell["name"]
    rate, latency_s = links.NVLINK_BYTES_PER_S, links.NVLINK_LATENCY_S
    if name.endswith("a2av"):
        rate, latency_s = links.NCCL_BYTES_PER_S, links.NCCL_LATENCY_S
    cluster = replace(flat, node=NODE_SIZES[name], network_bytes_per_s=rate, network_latency_s=latency_s)
    mask, tokens, packs = cell["mask"], cell["tokens_per_gpu"], measured_plans(cell)
    made = make_cases(mask, tokens * flat.node, settings["packs"], settings["seed"])
    plans = [
        partial(plan_over_nodes, case.mask, flat.node, pack[0], cluster) for case, pack in zip(made, packs)
    ]  # fmt: skip
    cases = [Case(case.mask, flat.node, cluster, plan_of=plan_of) for case, plan_of in zip(made, plans)]
    are_same = all(int(plan_of(1).comm_matrix().sum(0).max()) == pack[1] for plan_of, pack in zip(plans, packs))
    for direction in ("forward", "backward"):
        is_backward, found = direction == "backward", cell[direction]
        way = launch_over_nodes if name.endswith("fused") else over_nodes
        modelled = [way(case, cluster, flat, is_backward).seconds for case in cases]
        mean = sum(modelled) / len(modelled) * 1e3
        kernel = found.get("kernel_ms_max", float("nan"))
        yield CellError(
            record, mask, tokens, node_way(name), direction, found["ms"], mean, kernel, are_same, has_blind_rows=False
        )  # fmt: skip


def plan_over_nodes(mask: Mask, world: int, chunk: int, cluster: Cluster, degree: int) -> Plan:
    """As a key makes it whose environment names the nodes."""
    nodes = cluster.node if 1 < cluster.node < world else None
    dispatch = DispatchConfig(chunk, alg=LocalityDispatchAlg(), nodes=nodes)
    return build_plan(
        mask.slices, mask.total_q, world, PlanOptions(cluster.heads_q, cluster.heads_kv, cluster.head_dim),
        config=DistAttnConfig(dispatch, OverlapConfig(degree=degree)),
    )  # fmt: skip


def over_nodes(case: Case, cluster: Cluster, machine: Cluster, is_backward: bool) -> Outcome:
    """One stage, which is waited for by the rule for ranks of one machine, as these are."""
    waits = ours.waits_for_stage(case.plan_work(1), machine)
    return ours.staged(case.plan_work(0 if waits else 1), cluster, is_backward, may_wait=False)


def launch_over_nodes(case: Case, cluster: Cluster, machine: Cluster, is_backward: bool) -> Outcome:
    """One launch; the same CTAs put all rows, over the NVLink of ``machine``, one after the other."""
    (stage,) = (work := case.plan_work(1)).traffic
    by_link = replace(stage, link_in=stage.link_in + stage.net_in, link_out=stage.link_out + stage.net_out)
    endless = replace(cluster, network_bytes_per_s=float("inf"))
    return one_launch(replace(work, traffic=(by_link,)), endless, is_backward)


def errors_of(record: str, is_new: bool = False) -> Iterator[CellError]:
    """Every cell of a record that has times and a way of the model. A record is a name in ``RESULTS``, or a path;
    ``is_new`` if it follows the rule by which a single stage may be waited for."""
    names = NAMES | {"magi_a2av_1": "one stage"} if is_new else NAMES
    data = json.loads((RESULTS / record).read_text(encoding="utf-8"))
    settings = data["settings"]
    cluster = cluster_of(data)
    plans = {(cell["mask"], cell["tokens_per_gpu"]): measured_plans(cell) for cell in data["cells"]
             if cell["name"] == "magi_fused" and not cell["reason"]}  # fmt: skip
    for cell in data["cells"]:
        if cell["name"] in NODE_SIZES and not cell["reason"]:
            yield from node_errors(record, cell, settings, cluster)
        way = names.get(cell["name"])
        if way is None or cell["reason"]:
            continue
        where = cell["mask"], cell["tokens_per_gpu"]
        cases, are_same, blind = zip(*cases_of(*where, cluster, settings["packs"], settings["seed"], plans[where]))
        for direction in ("forward", "backward"):
            is_backward, found = direction == "backward", cell[direction]
            modelled = [
                share_seconds(case, cluster, is_backward) * pack["area"] / case.mask.area if way == "one GPU"
                else MEASURED_WAYS[way](case, cluster, is_backward).seconds
                for case, pack in zip(cases, cell["packs"])
            ]  # fmt: skip
            mean = sum(modelled) / len(modelled) * 1e3
            is_blind = is_backward and any(way in ways for ways in blind)
            yield CellError(
                record, *where, way, direction, found["ms"], mean, found.get("kernel_ms_max", float("nan")),
                all(are_same), is_blind,
            )  # fmt: skip


def choices_of(record: str) -> Iterator[Choice]:
    """What a single stage does in every cell that has both."""
    data = json.loads((RESULTS / record).read_text(encoding="utf-8"))
    cells = {(cell["mask"], cell["tokens_per_gpu"], cell["name"]): cell for cell in data["cells"] if not cell["reason"]}
    cluster = cluster_of(data)
    for mask, tokens, name in cells:
        if name != "magi_a2av_1":
            continue
        waited, merged = (
            sum(cells[mask, tokens, way][direction]["ms"] for direction in ("forward", "backward"))
            for way in ("magi_a2av_0", "magi_a2av_1")
        )
        plans = measured_plans(cells[mask, tokens, "magi_fused"])
        cases = cases_of(mask, tokens, cluster, data["settings"]["packs"], data["settings"]["seed"], plans)
        waits = {ours.waits_for_stage(case.plan_work(1), cluster) for case, *_ in cases}
        yield Choice(record, mask, tokens, waits, waited, merged)


def measured_plans(cell: dict) -> tuple[tuple[int, int, float], ...]:
    """Chunk size, most rows that a rank receives, and balance of the plan of each pack."""
    details = [pack["details"] for pack in cell["packs"]]
    return tuple((d["chunk_size"], d["rows_received_max"], d["balance"]) for d in details)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    text = "records in place of those of the page; prints their cells and no summary"
    parser.add_argument("--records", nargs="+", type=Path, metavar="FILE", help=text)
    parser.add_argument("--cells", action="store_true", help="print milliseconds of every cell")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/guides/simulate-records.md")
    options = parser.parse_args(arguments)
    if options.records and options.write:
        parser.error("The page has records of its own; leave --records out, or --write.")
    if options.records:
        found = [cell for record in options.records for cell in errors_of(str(record.resolve()), is_new=True)]
        print(table(found), *cell_lines(found), sep="\n")
        return 0
    old = [cell for record in RECORDS for cell in errors_of(record)]
    new = [cell for record in NEW_RECORDS for cell in errors_of(record, is_new=True)]
    choices = [choice for record in RECORDS for choice in choices_of(record)]
    text = "\n\n".join([table(old), table(new), summary(old, new, choices)])
    print(text)
    if options.cells:
        print(*cell_lines([*old, *new]), sep="\n")
    if options.write:
        write_page(text)
        write_support(largest_errors([*old, *new]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
