# SPDX-License-Identifier: Apache-2.0
"""Native group cast and group reduce of keys and values, beside plain copies between the same GPUs.

    torchrun --nproc-per-node 2 benchmarks/group_collectives.py [--rows 8,512,4K,16K] [--heads 8] [--head-dim 128]
                                                                [--beside 8K] [--out benchmarks/results/NAME]
    torchrun --nproc-per-node 2 benchmarks/group_collectives.py nodes [--help]
    python benchmarks/group_collectives.py rows [--help]

Each rank casts ``rows`` rows of K and V to every other rank, and adds what it gets back. ``copy`` moves as many bytes
to every other rank by ``Tensor.copy_`` into symmetric memory, by the copy engines. Times are of one operation out of
ten in a CUDA graph, so without the host, the largest over ranks of medians. ``all-to-all`` is what the same calls are
without ``native``: packing, NCCL, unpacking; it is called, as it cannot be captured, so its small rows are the host's.
So are ``all-gather`` and ``reduce-scatter`` of torch, which move the same rows. Results are compared with those by
all-to-all first, bit for bit. Without GPUs these four run over gloo, to try the benchmark.

``--beside``: how much longer attention of so many tokens unpacks beside one cast on another stream, in a graph of both.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from case_options import list_of, parse_size  # noqa: E402
from cp_gather import all_gather, reduce_scatter  # noqa: E402
from kernel import make_inputs  # noqa: E402
from masks import make_case  # noqa: E402
from parts import run_part, told  # noqa: E402
from peers import our_backend  # noqa: E402
from picture import draw  # noqa: E402
from progress import steps  # noqa: E402
from result_file import plain_settings, write_results  # noqa: E402

from magi_attention.benchmarking.timing import Clock, interleaved_us, middle_and_quantiles  # noqa: E402
from magi_attention.cli.common import table_text  # noqa: E402
from magi_attention.comm.collectives.group import group_cast, group_reduce  # noqa: E402
from magi_attention.comm.collectives.layout import A2AVLayout  # noqa: E402
from magi_attention.comm.transport.torch import as_transport  # noqa: E402
from magi_attention.common.group_spec import GroupSpec  # noqa: E402
from magi_attention.config import GrpCollConfig  # noqa: E402
from magi_attention.kernels import AttnOptions  # noqa: E402
from magi_attention.kernels.types import Operands  # noqa: E402

PARTS = {
    "nodes": ("node_exchange", "casts and reduces over logical nodes, by NVSHMEM"),
    "rows": ("range_ops", "kernels that move and add rows on one GPU, beside a plain copy"),
}
IN_A_GRAPH = 10
LEAD_CYCLES = 2_000_000  # about 1 ms of idling, in which the host gets its launches queued
NO_LISTS: tuple = ([], [], [], [])
Call = Callable[[], object]


def device() -> torch.device:
    """Where the rows are: this rank's GPU, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class Replay:
    """Replays so many calls, one after the other; holds what they use."""

    def __init__(self, call: Call, graph: torch.cuda.CUDAGraph, held: object) -> None:
        self._held, self._graph = (call, held), graph

    def __call__(self) -> None:
        self._graph.replay()


def graph_of(call: Call, count: int, held: object = None) -> Call:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(count):
            call()
    return Replay(call, graph, held)


def times_us(calls: dict[str, Call], repeats: int) -> dict[str, list[float]]:
    """Microseconds of each call on this rank, in an order that changes from round to round, alike on all ranks."""
    clock = Clock(device(), None, is_shared=True)
    return interleaved_us(calls, repeats, None, LEAD_CYCLES, clock=clock, warm_up_rounds=2)


def over_ranks(*values: float) -> list[float]:
    told = torch.tensor(values, dtype=torch.float64, device=device())
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return told.tolist()


