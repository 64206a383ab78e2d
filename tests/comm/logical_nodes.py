# SPDX-License-Identifier: Apache-2.0
"""What each rank of a test of logical nodes does: random plans, late ranks, attention, and a rank that ends.

Ranks have a GPU each, with NVSHMEM below, or are processes on a CPU with the kernels compiled for it (``cpu_verbs``).
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from comm_oracle import WorldPlan, everybody, random_plan
from cpu_verbs import CpuFactory, cast, reduce

from magi_attention import api
from magi_attention.comm.collectives.group import group_cast, group_reduce
from magi_attention.comm.collectives.layout import A2AVLayout
from magi_attention.comm.exchange.arena import Regions
from magi_attention.comm.exchange.choice import exchange_group
from magi_attention.comm.exchange.group import ExchangeGroup
from magi_attention.comm.exchange.node_exchange import NodeExchange
from magi_attention.comm.transport.base import Transport
from magi_attention.comm.transport.torch import as_transport
from magi_attention.common.group_spec import GroupSpec
from magi_attention.common.two_level.nodes import Nodes
from magi_attention.common.two_level.traffic import direct_rows, two_level_rows
from magi_attention.common.two_level.transfers import Region, plan_transfers
from magi_attention.errors import PeerFailureError
from magi_attention.testing.ref_attn import ref_attn_func

BF16, SHAPE, SENTINEL = torch.bfloat16, (2, 64), 0xA5
ROW_BYTES = 2 * 2 * 2 * 64  # of K and V together
NO_LISTS: tuple = ([], [], [], [])


@dataclass(frozen=True)
class Size:
    """How much a test does. ``cpu`` is the library of ``cpu_verbs`` and a folder of its own, None for GPUs."""

    plans: int
    repetitions: int
    tokens: int  # of attention, for each rank
    heads: tuple[int, int]
    head_dim: int
    cpu: tuple[str, Path] | None = None

    @property
    def device(self) -> str:
        return "cuda" if self.cpu is None else "cpu"


@dataclass
class Ranks:
    """The ranks of a test as one of them sees them."""

    whole: dist.ProcessGroup
    t: Transport
    group: ExchangeGroup
    device: torch.device

    @classmethod
    def join(cls, rank: int, node_size: int, size: Size, timeout_s: float) -> Ranks:
        if size.cpu is None:
            torch.cuda.set_device(rank)
        whole, device = dist.new_group(), torch.device(size.device, rank if size.cpu is None else None)
        t = as_transport(whole, timeout_s)
        if size.cpu is not None:
            CpuFactory(*size.cpu).attach(t)
        return cls.over(whole, t, node_size, device)

    @classmethod
    def over(cls, whole: dist.ProcessGroup, t: Transport, node_size: int, device: torch.device) -> Ranks:
        group = exchange_group(t, Nodes.of_sizes((node_size,), range(t.size)), device, "nvshmem")
        assert group is not None
        return cls(whole, t, group, device)

    def synchronize(self) -> None:
        """All launches of all ranks are over."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.t.barrier()

    def bits(self, seed: int, rows: int) -> torch.Tensor:
        """Any 16 bits, NaN among them: a cast moves them as they are."""
        gen = torch.Generator(self.device).manual_seed(1000 * seed + self.t.rank)
        drawn = torch.randint(-(2**15), 2**15, (rows, *SHAPE), generator=gen, device=self.device, dtype=torch.int32)
        return drawn.to(torch.int16).view(BF16)

    def whole_numbers(self, seed: int, rows: int) -> torch.Tensor:
        """Sums of these are exact in 16 bits, whatever their order."""
        gen = torch.Generator(self.device).manual_seed(1000 * seed + self.t.rank)
        return torch.randint(-8, 9, (rows, *SHAPE), generator=gen, device=self.device).to(BF16)


def same_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x.contiguous().view(torch.int16), y.contiguous().view(torch.int16)) for x, y in zip(a, b))


# ---- random plans ---------------------------------------------------------------------------------------------------
@dataclass
class Counted:
    """Rows between nodes: counted where they arrive, by puts that were signalled, as the bound says, and what would
    travel if each rank got its rows by itself."""

    arrived: int = 0
    signalled: int = 0
    returned: int = 0
    bound: int = 0
    direct: int = 0


