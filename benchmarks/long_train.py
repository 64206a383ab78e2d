# SPDX-License-Identifier: Apache-2.0
"""Training steps of examples/long_context.py over all ranks: attention of ours beside other context parallelism.

    torchrun --nproc-per-node 2 benchmarks/train.py ranks --config llama3-8b --layers 4 --seq-len 131072 \
        --one-sequence --steps 3 --out runs/long

All is the same but attention, and how its tokens are spread: model, seed, batches, offloaded inputs of blocks, chunks
of MLP and loss, FSDP2. The peers are those of benchmarks/context_parallel.py; with --keeps-attention they keep what
their backward takes, but for torch's, whose attention is computed again. Each way trains a model of its own for
``--steps``, of which the first is not timed. Rows are those of benchmarks/train.py, with losses and MFU: operations of
matrices and of allowed pairs, recomputation not counted, beside 989 TFLOP/s of an H100 or H200 in bf16.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples"), str(ROOT)]

import long_context  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from case_options import list_of  # noqa: E402
from context_parallel import PEERS  # noqa: E402
from cp_attempt import CellEnds, attempt  # noqa: E402
from cp_kernel import Groups, Kernel, Peer, Setting, State, select_rows  # noqa: E402
from fsdp2_llama import Batch, Place, Trainer, choose_device  # noqa: E402
from long_context import LongBlock, LongLlama, LongTrainer, predicted, shape_of  # noqa: E402
from masks import Case  # noqa: E402

from magi_attention.api import Mask, Plan  # noqa: E402
from magi_attention.benchmarking.timing import middle_and_quantiles  # noqa: E402
from magi_attention.functional.calls.kept_results import keep_result, kept_result  # noqa: E402
from magi_attention.functional.stages.query_moves import Forward  # noqa: E402

WAYS = ("magi", "ring", "all_gather", "ulysses", "torch_cudnn", "torch_flash")
PEAK_FLOPS = 989e12


class _PeerAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, peer: Peer):
        known = kept_result(q, v)  # with --keeps-attention, in the backward
        state = peer.forward(q, k, v) if known is None else State(known.out, (known.lse, *known.tail))
        if known is None:
            keep_result(Forward(state.out, state.kept[0], None, state.kept[1:]))
        ctx.peer, ctx.count = peer, len(state.kept)
        ctx.save_for_backward(q, k, v, state.out, *state.kept)
        return state.out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, *kept = ctx.saved_tensors
        return *ctx.peer.backward(dout.contiguous(), State(out, tuple(kept)), q, k, v), None


class PeerBlock(LongBlock):
    """``plan`` is a peer made for the batch."""

    @torch.compiler.disable
    def attention(self, q, k, v, plan: Peer, group: None):
        q, k, v = (x.contiguous() for x in (q, k, v))
        return plan.forward(q, k, v).out if plan.uses_autograd else _PeerAttention.apply(q, k, v, plan)


class PeerTrainer(LongTrainer):
    """``args.way`` spreads the tokens and computes attention."""

    _groups: Groups | None = None  # one set for all ways
    peer: Peer | None = None

    def make_model(self, block) -> LongLlama:
        return LongLlama(self.args, LongBlock if self.args.way == "magi" else PeerBlock)

    def step(self) -> torch.Tensor:
        """Without the sentence of the example: what fails here is a row of the record."""
        return Trainer.step(self)

    def plan(self, batch: Batch) -> Future[Plan] | None:
        return super().plan(batch) if self.args.way == "magi" else None

    def loss(self, batch: Batch, plan: Future[Plan] | None) -> torch.Tensor:
        if plan is not None:
            return super().loss(batch, plan)
        device, count, bounds = self.place.device, len(batch.tokens), np.array(self.borders(batch))
        name = "causal" if len(bounds) == 2 else "varlen_causal"
        self.close()
        self.peer = PEERS[self.args.way](self._setting(Case(name, count, tuple(np.diff(bounds).tolist()))))
        own = self.peer.positions
        document = np.searchsorted(bounds, np.maximum(own, 0), side="right") - 1
        ends = (own < 0) | (own + 1 == bounds[document + 1])
        tokens = batch.tokens.to(device)
        labels = select_rows(tokens, np.where(ends, -1, own + 1))
        labels = labels.masked_fill_(torch.from_numpy(ends).to(device), -100)
        places = torch.from_numpy(np.maximum(own, 0) - bounds[document]).to(device)
        return self.loss_sum(select_rows(tokens, own), places, labels, self.peer)

    def _setting(self, case: Case) -> Setting:
        c, device = shape_of(self.args), self.place.device
        heads, dtype = (c.num_heads_q, c.num_heads_kv), torch.bfloat16 if self.args.dtype == "bf16" else torch.float32
        PeerTrainer._groups = PeerTrainer._groups or Groups()
        kernel = Kernel(heads, c.head_dim, dtype, device)
        rank, world = dist.get_rank(), dist.get_world_size()
        return Setting(case, rank, world, heads, c.head_dim, dtype, device, kernel, PeerTrainer._groups)

    def close(self) -> None:
        if self.peer is not None:
            self.peer.close()
            self.peer = None


def operations(trainer: PeerTrainer, batch: Batch) -> float:
    """A step has six for each weight of a matrix and token, twelve for each value of a head and allowed pair."""
    c = shape_of(trainer.args)
    matrices = sum(p.numel() for p in trainer.model.parameters() if p.ndim > 1) - c.vocabulary * c.width
    pairs = Mask.varlen(trainer.borders(batch), causal=True).area
    return 6.0 * matrices * len(batch.tokens) + 12.0 * pairs * c.num_heads_q * c.head_dim * c.num_layers


def measure(args, way: str) -> dict:
    """One row; ``reason`` says why there are no times."""
    row = {"name": way, "seq_len": args.seq_len, "reason": None} | dict.fromkeys(
        ("tokens_per_second", "ms", "p10_ms", "p90_ms", "peak_bytes", "mfu", "losses")
    )
    args.way = way
    seconds, losses, work = [], [], []
    made: list[PeerTrainer] = []
    is_cuda = args.device == "cuda"
    try:
        attempt(lambda: made.append(PeerTrainer(args, Place.make(args.device, args.cp))))
        (trainer,) = made
        source = trainer.batches
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(args.steps):
            pack = next(source)
            trainer.batches = iter([pack])
            dist.barrier()
            begin = time.perf_counter()
            losses.append(attempt(lambda: trainer.step().item()))
            seconds.append(time.perf_counter() - begin)
            work.append(operations(trainer, pack[0]))
    except CellEnds as end:
        return row | {"reason": str(end)}
    finally:
        for one in made:
            one.close()
        made.clear()
        peak = torch.cuda.max_memory_allocated() if is_cuda else 0
        trainer = None
        gc.collect()
        if is_cuda:
            torch.cuda.empty_cache()
    world = dist.get_world_size()
    most = torch.tensor([peak, *seconds], dtype=torch.float64, device=args.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    peak, _, *seconds = most.tolist()
    middle, low, high = middle_and_quantiles(seconds)
    mfu = sum(work[1:]) / sum(seconds) / world / PEAK_FLOPS if is_cuda else None
    return row | {
        "tokens_per_second": args.seq_len / middle, "ms": middle * 1e3, "p10_ms": low * 1e3, "p90_ms": high * 1e3,
        "peak_bytes": int(peak) or None, "mfu": mfu, "losses": losses,
    }  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = long_context.make_long_parser(__doc__)
    parser.add_argument("--ways", type=list_of(str, WAYS), default=list(WAYS), metavar="A,B", help=", ".join(WAYS))
    args = parser.parse_args(arguments)
    if args.steps < 2:
        parser.error("give at least 2 --steps; the first is not timed.")
    if args.accumulate > 1:
        parser.error("a step here is one pack; leave --accumulate out.")
    args.device, args.attention, args.recompute = choose_device(args), "magi", True
    os.environ["MAGI_ATTENTION_HEAD_CHUNKS"] = str(args.head_chunks)
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    args.cp = dist.get_world_size()
    rows, is_first = [], dist.get_rank() == 0
    if is_first:
        print(predicted(args), flush=True)
    for way in args.ways:
        rows.append(measure(args, way))
        row = rows[-1]
        if is_first:
            memory = f", {row['peak_bytes'] / 1e9:.1f} GB" if row["peak_bytes"] else ""
            mfu = f", MFU {row['mfu']:.3f}" if row["mfu"] else ""
            told = f"{row['ms']:.0f} ms a step{memory}{mfu}" if row["reason"] is None else row["reason"]
            print(f"{way}: {told}", flush=True)
            Path(args.out).mkdir(parents=True, exist_ok=True)
            (Path(args.out) / "rows.json").write_text(json.dumps(rows, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    return 0
