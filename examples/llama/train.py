# SPDX-License-Identifier: Apache-2.0
"""Trains the model of model.py with its attention spread over all ranks that torchrun started.

    torchrun --standalone --nproc-per-node 4 examples/llama/train.py --out runs/mine

Without torchrun it takes the same steps in one process, which is what the losses are compared to. Every rank
packs the same sequence, so nothing has to be sent before the first attention:

    pack -> Mask -> make_plan -> shard -> model with attend() -> loss on sharded labels -> sum gradients
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from data import Batch, DataError, packed_batches
from model import Llama, ModelConfig
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import Tensor

from magi_attention.api import DistAttnConfig, Mask, OverlapConfig, Plan, attend, make_plan, sum_gradients


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="folder for losses and trace; made if it is not there")
    parser.add_argument("--curve", default="losses", help="name of the JSON file for the losses")
    parser.add_argument("--data", help="text file or folder; the standard library's sources without it")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--max-document", type=int, default=2048, help="bytes; longer ones are cut")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--degree", type=int, default=1, help="overlap stages of the remote keys")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return parser.parse_args()


class Trainer:
    """One rank's model, optimizer and data. ``group`` is None for a single process."""

    def __init__(self, args: argparse.Namespace, rank: int, world: int, device: torch.device) -> None:
        self.args, self.rank, self.world, self.device = args, rank, world, device
        self.group = dist.group.WORLD if world > 1 else None
        self.model = Llama(ModelConfig(), args.seed).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95))
        self.batches = packed_batches(args.data, args.seq_len, args.seed, args.max_document)
        self.trace: list[dict] = []

    def plan(self, batch: Batch) -> Plan:
        shape = self.model.config
        return make_plan(
            Mask.varlen(batch.cu_seqlens, causal=True),
            self.world,
            config=DistAttnConfig(overlap_config=OverlapConfig(degree=self.args.degree)),
            num_heads_q=shape.num_heads_q,
            num_heads_kv=shape.num_heads_kv,
            head_dim=shape.head_dim,
        )

    def loss(self, batch: Batch, plan: Plan, trace: list[dict] | None) -> Tensor:
        """This rank's share of the mean loss: over all ranks the shares add up to it."""
        tokens = plan.shard(batch.tokens.to(self.device), group=self.group)
        labels = plan.labels(tokens, group=self.group)  # -100, which the loss ignores, where a document ends
        positions = plan.positions(self.group, self.device, per_document=True)
        layers_done = 0

        def attention(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
            nonlocal layers_done
            layers_done += 1
            events = trace if layers_done == 1 else None
            return attend(q_THD, k_THD, v_THD, plan, group=self.group, trace=events)[0]

        logits = self.model(tokens, positions, attention)
        if trace is not None:
            trace[:] = list(trace)  # what was noted so far; backward may append more
            self.trace = list(trace)
        num_labels = len(batch.tokens) - (len(batch.cu_seqlens) - 1)  # of the whole sequence
        return F.cross_entropy(logits.float(), labels, reduction="sum") / num_labels

    def step(self, number: int) -> tuple[float, Plan]:
        batch = next(self.batches)
        plan = self.plan(batch)
        warm_up = min(1.0, (number + 1) / 5)
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.learning_rate * warm_up
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(batch, plan, [] if number == self.args.steps - 1 else None)
        loss.backward()
        total = loss.detach()
        if self.world > 1:
            # Every rank saw other tokens of the same sequence: gradients add up, they are not averaged.
            sum_gradients(self.model, self.group)
            dist.all_reduce(total, group=self.group)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(total), plan


def train(trainer: Trainer) -> tuple[list[float], float, Plan]:
    """Losses, seconds and the last plan."""
    args, console = trainer.args, Console()
    title = f"{trainer.world} ranks" if trainer.world > 1 else "one process"
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    losses, started = [], time.perf_counter()
    is_live = trainer.rank == 0 and console.is_terminal
    with Progress(*columns, console=console, disable=not is_live) as progress:
        task = progress.add_task(title, total=args.steps, status="")
        for number in range(args.steps):
            loss, plan = trainer.step(number)
            losses.append(loss)
            seconds = time.perf_counter() - started
            rate = args.seq_len * len(losses) / seconds
            status = f"loss {loss:.4f}  {rate:,.0f} tokens/s"
            progress.update(task, advance=1, status=status)
            if trainer.rank == 0 and not is_live and (number % 5 == 0 or number == args.steps - 1):
                to_do = args.steps - number - 1
                left = f"  about {seconds * to_do / len(losses):.0f} s left" if to_do else ""
                console.print(f"{title}: step {number + 1}/{args.steps}  {status}{left}")
    return losses, time.perf_counter() - started, plan


def write(trainer: Trainer, losses: list[float], seconds: float, plan: Plan) -> None:
    """Rank 0 writes the curve and, of a run over several ranks, the last mask and everybody's stage times."""
    args, out = trainer.args, Path(trainer.args.out)
    traces = [trainer.trace]
    if trainer.world > 1:
        traces = [None] * trainer.world
        dist.all_gather_object(traces, trainer.trace, group=trainer.group)
    if trainer.rank:
        return
    out.mkdir(parents=True, exist_ok=True)
    c = trainer.model.config
    result = {
        "losses": losses,
        "seconds": seconds,
        "tokens_per_second": args.seq_len * args.steps / seconds,
        "world": trainer.world,
        "device": str(trainer.device),
        "heads": {"heads_q": c.num_heads_q, "heads_kv": c.num_heads_kv, "head_dim": c.head_dim},
        "parameters": trainer.model.num_parameters(),
        "arguments": vars(args),
    }
    (out / f"{args.curve}.json").write_text(json.dumps(result, indent=1))
    if trainer.world > 1:
        rows = plan.slices.array
        names = ("full", "causal", "inv_causal", "bi_causal")
        mask = {
            "total": plan.total_tokens,
            "q_ranges": rows[:, 0:2].tolist(),
            "k_ranges": rows[:, 2:4].tolist(),
            "types": [names[kind] for kind in rows[:, 4].tolist()],
        }
        (out / "mask.json").write_text(json.dumps(mask))
        (out / "trace.json").write_text(json.dumps([event for trace in traces for event in trace]))


def write_training(trainer: Trainer) -> None:
    write(trainer, *train(trainer))


def main() -> None:
    args = arguments()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    try:
        write_training(Trainer(args, rank, world, device))
        if world > 1:
            gc.collect()  # nothing may keep the group alive beyond its end
            dist.barrier()  # a rank that leaves while another still works can abort as its connections close
    except DataError as error:
        raise SystemExit(str(error)) from None
    finally:
        if world > 1:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
