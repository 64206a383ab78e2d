# SPDX-License-Identifier: Apache-2.0
"""`magi explain`: plan a mask for any number of ranks, without starting any, in tables and on a page."""

from __future__ import annotations

import argparse
import json
import time

from magi_attention.cli.common import UsageError, make_folder, show_table
from magi_attention.cli.plans.budget import budget_of, check_budget_options, rates_of, show_budget
from magi_attention.cli.plans.masks import build_mask, check_options
from magi_attention.cli.plans.memory import memory_of, read_memory_options, show_memory
from magi_attention.cli.plans.recurrent import recurrent_shape, show_recurrent
from magi_attention.errors import ContractError, NoBackendError, UnsupportedError

FOLDER = "runs/explain"  # default of --out
HEADS = {"heads_q": 64, "heads_kv": 8, "head_dim": 128}  # where none are given: those of a model of 70B
SLIDER_DEGREES = range(5)  # that the page has, besides --degree
_WORTH_SAYING = 0.95  # of the bytes


def overlap_for(degree: int | str):
    from magi_attention.api import OverlapConfig
    from magi_attention.common.enum import AttnOverlapMode

    if degree == "dynamic":
        return OverlapConfig(mode=AttnOverlapMode.DYNAMIC, degree=None)
    return OverlapConfig(degree=degree)


def nodes_for(sizes: str | None, cp_size: int) -> tuple[int, ...] | None:
    """The node of each rank, for nodes of ``sizes`` ranks, "8" or "8,8,4"; None without sizes."""
    from magi_attention.common.two_level.nodes import Nodes

    if sizes is None:
        return None
    parts = sizes.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"--node-size {sizes} is no number of ranks; give one such as 8, or one per node, as 8,8,4.")
    try:
        return Nodes.of_sizes([int(part) for part in parts], range(cp_size)).node_of
    except ContractError as error:
        raise UsageError(f"--node-size {sizes}: {error}") from error


def plan_for(mask, cp_size: int, args: argparse.Namespace, dispatch: str, query_moves: str):
    from magi_attention import config
    from magi_attention.api import DispatchConfig, DistAttnConfig, make_plan

    alg = {
        "min-heap": config.MinHeapDispatchAlg,
        "locality": config.LocalityDispatchAlg,
        "sequential": config.SequentialDispatchAlg,
    }[dispatch]()
    return make_plan(
        mask,
        cp_size,
        config=DistAttnConfig(
            DispatchConfig(
                chunk_size=args.chunk_size,
                alg=alg,
                nodes=nodes_for(args.node_size, cp_size),
                max_fragments=args.max_fragments,
            ),
            overlap_for(args.degree),
        ),
        num_heads_q=args.heads_q,
        num_heads_kv=args.heads_kv,
        head_dim=args.head_dim,
        query_moves=query_moves,
        rates=args.plan_rates,
    )


def slider_settings(mask, plan, args: argparse.Namespace) -> list:
    """``plan`` and, less and less needed, the plans of other overlap degrees and of fewer ranks, for the page."""
    from magi_attention.tools.report.plan_data import Setting

    degrees = [args.degree, *(degree for degree in SLIDER_DEGREES if degree != args.degree)]
    fewer = [2**i for i in reversed(range((args.cp - 1).bit_length()))]  # powers of two below --cp
    plans = {args.cp: plan, **{n: plan_for(mask, n, args, args.dispatch, args.query_moves) for n in fewer}}

    def setting(cp_size: int, degree: int | str) -> Setting:
        base = plans[cp_size]
        # The overlap degree does not change who holds what.
        return Setting(base if degree == args.degree else base.with_mask(mask, overlap_for(degree)), str(degree))

    here = [setting(args.cp, degree) for degree in degrees]
    elsewhere = [setting(cp_size, degree) for degree in degrees for cp_size in fewer]
    return here + elsewhere


def recurrent_elsewhere(mask, args: argparse.Namespace, recurrent) -> dict[int, dict]:
    """``recurrent`` of ``explain`` for 2, 4 and 8 ranks of one node, without --cp."""
    from magi_attention.meta.recurrent.ways import explain_ways

    others = [] if args.node_size else [n for n in (2, 4, 8) if n != args.cp]
    plans = {n: plan_for(mask, n, args, args.dispatch, args.query_moves) for n in others}
    return {n: explain_ways(plan, recurrent) for n, plan in plans.items()}


