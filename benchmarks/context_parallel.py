# SPDX-License-Identifier: Apache-2.0
"""Attention of one packed sequence over several ranks: our runtime beside other ways, on the same kernel.

    torchrun --nproc-per-node 4 benchmarks/context_parallel.py [--masks causal,varlen_causal] [--tokens 8K,16K]
                                                               [--only magi_a2av_1,ring] [--out benchmarks/results/NAME]

With GPUs each rank takes one and NCCL connects them; without, ranks are CPU processes over gloo, for small sizes
(``--tokens 256 --heads 4 2 --head-dim 16 --dtype fp32``). Peers are ring (zigzag), all-gather of keys and values,
Ulysses and USP, written on the kernel that ours uses, and torch's own context parallelism. ``one_gpu`` is the kernel on
an equal share, with no communication, its times being means over ranks.

A time is the largest over ranks, and the median over iterations; for masks with documents, rates are means over
packs. ``both`` is a forward and its backward, each from a common start. The exposed communication of a rank is its
time less that of its kernel calls alone. Before anything is timed, out and gradients are compared with those of the
kernel on the whole sequence. A cell that cannot be measured has its reason. Ranks agree on reasons after each step; if
one rank fails inside a collective, the others wait for ``--timeout`` and the run ends with what was saved.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from case_options import DTYPES, list_of, parse_size  # noqa: E402
from cp_attempt import CellEnds, attempt  # noqa: E402
from cp_gather import AllGather, OneGpu  # noqa: E402
from cp_kernel import Groups, Kernel, Peer, Setting, State, select_rows  # noqa: E402
from cp_layout import make_cases  # noqa: E402
from cp_magi import QUERY_MOVES, VARIANTS, Magi, MagiPlan  # noqa: E402
from cp_report import DIRECTIONS, Cell, median_of_rounds, save, tables, tflops  # noqa: E402
from cp_ring import Ring  # noqa: E402
from cp_timing import (  # noqa: E402
    PHASES,
    Clock,
    Step,
    device_ms,
    heat_up,
    kernel_ms,
    mean_and_max,
    outside_bytes,
    over_ranks,
    peak_bytes,
    wall_ms,
    with_both,
)
from cp_torch import TorchContextParallel  # noqa: E402
from cp_ulysses import Ulysses, Usp  # noqa: E402
from kernel import make_inputs  # noqa: E402
from masks import ALL_NAMES, NAMES, Case  # noqa: E402
from parts import run_part, told  # noqa: E402
from picture import draw  # noqa: E402
from progress import steps  # noqa: E402
from reference import GRAD_TOLERANCE, TOLERANCE, relative_error  # noqa: E402
from result_file import environment, plain_settings  # noqa: E402

from magi_attention.benchmarking.timing import middle_and_quantiles  # noqa: E402

PEERS: dict[str, Callable[[Setting], Peer]] = {
    "one_gpu": OneGpu,
    **{name: partial(Magi, name=name) for name in VARIANTS},
    **{name: partial(MagiPlan, query_moves=moves) for name, moves in QUERY_MOVES.items()},
    "ring": Ring,
    "all_gather": AllGather,
    "ulysses": Ulysses,
    "usp": Usp,
    "torch_cudnn": partial(TorchContextParallel, kernel="cudnn"),
    "torch_flash": partial(TorchContextParallel, kernel="flash"),
}
PARTS = {"recurrent": ("recurrent", "a gated delta layer by states, contiguous shards and heads")}
# torch_flash is slower than torch_cudnn on Hopper; what moves is a question of its own.
DEFAULT_PEERS = [name for name in PEERS if name not in ("torch_flash", *QUERY_MOVES)]


def odd(text: str) -> int:
    """A number of rounds. Odd, so that the median of times and that of rates are those of the same round."""
    if not text.isdecimal() or int(text) % 2 == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no odd number; give 1, 3, 5, ...")
    return int(text)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog=told(PARTS))
    add = parser.add_argument
    add("--masks", type=list_of(str, ALL_NAMES), default=list(NAMES), metavar="A,B", help=", ".join(ALL_NAMES))
    add("--tokens", type=list_of(parse_size), default="8K,16K", metavar="8K,16K", help="tokens per GPU (8K,16K)")
    add("--only", type=list_of(str, list(PEERS)), default=DEFAULT_PEERS, metavar="A,B", help=", ".join(PEERS))
    add("--heads", type=int, nargs=2, default=(64, 8), metavar=("Q", "KV"), help="query and kv heads (64 8)")
    add("--head-dim", type=int, default=128, help="head dim of q, k and v (128)")
    add("--dtype", choices=tuple(DTYPES), default="bf16")
    add("--packs", type=int, default=3, help="draws of the documents of varlen masks, averaged (3)")
    add("--seed", type=int, default=42, help="of the documents and of the inputs (42)")
    add("--chunk-size", type=parse_size, help="of our dispatch; by default as small as balance within 2%% needs")
    add("--warm-up", type=int, default=2, help="iterations that are not timed (2)")
    add("--heat-up", type=float, default=0.0, help="seconds of work before an implementation is timed (0)")
    turns = "turns of the implementations, each in an order of its own, so that all are as hot; an odd number (1)"
    add("--rounds", type=odd, default=1, help=turns)
    add("--repeats", type=int, default=20, help="iterations timed by events (20)")
    add("--wall-repeats", type=int, default=5, help="rows of layers timed by the wall clock (5)")
    add("--wall-layers", type=int, default=8, help="layers in a row (8)")
    add("--kernel-repeats", type=int, default=3, help="timed runs of the kernels alone (3)")
    add("--no-check", action="store_true", help="do not compare results before they are timed")
    add("--no-flush", action="store_true", help="leave the L2 cache as it is between iterations")
    add("--timeout", type=int, default=120, help="seconds that ranks wait for each other (120)")
    add("--time-limit", type=float, help="seconds after which no further cell is begun; it is recorded as such")
    add("--out", type=Path, help="write OUT.json and OUT.png")
    return parser


class Bench:
    """What stays the same for all cells of a run."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.dtype = DTYPES[options.dtype]
        self.kernel = Kernel(tuple(options.heads), options.head_dim, self.dtype, device)
        self.groups, self.clock = Groups(), Clock(device, not options.no_flush)
        self._inputs: tuple[Case, tuple] | None = None
        self._wanted: tuple[torch.Tensor, ...] | None = None
        gc.collect()
        gc.freeze()  # what has been imported stays: collections then take no time to speak of
        self.started = time.perf_counter()

    def setting(self, case: Case) -> Setting:
        options = self.options
        return Setting(
            case, self.rank, self.world, tuple(options.heads), options.head_dim, self.dtype, self.device, self.kernel,
            self.groups, options.chunk_size,
        )  # fmt: skip

    def is_late(self) -> bool:
        """Time is up, by the clock of rank 0."""
        seconds, limit = self.clock.agreed(time.perf_counter() - self.started), self.options.time_limit
        return limit is not None and seconds > limit

    def inputs(self, case: Case) -> tuple[torch.Tensor, ...]:
        """Global q, k, v, dout, the same on all ranks; those of the last case are kept."""
        if self._inputs is None or self._inputs[0] is not case:
            self._inputs = self._wanted = None
            self.release()
            options = self.options
            found = attempt(
                lambda: make_inputs(
                    case, options.heads, options.head_dim, self.dtype, str(self.device), options.seed, has_dout=True
                )
            )
            self._inputs = (case, found)
        return self._inputs[1]

    def wanted(self, case: Case) -> tuple[torch.Tensor, ...]:
        """Global out, dq, dk, dv by the kernel on the whole sequence; those of the last case are kept."""
        q, k, v, dout = self.inputs(case)

        def by_kernel() -> tuple[torch.Tensor, ...]:
            out, lse = self.kernel.final(q, k, v, case.mask.slices)
            return out, *self.kernel.final_grads(dout, q, k, v, out, lse, case.mask.slices)

        if self._wanted is None:
            self._wanted = attempt(by_kernel)
        return self._wanted

    def release(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def compare(peer: Peer, got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> dict[str, float]:
    """Relative errors of this rank's out, dq, dk and dv; raises if one is too large."""
    real = torch.from_numpy(peer.positions >= 0).to(got[0].device)
    errors = {
        name: relative_error(mine[real], select_rows(whole, peer.positions[peer.positions >= 0]).float())
        for name, mine, whole in zip(("out", "dq", "dk", "dv"), got, wanted)
    }
    for name, error in errors.items():
        if error > (TOLERANCE if name == "out" else GRAD_TOLERANCE):
            raise ArithmeticError(f"wrong: relative error {error:.3g} of {name}")
    return errors


def measure(bench: Bench, name: str, case: Case, compares: bool) -> dict:
    """What there is to know of one implementation on one case. Collective; ``CellEnds`` if it cannot be had.

    ``compares`` results before they are timed, if there is a whole to compare with.
    """
    made: list[Peer] = []
    before = outside_bytes(bench.clock)
    try:
        attempt(lambda: made.append(PEERS[name](bench.setting(case))))
        found = measure_peer(bench, made[0], case, compares)
        if found["memory"] is not None:
            grown = mean_and_max(outside_bytes(bench.clock) - before, bench.device)[1]
            found["memory"]["outside"] = max(int(grown), 0)
        return found
    finally:
        for peer in made:
            peer.close()


def step_of(peer: Peer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> Step:
    """A layer of ``peer``. The backward of a row gives dq, dk and dv of each layer.

    By autograd each layer has leaves of its own, so that nothing is added up, and a row has one call, as in a model:
    every call is handed over to a thread and back.
    """
    if not peer.uses_autograd:

        def backward(row: list[State]) -> list[torch.Tensor]:
            grads = [peer.backward(dout, state, q, k, v) for state in reversed(row)]
            return [x for three in reversed(grads) for x in three]

        return Step(lambda: peer.forward(q, k, v), backward)

    def forward() -> State:
        leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
        return State(peer.forward(*leaves).out, leaves)

    def backward_by_autograd(row: list[State]) -> Sequence[torch.Tensor]:
        leaves = [x for state in row for x in state.kept]
        return torch.autograd.grad([state.out for state in row], leaves, [dout] * len(row))

    return Step(forward, backward_by_autograd)


def measure_peer(bench: Bench, peer: Peer, case: Case, compares: bool) -> dict:
    tensors = bench.inputs(case)
    wanted = bench.wanted(case) if compares and peer.is_whole else None
    q, k, v, dout = attempt(lambda: [select_rows(x, peer.positions) for x in tensors])
    step = step_of(peer, q, k, v, dout)

    def first_run() -> dict[str, float]:
        state = step.forward()
        grads = step.backward([state])
        return {} if wanted is None else compare(peer, (state.out.detach(), *grads), wanted)

    errors = attempt(first_run)
    attempt(lambda: heat_up(step, bench.clock, bench.options.heat_up))
    alone = attempt(lambda: kernels_alone(bench, peer, (dout, q, k, v)))
    area = getattr(peer, "area", case.mask.area)
    times = attempt(lambda: times_of(bench, step, area, alone, is_mean=not peer.is_whole))
    result_bytes = (q.nbytes, q.nbytes + k.nbytes + v.nbytes)
    memory = attempt(lambda: peak_bytes(step, bench.clock, result_bytes))
    if memory is not None:
        most = over_ranks({n: [float(b)] for n, b in memory.items()}, bench.device)
        memory = {n: int(b[0]) for n, b in most.items()}
    return {
        "documents": len(case.documents), "area": area, "errors": errors, "details": peer.details, "times": times,
        "memory": memory,
    }  # fmt: skip


def kernels_alone(bench: Bench, peer: Peer, tensors: Sequence[torch.Tensor]) -> dict[str, float] | None:
    """Milliseconds of this rank's kernel calls in each direction, if they can be told."""
    calls = peer.kernel_calls(*tensors)
    if calls is None:
        return None
    found = {p: kernel_ms(c, bench.clock, bench.options.kernel_repeats) for p, c in zip(PHASES, calls)}
    return found | {"both": sum(found.values())}


def times_of(
    bench: Bench, step: Step, area: int, alone: dict[str, float] | None, is_mean: bool
) -> dict[str, dict[str, float | None]]:
    """For each direction: times in ms, rates in TFLOP/s per GPU; what cannot be told is None.

    ``is_mean`` takes the mean over ranks: of ranks that do not wait for each other.
    """
    options = bench.options
    mine = with_both(device_ms(step, bench.clock, options.warm_up, options.repeats))
    wall, host = (with_both(times) for times in wall_ms(step, bench.clock, options.wall_repeats, options.wall_layers))
    everyone, wall, host = (over_ranks(times, bench.device, is_mean) for times in (mine, wall, host))
    found = {}
    for direction in DIRECTIONS:
        ms, p10, p90 = middle_and_quantiles(everyone[direction])
        wall_median = median(wall[direction])
        rate = partial(tflops, direction, area, options.heads[0], options.head_dim, bench.world)
        kernel = exposed = (None, None)
        if alone is not None:
            kernel = mean_and_max(alone[direction], bench.device)
            exposed = mean_and_max(median(mine[direction]) - alone[direction], bench.device)
        found[direction] = {
            "ms": ms, "ms_p10": p10, "ms_p90": p90, "tflops": rate(ms), "wall_ms": wall_median,
            "wall_tflops": rate(wall_median), "host_ms": median(host[direction]), "kernel_ms_mean": kernel[0],
            "kernel_ms_max": kernel[1], "kernel_tflops": rate(kernel[0]) if kernel[0] else None,
            "exposed_ms_mean": exposed[0], "exposed_ms_max": exposed[1],
        }  # fmt: skip
    return found


def run_size(bench: Bench, mask: str, tokens: int, names: Sequence[str]) -> list[Cell]:
    """These implementations on one mask and size."""
    options = bench.options
    cells = [Cell(mask, tokens, name) for name in names]
    for case in make_cases(mask, tokens * bench.world, options.packs, options.seed):
        found: dict[str, list[dict]] = {name: [] for name in names}
        for turn in range(options.rounds):
            # Later ones in another order, alike on all ranks, or one would always follow what leaves the chips cool.
            for cell in random.Random(turn).sample(cells, len(cells)) if turn else cells:
                if cell.reason is None and bench.is_late():
                    cell.reason = f"not begun within the time limit of {options.time_limit:g} s"
                if cell.reason is not None:
                    continue
                try:
                    compares = turn == 0 and not options.no_check
                    found[cell.name].append(measure(bench, cell.name, case, compares))
                except CellEnds as end:
                    cell.reason, cell.is_failure = str(end), end.is_failure
                bench.release()
        for cell in cells:
            if cell.reason is None:
                cell.packs.append(median_of_rounds(found[cell.name]))
    for cell in cells:
        cell.summarise()
    return cells


def settings_of(bench: Bench) -> dict:
    """The command line, and what of the environment matters."""
    prefixes = ("MAGI_ATTENTION_", "NCCL_", "TORCH_NCCL_", "CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS")
    names = sorted(n for n in os.environ if n.startswith(prefixes))
    return plain_settings(bench.options) | {
        "world": bench.world,
        "communication": dist.get_backend(),
        "kernel_backend": bench.kernel.backend.name,
        "environment": {n: os.environ[n] for n in names},
    }


def run(bench: Bench) -> list[Cell]:
    """All cells; rank 0 prints and saves after each mask and size, so that a run that is cut off keeps what it has."""
    options, cells = bench.options, []
    machine = environment() if bench.rank == 0 else {}
    if bench.rank == 0:
        print(
            f"{bench.world} ranks over {dist.get_backend()}, kernel {bench.kernel.backend.name}, {options.dtype}, "
            f"heads {options.heads[0]}:{options.heads[1]}, head dim {options.head_dim}, seed {options.seed}"
        )
    # torch's last: should one rank alone fail inside torch, all that is of interest is there.
    passes = [[n for n in options.only if n.startswith("torch") == is_torch] for is_torch in (False, True)]
    parts = [(m, tokens, names) for names in filter(None, passes) for m in options.masks for tokens in options.tokens]
    for mask, tokens, names in steps(parts, lambda part: f"{part[0]}, {part[1]} tokens per rank", bench.rank == 0):
        fresh = run_size(bench, mask, tokens, names)
        cells += fresh
        if bench.rank == 0:
            print(*tables(fresh), f"{time.perf_counter() - bench.started:.0f} s so far", sep="\n", flush=True)
            if options.out:
                save(cells, machine, settings_of(bench), options.out)
    if bench.rank == 0 and options.out:
        draw(Path(f"{options.out}.json"))
    return cells


def main(arguments: Sequence[str] | None = None) -> int:
    if (done := run_part(arguments, PARTS)) is not None:
        return done
    options = make_parser().parse_args(arguments)
    if "RANK" not in os.environ:
        print("Start this with torchrun: torchrun --nproc-per-node 2 benchmarks/context_parallel.py", file=sys.stderr)
        return 2
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    bound = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(backend, timeout=timedelta(seconds=options.timeout), **bound)
    try:
        cells = run(Bench(options, device))
    finally:
        dist.destroy_process_group()
    return 1 if any(c.name.startswith("magi") and c.is_failure for c in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