def peer_copy(x: torch.Tensor, count: int) -> Call:
    """Copies ``x`` into the memory of all other ranks, the next one first; a graph of so many."""
    from torch.distributed import _symmetric_memory as symmetric

    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    memory = symmetric.empty(world * x.numel(), dtype=x.dtype, device=x.device)
    handle = symmetric.rendezvous(memory, group.group_name)
    others = [(rank + step) % world for step in range(1, world)]
    targets = [handle.get_buffer(r, (world, x.numel()), x.dtype)[rank] for r in others]
    # What others write into must outlive their copies.
    return graph_of(lambda: [target.copy_(x.view(-1)) for target in targets], count, held=(memory, handle))


class Exchange:
    """Casts and reduces of K and V (rows, heads, head dim), from each rank to all others."""

    def __init__(self, rows: int, options: argparse.Namespace) -> None:
        self.transport = t = as_transport(dist.group.WORLD)
        others = [r for r in range(t.size) if r != t.rank]
        spec = GroupSpec.make(t.rank, t.size, [rows], [others], [rows] * len(others), others)
        shape, gen = (options.heads, options.head_dim), torch.Generator(device()).manual_seed(t.rank)
        draw = lambda n: torch.randn(n, *shape, generator=gen, device=device()).bfloat16()  # noqa: E731
        self.layout = A2AVLayout.from_spec(spec)
        self.inputs, self.parts = [draw(rows) for _ in "kv"], [draw(rows * len(others)) for _ in "kv"]
        self.outputs, self.sums = [torch.empty_like(x) for x in self.parts], [torch.empty_like(x) for x in self.inputs]
        self.everyone = [draw(rows * t.size) for _ in "kv"]
        self.received = sum(x.nbytes for x in self.outputs)
        self._config = None if options.num_sms is None else GrpCollConfig(num_sms=options.num_sms)

    def _options(self, native: bool) -> dict:
        return {"layout": self.layout, "native": native, "config": self._config}

    def cast(self, native: bool) -> None:
        options = self._options(native)
        group_cast(self.inputs, self.outputs, *NO_LISTS, self.transport, **options).wait_post_process()

    def reduce(self, native: bool) -> None:
        options = {"acc_reduce": False, **self._options(native)}
        group_reduce(self.parts, self.sums, *NO_LISTS, self.transport, **options).wait_post_process()

    def all_gather(self) -> None:
        """The cast by torch, where it gives each rank its own rows too."""
        for x, everyone in zip(self.inputs, self.everyone):
            all_gather(everyone, x)

    def reduce_scatter(self) -> None:
        """The reduce by torch, of the rows of all ranks."""
        for everyone, total in zip(self.everyone, self.sums):
            reduce_scatter(total, everyone)

    def check(self) -> None:
        for call, results in ((self.cast, self.outputs), (self.reduce, self.sums)):
            found = []
            for native in (False, True):
                for x in results:
                    x.fill_(float("nan"))
                call(native)
                found.append([x.clone() for x in results])
            if not all(map(torch.equal, *found)):
                raise SystemExit(f"{call.__name__} of {self.inputs[0].shape[0]} rows differs from that by all-to-all.")


def measure(rows: int, options: argparse.Namespace) -> dict:
    exchange, times = Exchange(rows, options), {}
    if torch.cuda.is_available():
        exchange.check()
        sent = torch.cat([x.view(-1) for x in exchange.inputs])
        graphs = {
            "copy": peer_copy(sent, IN_A_GRAPH),
            "cast": graph_of(lambda: exchange.cast(True), IN_A_GRAPH),
            "reduce": graph_of(lambda: exchange.reduce(True), IN_A_GRAPH),
        }
        times = {n: [t / IN_A_GRAPH for t in us] for n, us in times_us(graphs, options.repeats).items()}
        dist.barrier()  # the memory of the copies goes
    called = {
        "cast by all-to-all": lambda: exchange.cast(False),
        "reduce by all-to-all": lambda: exchange.reduce(False),
        "all-gather": exchange.all_gather,
        "reduce-scatter": exchange.reduce_scatter,
    }
    times |= times_us(called, options.repeats)
    found = {n: over_ranks(*middle_and_quantiles(us)) for n, us in times.items()}
    spread = {n: of[1:] for n, of in found.items()}
    us = {n: of[0] for n, of in found.items()}
    return {"rows": rows, "received_bytes": exchange.received, "us": us, "spread_us": spread}