def better_dispatch(mask, numbers: dict, args: argparse.Namespace) -> str | None:
    """A sentence if dispatch by locality would bring the busiest rank less, at a balance that is about as good."""
    from magi_attention.meta.explain import explain
    from magi_attention.tools.report.describe import readable_bytes

    other = explain(plan_for(mask, args.cp, args, "locality", args.query_moves))
    now, then = (max(found["rows_received"]) * found["row_bytes"] for found in (numbers, other))
    if then >= _WORTH_SAYING * now or other["imbalance"] > numbers["imbalance"] + 0.01:
        return None
    return (
        f"With --dispatch locality (LocalityDispatchAlg) the busiest rank would receive {readable_bytes(then)} in "
        f"place of {readable_bytes(now)}, at an imbalance of {other['imbalance']:.4f}."
    )


def why_none_move(plan) -> str:
    """What moving queries would do, under the dispatch of a plan in which only keys and values do."""
    from magi_attention.config.rates import MachineRates
    from magi_attention.meta.moves import LEAST_TIME, MOST_LOAD, query_moves_of, step_seconds

    moves = query_moves_of(plan)
    if not moves.cost_of_keys:
        return "Nothing travels, so no query has to."
    (cost, load), keys = moves.cheapest, moves.cost_of_keys
    uneven = ""
    if cost < 0.9 * keys and load > MOST_LOAD * plan.slices.area / plan.cp_size:
        heaviest = load * plan.cp_size / plan.slices.area
        uneven = f" ({cost / keys:.0%} without balance, the heaviest rank at {heaviest:.2f} of the mean)"
    share = f"{moves.cost / keys:.0%} of the bytes of a training step would travel"
    costs, loads = (moves.cost, keys), (int(moves.loads.max()), int(plan.areas.max()))
    heads = plan.num_heads_q, plan.num_heads_kv, plan.head_dim
    with_moves, without = step_seconds(costs, loads, heads, plan.cp_size, plan.rates or MachineRates())
    return (
        f"Keys and values alone move: with queries {share}{uneven}, and a layer would take {with_moves * 1e3:.2f} ms "
        f"in place of {without * 1e3:.2f}, by the model. Queries move where that saves {LEAST_TIME:.0%}."
    )


def about_queries(mask, plan, numbers: dict, args: argparse.Namespace) -> str | None:
    """A sentence that says whether queries move and what that saves, or would save."""
    from magi_attention.meta.explain import explain

    if args.cp == 1 or not numbers["bytes_total"]:
        return None
    if args.query_moves == "never":
        try:
            then = explain(plan_for(mask, args.cp, args, args.dispatch, "auto"))
        except UnsupportedError:  # without the planner library nothing is found out, and nothing was asked for
            return None
        if not then["do_queries_move"]:
            return None
        share = then["bytes_total"] / numbers["bytes_total"]
        return f"With --query-moves auto queries travel as well, and {share:.0%} of these bytes in a forward."
    kept = explain(plan_for(mask, args.cp, args, args.dispatch, "never"))["bytes_total"]
    if not numbers["do_queries_move"]:
        return why_none_move(plan)
    share = numbers["bytes_total"] / max(kept, 1)
    return f"Queries move, {sum(numbers['query_rows_sent']):,} rows: {share:.0%} of the bytes of keys and values alone."


def show_kernels(args: argparse.Namespace) -> None:
    """Which backend computes attention of these heads on this machine and why, and what the others say."""
    import torch

    from magi_attention.env import general
    from magi_attention.kernels import AttnOptions, Problem, default_registry

    has_gpu = torch.cuda.is_available()
    problem = Problem(
        "cuda" if has_gpu else "cpu", torch.bfloat16, args.heads_q, args.heads_kv, args.head_dim, args.head_dim,
        AttnOptions(args.head_dim**-0.5), needs_backward=True,
        capability=torch.cuda.get_device_capability() if has_gpu else None,
    )  # fmt: skip
    registry, asked = default_registry(), general.kernel_backend().value
    try:
        why = registry.select(problem, asked, general.is_kernel_backend_explicit())[1]
    except NoBackendError:
        why = f"Backend {asked!r} was asked for and cannot run."
    where = torch.cuda.get_device_name() if has_gpu else "the CPU"
    answers = [[name, reason or "can run"] for name, reason in registry.answers(problem).items()]
    show_table(f"Kernels on {where}, bfloat16", [["backend", "what it says"], *answers])
    print(why)


def links_of(mask, plan, args: argparse.Namespace) -> dict | None:
    """Bytes by link, and under ``without_nodes`` those of the dispatch that does not know of nodes, if it is another;
    None without --node-size."""
    from magi_attention.meta.explain import explain_links

    if plan.nodes is None:
        return None
    links, unaware = explain_links(plan), argparse.Namespace(**{**vars(args), "node_size": None})
    before = plan_for(mask, args.cp, unaware, args.dispatch, args.query_moves)
    if before.partitions != plan.partitions or before.chunk_size != plan.chunk_size:
        links["without_nodes"] = explain_links(before, plan.nodes)
    return links