def check_plans(ranks: Ranks, count: int) -> tuple[list[str], Counted]:
    faults, counted = [], Counted()
    for seed in range(count):
        routed = random_plan(seed, ranks.t.size, max_splits=5, max_size=900 if seed % 50 == 0 else 40)
        faults += check_plan(ranks, routed, seed, counted)
    return faults, counted


def check_plan(ranks: Ranks, routed: WorldPlan, seed: int, counted: Counted) -> list[str]:
    """A cast and a reduce beside all-to-all-v; then both once more, with rows counted."""
    t, group, spec = ranks.t, ranks.group, routed.specs[ranks.t.rank]
    exchange = NodeExchange(group, plan_transfers(routed.specs, group.nodes, (16, 64, 128)[seed % 3]))
    layout = A2AVLayout.from_spec(spec)
    k, v = (ranks.bits(2 * seed + i, spec.input_rows) for i in range(2))
    wanted = [torch.empty(spec.output_rows, *SHAPE, dtype=BF16, device=ranks.device) for _ in range(2)]
    group_cast([k, v], wanted, *NO_LISTS, t, native=False, layout=layout).wait_post_process()
    dk, dv = (ranks.whole_numbers(2 * seed + i, spec.output_rows) for i in range(2))
    sums = [torch.zeros(spec.input_rows, *SHAPE, device=ranks.device) for _ in range(2)]
    options = dict(acc_reduce=True, native=False, layout=layout)
    group_reduce([dk.float(), dv.float()], sums, *NO_LISTS, t, **options).wait_post_process()
    faults = []
    for turn in range(2):
        is_counted = turn == 1
        before = fill(ranks, exchange) if is_counted else None
        out = cast(exchange, [k, v])
        back = [torch.zeros_like(x) for x in sums]
        reduce(exchange, [dk, dv], back, BF16)
        ranks.group.check("the test")
        if not same_bits(out, wanted):
            faults.append(f"seed {seed}, cast {turn}")
        if not all(torch.equal(a, b) for a, b in zip(back, sums)):
            faults.append(f"seed {seed}, reduce {turn}")
        if before is not None:
            ranks.synchronize()
            faults += [f"seed {seed}: {text}" for text in count_rows(exchange, routed.specs, before, counted)]
    return faults


def regions(exchange: NodeExchange) -> tuple[torch.Tensor, torch.Tensor]:
    """HELD of the cast and GRADS of the reduce, (rows, bytes), as long as those of the rank that has most."""
    group, plan, found = exchange.group, exchange.plan, []
    for region, at, made in (
        (Region.HELD, group.arena.cast_at, Regions.of_cast(plan, [ROW_BYTES])),
        (Region.GRADS, group.arena.reduce_at, Regions.of_reduce(plan, [ROW_BYTES])),
    ):
        rows, at = max(part.region_rows[region] for part in plan.ranks), at + made.places[0][region.name]
        found.append(group.memory[at : at + rows * ROW_BYTES].view(rows, ROW_BYTES))
    return found[0], found[1]


def signal_words(group: ExchangeGroup) -> torch.Tensor:
    """What signals have counted here, int64."""
    return group.memory[group.arena.signals_at : group.arena.totals_at].view(torch.int64).clone()


def fill(ranks: Ranks, exchange: NodeExchange) -> torch.Tensor:
    """Writes a sentinel wherever rows of other nodes arrive; nobody sends before all have done so. Gives the signals
    before."""
    ranks.synchronize()
    for region in regions(exchange):
        region.fill_(SENTINEL)
    words = signal_words(exchange.group)
    ranks.synchronize()
    return words


