# SPDX-License-Identifier: Apache-2.0
"""Casts and reduces over logical nodes, by NVSHMEM, for numbers of CTAs and sizes of blocks.

    torchrun --nproc-per-node 2 benchmarks/group_collectives.py nodes [--masks varlen_full,varlen_causal] [--tokens 8K]
                                                            [--node-size 1] [--ctas 16,32] [--blocks 64,128]

Rows are those of K and V, or of their gradients, in bf16, that a stage of ``tokens`` tokens a GPU fetches under a mask.
Times are of a whole cast (copy in, puts, wait, copy out, credits) and of a whole reduce without the sum at the owner;
in brackets are the kernels ``put`` and ``sum``. All are the largest over ranks of medians. GB/s count the bytes of the
rank that receives most. ``all-to-all-v`` is the same cast and reduce by NCCL, without nodes; each setting is compared
with it first.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from case_options import list_of, parse_size
from cp_layout import make_cases
from group_collectives import over_ranks, times_us

from magi_attention import api
from magi_attention.comm.collectives.layout import A2AVLayout
from magi_attention.comm.collectives.reduce import reduce_arrived
from magi_attention.comm.collectives.wire import Arrived, start_fetch, start_reduce
from magi_attention.comm.exchange.choice import exchange_group
from magi_attention.comm.exchange.group import ExchangeGroup
from magi_attention.comm.exchange.node_exchange import NodeExchange
from magi_attention.comm.transport.base import Work
from magi_attention.comm.transport.torch import as_transport
from magi_attention.common.group_spec import GroupSpec
from magi_attention.common.two_level.nodes import Nodes
from magi_attention.common.two_level.transfers import plan_transfers

WIRE = [torch.bfloat16] * 2
KERNELS = ("put", "sum")


def specs_of(mask: str, options: argparse.Namespace) -> list[GroupSpec]:
    """The cast of the only stage, of all ranks."""
    world = dist.get_world_size()
    case = make_cases(mask, options.tokens * world, 1, 42)[0]
    nodes = options.node_size if 1 < options.node_size < world else None
    config = api.DistAttnConfig(api.DispatchConfig(nodes=nodes), api.OverlapConfig(degree=1))
    heads = {"num_heads_q": 8 * options.heads, "num_heads_kv": options.heads, "head_dim": options.head_dim}
    plan = api.make_plan(case.mask, world, config, **heads)
    return [plan.rank(r).stages[0].cast for r in range(world)]


class Rows:
    """K and V of a rank, and gradients of the rows that it fetched."""

    def __init__(self, spec: GroupSpec, options: argparse.Namespace) -> None:
        gen = torch.Generator("cuda").manual_seed(spec.rank)
        shape = (options.heads, options.head_dim)

        def draw(rows: int) -> list[torch.Tensor]:
            return [torch.randint(-8, 9, (rows, *shape), generator=gen, device="cuda").bfloat16() for _ in "kv"]

        self.inputs, self.partials = draw(spec.input_rows), draw(spec.output_rows)

    def sums(self, arrived: Arrived) -> list[torch.Tensor]:
        """At the owner, float32."""
        found = [torch.zeros(x.shape, device=x.device) for x in self.inputs]
        reduce_arrived(arrived, found, None, "sum", acc_reduce=True)
        return found


def finished(started: tuple[Work, Callable]) -> object:
    work, finish = started
    work.wait()
    return finish()


@contextmanager
def kernel_events(group: ExchangeGroup) -> Iterator[dict[str, list]]:
    """Events around each launch of the kernels meanwhile."""
    found: dict[str, list] = {name: [] for name in KERNELS}
    before = {name: getattr(group.verbs, name) for name in KERNELS}

    def timed(name: str) -> Callable:
        def launch(params) -> None:
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            marks[0].record()
            before[name](params)
            marks[1].record()
            found[name].append(marks)

        return launch

    for name in KERNELS:
        setattr(group.verbs, name, timed(name))
    try:
        yield found
    finally:
        for name, launch in before.items():
            setattr(group.verbs, name, launch)


def kernels_us(group: ExchangeGroup, call: Callable[[], object], repeats: int) -> dict[str, float]:
    """Times each kernel that a call launches, in calls that begin together on all ranks."""
    with kernel_events(group) as found:
        times_us({"call": call}, repeats)
        torch.cuda.synchronize()
    medians = [median([a.elapsed_time(b) * 1e3 for a, b in found[name][2:]] or [0.0]) for name in KERNELS]
    return {name: us for name, us in zip(KERNELS, over_ranks(*medians)) if us}


def check(name: str, found: object, wanted: object) -> None:
    """Ranks agree, so that none waits for one that has stopped."""
    (are_wrong,) = over_ranks(float(not all(map(torch.equal, found, wanted))))  # type: ignore[call-overload]
    if are_wrong:
        raise SystemExit(f"{name} differs from that by all-to-all-v.")


def line(
    name: str, us: Sequence[float], received: Sequence[int], kernels: Sequence[dict[str, float]] = ({}, {})
) -> str:
    parts = []
    for what, t, size, inside in zip(("cast", "reduce"), us, received, kernels):
        told = "".join(f", {kernel} {found:.0f}" for kernel, found in inside.items())
        parts.append(f"{what} {t:6.1f} us ({size / t / 1e3:3.0f} GB/s{told})")
    return f"{name:<28}" + "   ".join(parts)


def measure(mask: str, group: ExchangeGroup, options: argparse.Namespace) -> Iterator[str]:
    transport = as_transport(dist.group.WORLD)
    specs = specs_of(mask, options)
    spec, layout = specs[transport.rank], A2AVLayout.from_spec(specs[transport.rank])
    rows, size = Rows(spec, options), 4 * options.heads * options.head_dim
    back = max(A2AVLayout.from_spec(s).send.count for s in specs)
    received = [max(s.output_rows for s in specs) * size, back * size]
    yield f"{mask}, {options.tokens} tokens a GPU: {received[0] / 2**20:.1f} and {received[1] / 2**20:.1f} MiB received"
    cast = lambda: finished(start_fetch(transport, layout, rows.inputs))  # noqa: E731
    reduce = lambda: finished(start_reduce(transport, layout, rows.partials, WIRE))  # noqa: E731
    wanted = cast(), rows.sums(reduce())
    yield line("all-to-all-v", all_us(cast, reduce, options), received)
    for block in options.blocks:
        plan = plan_transfers(specs, group.nodes, block)
        for ctas in options.ctas:
            made = NodeExchange(group, plan, ctas)
            cast = lambda: finished(made.start_cast(rows.inputs, is_beside=False))  # noqa: B023, E731
            reduce = lambda: finished(made.start_reduce(rows.partials, WIRE, is_beside=False))  # noqa: B023, E731
            check("The cast", cast(), wanted[0])
            check("The reduce", rows.sums(reduce()), wanted[1])
            inside = [kernels_us(group, call, options.repeats) for call in (cast, reduce)]
            yield line(f"blocks of {block}, {ctas} CTAs", all_us(cast, reduce, options), received, inside)
            group.check("the benchmark")


def all_us(cast: Callable, reduce: Callable, options: argparse.Namespace) -> list[float]:
    found = times_us({"cast": cast, "reduce": reduce}, options.repeats)
    return over_ranks(*(median(found[name]) for name in ("cast", "reduce")))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="group_collectives.py nodes", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--masks", type=list_of(str), default="varlen_full", help="names of masks.py (varlen_full)")
    add("--tokens", type=parse_size, default="8K", help="of each GPU (8K)")
    add("--node-size", type=int, default=1, help="GPUs of a logical node (1)")
    add("--ctas", type=list_of(int), default="8,16,32,64", help="CTAs of a launch at most (8,16,32,64)")
    add("--blocks", type=list_of(int), default="32,64,128", help="rows of a put at most (32,64,128)")
    add("--heads", type=int, default=8, help="kv heads (8)")
    add("--head-dim", type=int, default=128)
    add("--repeats", type=int, default=15, help="timed runs, of which the median counts (15)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ or not torch.cuda.is_available():
        parser.error("run it by torchrun on GPUs that share NVLink, two or more.")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=120))
    nodes = Nodes.of_sizes((options.node_size,), range(dist.get_world_size()))
    device = torch.device("cuda", torch.cuda.current_device())
    group = exchange_group(as_transport(dist.group.WORLD, timeout_s=30), nodes, device, "nvshmem")
    assert group is not None, "nvshmem is an error where it cannot be had"
    for mask in options.masks:
        for text in measure(mask, group, options):
            if dist.get_rank() == 0:
                print(text, flush=True)
    dist.destroy_process_group()
    return 0