def about_node_transport() -> str:
    """By what rows cross once to each node, as far as this process can tell."""
    from magi_attention.env import comm
    from magi_attention.native.comm.gin import Gin
    from magi_attention.native.comm.nvshmem import Nvshmem

    wish = comm.node_transport()
    asked = f"With MAGI_ATTENTION_HIERARCHICAL_COMM=1, MAGI_ATTENTION_NODE_TRANSPORT={wish} rows go once to each node"
    if wish == "all_to_all":
        return f"{asked}, by all-to-all-v."
    otherwise, reasons = "all-to-all-v" if wish == "auto" else "an error", []
    for name, library in (("NVSHMEM", Nvshmem), ("GIN", Gin)):
        if wish in ("auto", name.lower()):
            try:
                library()
            except UnsupportedError as error:
                reasons.append(str(error))
            else:
                return f"{asked}: by {name} if all ranks of the group have it, as this machine does, else {otherwise}."
    return f"{asked}: here that is {otherwise}. {' '.join(reasons)}"


def assume_heads(args: argparse.Namespace) -> str:
    """Fills in the heads that were not given; a sentence that names them all, and those that were assumed."""
    assumed = [name for name in HEADS if getattr(args, name) is None]
    for name in assumed:
        setattr(args, name, HEADS[name])
    text = f"Heads: {args.heads_q} for queries, {args.heads_kv} for K and V, head dim {args.head_dim}."
    if not assumed:
        return text
    options = ", ".join(f"--{name.replace('_', '-')}" for name in assumed)
    return f"{text} Assumed: give those of your model by {options}, for its bytes and times."


def command_explain(args: argparse.Namespace) -> int:
    from magi_attention.meta.explain import explain
    from magi_attention.tools.report import describe

    check_options(args)
    check_budget_options(args)
    read_memory_options(args)
    about_heads, recurrent = assume_heads(args), recurrent_shape(args.recurrent)
    args.plan_rates = rates_of(args) if args.rates else None
    mask = build_mask(args)
    out = make_folder(args.out or FOLDER, "--out") if args.pictures and not args.json else None
    started = time.perf_counter()
    plan = plan_for(mask, args.cp, args, args.dispatch, args.query_moves)
    seconds = time.perf_counter() - started
    numbers = explain(plan, recurrent=recurrent)
    links = links_of(mask, plan, args)
    budget = budget_of(plan, args, plan_for) if args.budget else None
    memory = None if args.shape is None else memory_of(plan, args)
    if args.json:
        more = {} if budget is None else {"budget": budget}
        more |= {} if links is None else {"links": links}
        more |= {} if memory is None else {"memory": memory}
        print(json.dumps({**numbers, "seconds": round(seconds, 4), **more}))
        return 0
    show_table(f"Plan for {args.cp} ranks, made in {seconds:.3f} s", describe.overview_table(plan, numbers))
    print(describe.about_rows(plan, numbers))
    print(f"{about_heads}\n")
    show_table("Ranks", describe.rank_table(plan, numbers))
    heads = f"{args.heads_kv} K/V heads of {args.head_dim}, 2 bytes an element"
    show_table(f"Communication, K and V ({heads})", describe.volume_table(plan, numbers))
    if links is not None:
        sizes = ", ".join(dict.fromkeys(str(len(ranks)) for ranks in links["nodes"]))
        show_table(f"Links, {len(links['nodes'])} nodes of {sizes} ranks, K and V", describe.link_table(links))
        print(about_node_transport())
    if recurrent is not None:
        show_recurrent(numbers["recurrent"], args.recurrent, recurrent_elsewhere(mask, args, recurrent))
    if budget is not None:
        show_budget(budget)
    if memory is not None:
        show_memory(memory, args)
    show_kernels(args)
    advice = None if args.dispatch == "locality" else better_dispatch(mask, numbers, args)
    for sentence in (advice, about_queries(mask, plan, numbers, args)):
        if sentence:
            print(sentence)
    if out is not None:
        from magi_attention.tools.report.plan_page import plan_page

        lead = f"{mask.name} mask of {mask.total_q:,} tokens. {about_heads}"
        text = plan_page(slider_settings(mask, plan, args), lead)
        (out / "report.html").write_text(text, encoding="utf-8")
        print(f"Page: {out / 'report.html'}")
    return 0
