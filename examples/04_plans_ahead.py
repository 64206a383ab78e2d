# SPDX-License-Identifier: Apache-2.0
"""A training loop whose plans come with their batches: a worker process of the data loader makes them one batch ahead.

    python examples/04_plans_ahead.py [ranks]

Each batch has documents of its own, so a mask and a plan of its own. The ranks are processes on the CPU.
"""

import socket
import sys
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset

from magi_attention.api import Mask, attend, kernel_tiles, make_plan, sum_gradients

VOCABULARY, HEADS, HEADS_KV, DIM, BATCHES = 64, 4, 2, 16, 3
SHAPE = {"num_heads_q": HEADS, "num_heads_kv": HEADS_KV, "head_dim": DIM}


class Documents(Dataset):
    """Each document is a sequence of tokens that is easy to learn."""

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return (torch.arange(100 + 37 * index) + index) % VOCABULARY


def collate(rank: int, world: int, kernels, documents: list[torch.Tensor]):
    """Runs in the worker: packs the documents, and plans and prepares their mask for ``rank``."""
    cu_seqlens = [0]
    for tokens in documents:
        cu_seqlens.append(cu_seqlens[-1] + len(tokens))
    plan = make_plan(Mask.varlen(cu_seqlens, causal=True), world, **SHAPE)
    return torch.cat(documents), plan.prepare(rank, kernels)


def train(rank: int, world: int) -> list[float]:
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(VOCABULARY, 32)
    qkv, head = torch.nn.Linear(32, (HEADS + 2 * HEADS_KV) * DIM), torch.nn.Linear(HEADS * DIM, VOCABULARY)
    model = torch.nn.ModuleList([embedding, qkv, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    kernels = kernel_tiles("cpu", torch.float32, **SHAPE)  # None on a CPU; on a GPU, plans get their tile plans too
    loader = DataLoader(
        Documents(), batch_size=4, collate_fn=partial(collate, rank, world, kernels),
        num_workers=1, prefetch_factor=1, multiprocessing_context="forkserver",
    )  # fmt: skip
    losses = []
    for tokens, plan in loader:
        local = plan.shard(tokens)
        q, k, v = qkv(embedding(local)).view(len(local), -1, DIM).split([HEADS, HEADS_KV, HEADS_KV], dim=1)
        logits = head(attend(q, k, v, plan)[0].flatten(1))
        num_labels = plan.total_tokens - (len(plan.cu_seqlens) - 1)
        loss = torch.nn.functional.cross_entropy(logits, plan.labels(local), reduction="sum") / num_labels
        optimizer.zero_grad()
        loss.backward()
        sum_gradients(model)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


def worker(rank: int, world: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    losses = train(rank, world)
    if rank == 0:
        print(f"{world} ranks, losses {', '.join(f'{loss:.3f}' for loss in losses)}")
    dist.destroy_process_group()
    if losses[-1] >= losses[0]:
        raise SystemExit("The loss did not fall.")


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    mp.spawn(worker, args=(ranks, free_port), nprocs=ranks)