def count_rows(exchange: NodeExchange, specs: list[GroupSpec], before: torch.Tensor, counted: Counted) -> Iterator[str]:
    """Rows of other nodes that have come since ``fill``, from what lies in the memory of the device. Gives faults."""
    group = exchange.group
    part, nodes, rank = exchange.plan.ranks[group.rank], group.nodes, group.rank
    far = [s for s in range(nodes.world) if nodes.node_of[s] != nodes.node_of[rank]]
    held, grads = regions(exchange)
    arrived = int(held.ne(SENTINEL).any(1).sum())
    added = (signal_words(group) - before).cpu()
    puts = [p for s in far for p in exchange.plan.ranks[s].send if p.peer == rank]
    executed = {block.held: int(added[group.arena.signal(False, block.held)]) for block in part.blocks}
    signalled = sum(b.rows for b in part.blocks if executed[b.held] == part.cast_signals[b.held].expected)
    sizes = [0 if s == rank else rows.size for s, rows in enumerate(part.returns)]
    ends = np.cumsum(sizes)
    is_new = grads.ne(SENTINEL).any(1)
    returned = sum(int(is_new[ends[s] - sizes[s] : ends[s]].sum()) for s in far)
    bound = int(two_level_rows(specs, nodes).network[rank])
    if sum(executed.values()) != len(puts):
        yield f"{sum(executed.values())} puts came from other nodes, the plan has {len(puts)}"
    if not arrived == signalled == bound:
        yield f"{arrived} rows came from other nodes, {signalled} by their signals; the bound is {bound}"
    if returned != sum(sizes[s] for s in far) or int(is_new.sum()) != sum(sizes):
        yield f"{returned} sums came from other nodes, the plan has {sum(sizes[s] for s in far)}"
    counted.arrived += arrived
    counted.signalled += signalled
    counted.returned += returned
    counted.bound += bound
    counted.direct += int(direct_rows(specs, nodes).network[rank])


# ---- late ranks -----------------------------------------------------------------------------------------------------
@contextmanager
def delays(ranks: Ranks, seed: int) -> Iterator[None]:
    """Every launch of a verb begins late: the host sleeps, or a kernel before it on its stream spins."""
    rng, verbs = random.Random(100 * seed + ranks.t.rank), ranks.group.verbs
    before = {name: getattr(verbs, name) for name in ("put", "relay", "wait", "sum", "end")}

    def late(launch: Callable) -> Callable:
        def run(params) -> None:
            if rng.random() < 0.4:
                time.sleep(2e-3 * rng.random())
            if ranks.device.type == "cuda" and rng.random() < 0.6:
                stream = params.put.stream if hasattr(params, "put") else params.stream
                on = torch.cuda.ExternalStream(stream) if stream else torch.cuda.default_stream()
                with torch.cuda.stream(on):
                    torch.cuda._sleep(int(3e6 * rng.random()))  # up to 2 ms
            launch(params)

        return run

    for name, launch in before.items():
        setattr(verbs, name, late(launch))
    try:
        yield
    finally:
        for name, launch in before.items():
            setattr(verbs, name, launch)


def check_late_ranks(ranks: Ranks, repetitions: int) -> list[str]:
    """Two plans take turns, one epoch right after the other; sums of any numbers have the same bits in each."""
    t, faults = ranks.t, []
    plans = [random_plan(seed, t.size, max_splits=5, max_size=200) for seed in (7001, 7002)]
    made = [NodeExchange(ranks.group, plan_transfers(p.specs, ranks.group.nodes, 64)) for p in plans]
    gen = torch.Generator(ranks.device).manual_seed(t.rank)
    partials, first = [], []
    for exchange, p in zip(made, plans):
        rows = p.specs[t.rank].output_rows
        partials.append(torch.randn(rows, *SHAPE, generator=gen, device=ranks.device).to(BF16))
        first.append(torch.zeros(p.specs[t.rank].input_rows, *SHAPE, device=ranks.device))
        reduce(exchange, [partials[-1]], [first[-1]], BF16)
    found = []
    with delays(ranks, 1):
        for i in range(repetitions):
            exchange, spec = made[i % 2], plans[i % 2].specs[t.rank]
            (out,) = cast(exchange, [ranks.bits(i, spec.input_rows)])
            back = torch.zeros(spec.input_rows, *SHAPE, device=ranks.device)
            reduce(exchange, [partials[i % 2]], [back], BF16)
            found.append((out, back))
    ranks.synchronize()
    ranks.group.check("the test")
    for i, (out, back) in enumerate(found):
        spec = plans[i % 2].specs[t.rank]
        wanted = torch.empty(spec.output_rows, *SHAPE, dtype=BF16, device=ranks.device)
        options = dict(native=False, layout=A2AVLayout.from_spec(spec))
        group_cast(ranks.bits(i, spec.input_rows), wanted, *NO_LISTS, t, **options).wait_post_process()
        faults += [] if same_bits([out], [wanted]) else [f"late cast {i}"]
        faults += [] if torch.equal(back, first[i % 2]) else [f"late reduce {i}"]
    return faults


