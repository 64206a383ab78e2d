# SPDX-License-Identifier: Apache-2.0
"""A small model with DeepSeek Sparse Attention learns on two processes (gloo, no GPU) what it learns on one.

    python examples/05_sparse_attention.py [ranks]

First the indexers alone learn what dense attention looks at, then the whole model learns with sparse attention. Started
by torchrun instead, it uses the processes that torchrun made.
"""

import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.functional import cross_entropy

from magi_attention.api import Mask, make_plan, sum_gradients
from magi_attention.integrations.dsa import DsaAttention, DsaConfig

DOCUMENTS = [0, 35, 50, 96]  # three documents in one packed sequence
TOTAL, VOCABULARY, PERIOD = DOCUMENTS[-1], 32, 12
CONFIG = DsaConfig(
    hidden_size=32, num_attention_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
    v_head_dim=8, index_n_heads=2, index_head_dim=16, index_topk=12, is_index_rope_interleaved=False,
)  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        dim = CONFIG.hidden_size
        self.attention, self.norm = DsaAttention(CONFIG), nn.RMSNorm(dim)
        self.mlp = nn.Sequential(nn.RMSNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, rotary, plan, stage):
        attended = self.attention(self.norm(x), rotary, plan, stage=stage)
        x = x + attended.out
        return x + self.mlp(x), attended.divergence.sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, CONFIG.hidden_size), nn.Linear(CONFIG.hidden_size, VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens, plan, stage):
        half = CONFIG.qk_rope_head_dim // 2
        at = plan.positions(per_document=True)[:, None].double()
        angles = (at * 10000.0 ** (-torch.arange(half) / half)).repeat(1, 2)
        x, divergence = self.embed(tokens), 0.0
        for block in self.blocks:
            x, more = block(x, (angles.cos(), angles.sin()), plan, stage)
            divergence = divergence + more
        return self.head(x), divergence


def train(world: int) -> list[float]:
    """The losses of all steps, the same on every rank. In warm-up steps only the divergence is learned from."""
    torch.manual_seed(0)
    model = Model().double()
    text = torch.randint(0, VOCABULARY, (PERIOD,)).repeat(TOTAL // PERIOD)
    plan = make_plan(Mask.varlen(DOCUMENTS, causal=True), world)
    losses = []
    for stage, steps in (("dense", 6), ("sparse", 15)):
        model.requires_grad_(stage == "sparse")
        for block in model.blocks:
            block.attention.indexer.requires_grad_(True)
        optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=5e-3)
        for _ in range(steps):
            tokens = plan.shard(text)
            logits, divergence = model(tokens, plan, stage)
            divergence = divergence / TOTAL
            task = cross_entropy(logits, plan.labels(tokens), ignore_index=-100, reduction="sum") / TOTAL
            loss = divergence if stage == "dense" else task + divergence
            optimizer.zero_grad()
            loss.backward()
            total = loss.detach().clone()
            if world > 1:
                sum_gradients(model)
                dist.all_reduce(total)
            optimizer.step()
            losses.append(total.item())
    return losses


def worker() -> None:
    alone, together = train(1), train(dist.get_world_size())
    difference = max(abs(a - b) for a, b in zip(alone, together))
    if dist.get_rank() == 0:
        print(f"warm-up of the indexers: {together[0]:.4f} to {together[5]:.4f}")
        print(f"training: {together[6]:.4f} to {together[-1]:.4f}")
        print(f"greatest difference from one process: {difference:.1e}")
    if difference > 1e-6 or together[5] >= together[0] or together[-1] >= 0.8 * together[6]:
        raise SystemExit("The ranks learned something else than one process, or nothing.")


def spawned(rank: int, world: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    worker()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group("gloo")
        worker()
        dist.destroy_process_group()
    else:
        ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free_port = probe.getsockname()[1]
        mp.spawn(spawned, args=(ranks, free_port), nprocs=ranks)