def beside(rows: int, tokens: int, options: argparse.Namespace) -> dict:
    """Attention forward alone and beside one cast: microseconds, and how much longer, both of the slowest rank."""
    exchange, case, backend = Exchange(rows, options), make_case("full", tokens), our_backend()
    q, k, v = make_inputs(case, (8 * options.heads, options.heads), options.head_dim, torch.bfloat16, "cuda")
    attn, side = AttnOptions(q.shape[2] ** -0.5), torch.cuda.Stream()

    def attention() -> None:
        backend.forward_final(Operands(q, k, v, case.mask.slices, attn))

    def both() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            exchange.cast(True)
        attention()
        torch.cuda.current_stream().wait_stream(side)

    graphs = {"alone": graph_of(attention, 1), "beside": graph_of(both, 1)}
    us = {n: median(found) for n, found in times_us(graphs, 3 * options.repeats).items()}
    longer, alone = over_ranks(us["beside"] / us["alone"] - 1, us["alone"])
    return {"rows": rows, "tokens": tokens, "alone_us": alone, "longer": longer}


def table(cells: Sequence[dict]) -> str:
    names, shared = list(cells[0]["us"]), [n for n in ("cast", "reduce") if "copy" in cells[0]["us"]]
    rows = [["rows", "MiB", *names, *(f"{n} / copy" for n in shared)]]
    for cell in cells:
        rates = {n: cell["received_bytes"] / us / 1e3 for n, us in cell["us"].items()}
        texts = [f"{us:.1f} ({rates[n]:.0f})" for n, us in cell["us"].items()]
        shares = [f"{rates[n] / rates['copy']:.2f}" for n in shared]
        rows.append([str(cell["rows"]), f"{cell['received_bytes'] / 2**20:.2f}", *texts, *shares])
    return table_text("us (GB/s received)", rows)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog=told(PARTS))
    add = parser.add_argument
    add("--rows", type=list_of(parse_size), default="8,512,4K,16K", help="to every other rank (8,512,4K,16K)")
    add("--heads", type=int, default=8, help="kv heads (8)")
    add("--head-dim", type=int, default=128)
    add("--num-sms", type=int, help="the most that are used, even (GrpCollConfig); by default as without a config")
    add("--repeats", type=int, default=20, help="timed runs, of which the median counts (20)")
    add("--beside", type=parse_size, metavar="8K", help="also attention of so many tokens beside casts")
    add("--out", type=Path, help="write OUT.json")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    if (done := run_part(arguments, PARTS)) is not None:
        return done
    parser = make_parser()
    options = parser.parse_args(arguments)
    has_gpu = torch.cuda.is_available()
    if "RANK" not in os.environ:
        parser.error("run it by torchrun on GPUs that share NVLink, two or more; or on the CPU, to try it.")
    if options.beside and not has_gpu:
        parser.error("--beside needs GPUs, and torch sees none.")
    if has_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if has_gpu else "gloo", timeout=timedelta(seconds=120))
    try:
        told = steps(options.rows, lambda rows: f"{rows} rows to each other rank", dist.get_rank() == 0)
        cells = [measure(rows, options) for rows in told]
        others = [beside(rows, options.beside, options) for rows in options.rows] if options.beside else []
        if dist.get_rank() == 0:
            print(table(cells), flush=True)
            for x in others:
                what = f"{x['tokens']} tokens beside a cast of {x['rows']} rows"
                print(f"{what}: {x['alone_us']:.0f} us, {x['longer']:+.1%}")
            if options.out is not None:
                settings = plain_settings(options) | {"world": dist.get_world_size()}
                write_results(options.out, settings, results=cells, beside=others)
                draw(Path(f"{options.out}.json"))
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