# ---- attention ------------------------------------------------------------------------------------------------------
def six_masks(total: int) -> dict[str, api.Mask]:
    cu_seqlens = [0, total // 3, total // 3 + total // 19, total - total // 5, total]
    return {
        "full": api.Mask.full(total),
        "causal": api.Mask.causal(total),
        "varlen_full": api.Mask.varlen(cu_seqlens, causal=False),
        "varlen_causal": api.Mask.varlen(cu_seqlens, causal=True),
        "sliding_window_causal": api.Mask.sliding_window(total, (total // 7, 0)),
        "varlen_block_causal": api.Mask.block_causal(cu_seqlens, total // 16),
    }


def dense(mask: api.Mask, q, k, v, dout) -> list[torch.Tensor]:
    """out and gradients in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, _ = ref_attn_func(*leaves, torch.from_numpy(mask.to_dense()).to(q.device), backend="torch")
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.double())]


def check_attention(ranks: Ranks, node_size: int, size: Size) -> tuple[list[str], float]:
    """Six masks, each as one stage and as two. Gives the largest error, in parts of the largest value."""
    names = {"NATIVE_GRPCOLL": "0", "HIERARCHICAL_COMM": "1", "NODE_SIZE": str(node_size), "NODE_TRANSPORT": "nvshmem"}
    os.environ.update({f"MAGI_ATTENTION_{name}": value for name, value in names.items()})
    world, total, (heads_q, heads_kv) = ranks.t.size, size.tokens * ranks.t.size, size.heads
    dtype, limit = (BF16, 3e-2) if size.cpu is None else (torch.float32, 1e-4)
    gen = torch.Generator().manual_seed(0)
    shapes = [(total, heads, size.head_dim) for heads in (heads_q, heads_kv, heads_kv, heads_q)]
    tensors = [torch.randn(*shape, generator=gen).to(dtype).to(ranks.device) for shape in shapes]
    faults, worst = [], 0.0
    heads = {"num_heads_q": heads_q, "num_heads_kv": heads_kv, "head_dim": size.head_dim}
    for name, mask in six_masks(total).items():
        wanted = dense(mask, *tensors)
        for degree in (1, 2):
            dispatch = api.DispatchConfig(chunk_size=size.tokens // 8, nodes=node_size)
            plan = api.make_plan(mask, world, api.DistAttnConfig(dispatch, api.OverlapConfig(degree=degree)), **heads)
            q, k, v, dout = (plan.shard(x, ranks.whole).detach().requires_grad_() for x in tensors)
            out, _ = api.attend(q, k, v, plan, ranks.whole)
            out.backward(dout.detach())
            for label, got, want in zip(("out", "dq", "dk", "dv"), (out.detach(), q.grad, k.grad, v.grad), wanted):
                want = plan.shard(want, ranks.whole)
                error = float((got.double() - want).abs().max() / want.abs().max().clamp(min=1e-9))
                worst = max(worst, error)
                faults += [] if error <= limit else [f"{name}, {degree} stages, {label}: error {error:.3g}"]
    return faults, worst


# ---- the whole of it ------------------------------------------------------------------------------------------------
def used_gib() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def main(rank: int, world: int, node_size: int, size: Size) -> tuple[list[str], list[str]]:
    """Faults, and lines that say what was done."""
    began, lines = time.monotonic(), []
    nodes = f"{world // node_size} nodes of {node_size}"

    def say(text: str) -> None:
        nonlocal began
        lines.append(f"{nodes}, rank {rank}: {text} [{time.monotonic() - began:.1f} s]")
        if rank == 0:
            print(lines[-1], flush=True)
        began = time.monotonic()

    ranks = Ranks.join(rank, node_size, size, timeout_s=20 if size.cpu is None else 60)
    say("joined")
    faults, counted = check_plans(ranks, size.plans)
    say(f"{size.plans} plans, {len(faults)} faults; {counted}")
    # Other nodes of the same ranks, which share what has joined below.
    others = Ranks.over(ranks.whole, ranks.t, 2 if node_size == 1 else 1, ranks.device)
    of_others, counted = check_plans(others, size.plans // 20 + 1)
    say(f"{size.plans // 20 + 1} plans over other nodes of these ranks, {len(of_others)} faults; {counted}")
    late = check_late_ranks(ranks, size.repetitions)
    say(f"{size.repetitions} repetitions with late ranks, {len(late)} faults")
    wrong, worst = check_attention(ranks, node_size, size)
    say(f"six masks, {len(wrong)} faults, largest error {worst:.2g}")
    return faults + of_others + late + wrong + check_end(ranks, others, say), lines


def check_end(ranks: Ranks, others: Ranks, say: Callable[[str], None]) -> list[str]:
    """All memory is given back with the process group, that of both groups of exchanges."""
    groups, is_cuda, faults = (ranks.group, others.group), ranks.device.type == "cuda", []
    held, before, after = [group.held_bytes for group in groups], 0.0, 0.0
    ranks.synchronize()
    if is_cuda:
        torch.cuda.empty_cache()
        before = used_gib()
    dist.destroy_process_group(ranks.whole)
    left = [group.held_bytes for group in groups]
    if not all(held) or any(left):
        faults.append(f"the arenas had {held} bytes, and {left} when their group was gone")
    if is_cuda:
        after = used_gib()
        if ranks.group.verbs.library.has_joined:
            faults.append("NVSHMEM was not left")
        if after > before - sum(held) / 2**30:
            faults.append(f"the GPU had {before:.3f} GiB in use, and {after:.3f} when the group was gone")
    say(f"arenas of {held} bytes, then {left}; GPU {before:.2f} GiB in use, then {after:.2f}")
    return faults


# ---- a rank that ends -----------------------------------------------------------------------------------------------
def end_in_an_exchange(rank: int, world: int, node_size: int, size: Size, verb: str, timeout_s: float) -> None:
    """The last rank ends right before its launch of ``verb`` in a cast; all others must name it, and end."""
    victim, specs = world - 1, everybody(world, 300)
    ranks = Ranks.join(rank, node_size, size, timeout_s)
    exchange = NodeExchange(ranks.group, plan_transfers(specs, ranks.group.nodes))

    def epoch(i: int) -> None:
        x, rows = ranks.bits(i, 300), specs[rank].output_rows
        cast(exchange, [x, x])
        back = torch.zeros(300, *SHAPE, device=ranks.device)
        reduce(exchange, [torch.ones(rows, *SHAPE, dtype=BF16, device=ranks.device)], [back], BF16)
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()
        ranks.group.check("the test")
        assert back.eq(world - 1).all(), "void sums are not given to others"

    for i in range(2):
        epoch(i)
    ranks.synchronize()
    if rank == victim:

        def last(params) -> None:
            if ranks.device.type == "cuda":
                torch.cuda.synchronize()  # what was launched before has been sent
            os._exit(0)

        assert hasattr(ranks.group.verbs, verb)
        setattr(ranks.group.verbs, verb, last)
    start = time.monotonic()
    try:
        for i in range(4):  # nobody goes further than one epoch without the others
            epoch(i)
    except PeerFailureError as error:
        text, waited = str(error), time.monotonic() - start
    else:
        raise AssertionError("nobody noticed that a rank has ended")
    print(f"rank {rank}: {text} [after {waited:.1f} s]", flush=True)
    wanted = f"Rank {victim} (node {victim // node_size}) did not deliver within {timeout_s:g} s"
    assert wanted in text, text  # said by this rank, or by one that it waits for and that was sooner
    assert size.cpu is not None or waited < 2 * timeout_s + 3, waited
    try:
        epoch(0)
    except PeerFailureError as error:
        assert str(error) == text, "the group is broken, and says why again"
    else:
        raise AssertionError("a broken group went on")
    os._exit(0)  # why: to destroy the group would wait for the rank that is gone
