# SPDX-License-Identifier: Apache-2.0
"""Trains a small hybrid model, three layers of gated delta rule and one of attention, on documents that ranks share.

This line starts two processes on CPUs, where the recurrence is PyTorch's, token by token:

    torchrun --nproc-per-node 2 examples/frameworks/hybrid_stack.py

This one starts 8 GPUs. flash-linear-attention is the kernel there, if it is installed:

    torchrun --nproc-per-node 8 examples/frameworks/hybrid_stack.py --longest 8192 --width 1024 --heads 8

Losses are the same for any number of ranks. --way says what of a recurrent layer travels: states, contiguous, heads.
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from magi_attention.api import Mask, attend, causal_conv1d, make_plan, run_recurrent, sum_gradients
from magi_attention.integrations.recurrent_kernels import fla_kernel

try:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
except ImportError:
    chunk_gated_delta_rule = None

VOCABULARY, DOCUMENTS, CONVOLUTION = 64, 4, 4  # of a pack; tokens of the short convolution


def by_tokens(value, state_SHKV, cu_seqlens, q, k, log_decay, beta):
    """The gated delta rule, token by token: value (T, H, V), q and k (T, H, K), log_decay and beta (T, H)."""
    out, final = [], []
    for begin, end, state in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), state_SHKV):
        for t in range(begin, end):
            state = log_decay[t].exp()[:, None, None] * state
            new = beta[t][:, None] * (value[t] - (k[t][:, :, None] * state).sum(1))
            state = state + k[t][:, :, None] * new[:, None]
            out.append(q.shape[-1] ** -0.5 * (q[t][:, :, None] * state).sum(1))
        final.append(state)
    return torch.stack(out), torch.stack(final)


class GatedDelta(nn.Module):
    """Between documents nothing passes; between ranks states do, or what else --way says."""

    def __init__(self, width: int, heads: int, way: str) -> None:
        super().__init__()
        self.heads, self.way = heads, way
        self.qkv, self.gates = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 2 * heads)
        self.filters = nn.Parameter(torch.randn(3 * width, CONVOLUTION) / CONVOLUTION)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_TC: Tensor, plan) -> Tensor:
        qkv = self.qkv(x_TC)
        mixed = F.silu(causal_conv1d(qkv, self.filters.to(qkv.dtype), plan))
        q, k, v = mixed.unflatten(-1, (3, self.heads, -1)).unbind(1)  # (T, H, D)
        q, k = F.normalize(q, dim=-1).to(v.dtype), F.normalize(k, dim=-1).to(v.dtype)
        decay, beta = self.gates(x_TC).chunk(2, -1)
        inputs = (q, k, F.logsigmoid(decay.float()), beta.sigmoid())
        kernel = fla_kernel(chunk_gated_delta_rule) if chunk_gated_delta_rule and x_TC.is_cuda else by_tokens
        out = run_recurrent(kernel, v, q.shape[-1], plan, inputs=inputs, way=self.way)
        return self.out(out.flatten(1))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x_TC: Tensor, plan) -> Tensor:
        q, k, v = self.qkv(x_TC).unflatten(-1, (3, self.heads, -1)).unbind(1)
        return self.out(attend(q, k, v, plan)[0].flatten(1))


class HybridModel(nn.Module):
    """The recurrent layers give attention the order of tokens, so there are no positions."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        width, heads = args.width, args.heads
        self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
        recurrent = [GatedDelta(width, heads, args.way) for _ in range(3)]
        self.mixers = nn.ModuleList([*recurrent, Attention(width, heads)])
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
            for _ in self.mixers
        )
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(len(self.mixers) + 1))

    def forward(self, tokens_T: Tensor, plan) -> Tensor:
        x_TC = self.embedding(tokens_T)
        for norm, mixer, mlp in zip(self.norms, self.mixers, self.mlps):
            x_TC = x_TC + mixer(norm(x_TC), plan)
            x_TC = x_TC + mlp(x_TC)
        return self.head(self.norms[-1](x_TC))


def make_pack(longest: int, seed: int) -> tuple[list[int], Tensor]:
    """Lengths of documents, and their tokens. Each follows from the one before, so there is something to learn."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest, (DOCUMENTS,), generator=draw).tolist()
    return lengths, torch.cat([(7 * torch.arange(n) + n) % VOCABULARY for n in lengths])


def train(args: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)
    model = HybridModel(args).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    for step in range(args.steps):
        lengths, tokens = make_pack(args.longest, step)
        plan = make_plan(Mask.from_lengths(lengths, causal=True), dist.get_world_size())
        own = plan.shard(tokens.to(device))
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(own, plan)
        loss = F.cross_entropy(logits.float(), plan.labels(own), reduction="sum") / sum(n - 1 for n in lengths)
        loss.backward()  # this rank's share: losses and gradients of all ranks add up
        sum_gradients(model)
        optimizer.step()
        dist.all_reduce(loss.detach_())
        if dist.get_rank() == 0:
            print(f"step {step + 1}  loss {loss.item():.7f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"longest": 40, "width": 64, "heads": 4, "steps": 8, "learning-rate": 3e-3}
    for name, default in {**numbers, "way": "auto"}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args, is_gpu = parser.parse_args(), torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_gpu else "gloo")
    train(args, device)
    gc.collect()  # nothing may keep a group alive beyond its end
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
