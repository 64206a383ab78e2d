# SPDX-License-Identifier: Apache-2.0
"""Muon with QK-clip: attention gives the greatest logit of each head, and heads above a bound are scaled down.

    torchrun --standalone --nproc-per-node 2 examples/muon_qk_clip.py --out runs/muon
    python examples/muon_qk_clip.py --out runs/free --bound 0        # without the clip, to compare

After a step, a head whose greatest logit is above ``--bound`` has its query weights multiplied by bound / logit, which
brings the logit back to the bound, as logits are linear in q. The rule is that of Kimi K2's report (arXiv 2507.20534),
with all of the factor on q, since kv heads are shared.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent / "llama"))
from data import packed_batches  # noqa: E402
from model import Llama, ModelConfig  # noqa: E402

from magi_attention.api import Mask, attend, make_plan, sum_gradients  # noqa: E402

CONFIG = ModelConfig(width=64, num_layers=2, num_heads_q=4, num_heads_kv=2, head_dim=16, hidden=128)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", required=True, help="folder for logits.json")
    add("--bound", type=float, default=15.0, help="greatest logit of a head; 0 for none")
    add("--steps", type=int, default=40)
    add("--seq-len", type=int, default=1024)
    add("--learning-rate", type=float, default=0.1, help="of Muon; large, so that logits grow")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--data", help="text file or folder; the standard library's sources without it")
    return parser.parse_args()


class Trainer:
    """One rank's model and its two optimizers: Muon for matrices inside blocks, AdamW for the rest."""

    def __init__(self, args: argparse.Namespace, world: int, device: torch.device) -> None:
        self.args, self.world, self.device = args, world, device
        self.model = Llama(CONFIG, seed=0).to(device)
        inside = [p for p in self.model.blocks.parameters() if p.ndim == 2]
        others = [p for p in self.model.parameters() if not any(p is q for q in inside)]
        self.optimizers = [
            torch.optim.Muon(inside, lr=args.learning_rate, weight_decay=0.0), torch.optim.AdamW(others, lr=3e-3),
        ]  # fmt: skip
        self.batches = packed_batches(args.data, args.seq_len, 0, 300)

    def step(self) -> tuple[float, list[list[float]]]:
        """The loss, and the greatest logit of each head of each layer."""
        batch, tops = next(self.batches), []
        plan = make_plan(Mask.varlen(batch.cu_seqlens, causal=True), self.world)
        local = plan.shard(batch.tokens.to(self.device))
        labels = plan.labels(local)

        def attention(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
            out, meta = attend(q_THD, k_THD, v_THD, plan, return_max_logits=True)
            tops.append(meta.max_logits)  # over all ranks
            return out

        logits = self.model(local, plan.positions(device=self.device, per_document=True), attention)
        count = len(batch.tokens) - (len(batch.cu_seqlens) - 1)
        loss = F.cross_entropy(logits, labels, reduction="sum") / count
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        greatest, total = torch.stack(tops), loss.detach()
        if self.world > 1:
            sum_gradients(self.model)
            dist.all_reduce(total)
        for optimizer in self.optimizers:
            optimizer.step()
        if self.args.bound:
            self.clip(greatest)
        return total.item(), greatest.tolist()

    @torch.no_grad()
    def clip(self, greatest: Tensor) -> None:
        """Scales the query weights of heads whose logits were above the bound."""
        for block, tops in zip(self.model.blocks, greatest):
            factors = (self.args.bound / tops).clamp(max=1.0).repeat_interleave(CONFIG.head_dim)
            block.qkv.weight[: len(factors)] *= factors[:, None]


def train(args: argparse.Namespace, rank: int, world: int, device: torch.device) -> None:
    trainer = Trainer(args, world, device)
    steps = [trainer.step() for _ in range(args.steps)]
    if rank == 0:
        losses, greatest = zip(*steps)
        worst = max(max(layer) for layer in greatest[-1])
        print(f"{args.steps} steps: loss {losses[0]:.3f} to {losses[-1]:.3f}, greatest logit {worst:.1f}")
        Path(args.out).mkdir(parents=True, exist_ok=True)
        (Path(args.out) / "logits.json").write_text(json.dumps({"losses": losses, "logits": greatest}))


def main() -> None:
    args = arguments()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device(args.device, int(os.environ.get("LOCAL_RANK", 0)) if args.device == "cuda" else None)
    if args.device == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    try:
        train(args, rank, world, device)
        if world > 1:
            gc.collect()  # nothing may keep the group alive beyond its end
            dist.barrier()
    finally:
        if world > 1:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
