# SPDX-License-Identifier: Apache-2.0
"""Trains a small video DiT whose packed videos are shared by several ranks. Its attention takes (B, S, H, D).

Videos of unequal length stand one behind another in a pack. A token sees its whole video. With --block-frames N it sees
its own block of N frames and all earlier ones. This line starts two processes on CPUs:

    torchrun --nproc-per-node 2 examples/frameworks/dit_video.py

This one starts 8 GPUs, as 2 replicas of 4 ranks that share a pack:

    torchrun --nproc-per-node 8 examples/frameworks/dit_video.py --cp-size 4 --side 32 --frames 40 --width 512 --heads 8

Losses are the same for any number of ranks. On GPUs autocast computes in bfloat16.
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from magi_attention.api import Mask, attend, make_plan, sum_gradients
from magi_attention.errors import ContractError

CHANNELS, VIDEOS = 8, 3  # of a latent; of a pack


def attention_BSHD(q: Tensor, k: Tensor, v: Tensor, plan, group) -> Tensor:
    """Stands where a block called flash_attn_func(q, k, v)."""
    if len(q) != 1:
        raise ContractError(f"q has {len(q)} rows; pack the videos along S, so that B is 1.")
    out, _ = attend(q[0], k[0], v[0], plan, group)
    return out[None]


def waves(x: Tensor, width: int) -> Tensor:
    """Sines and cosines of ``x`` (..., n) in ``width`` frequencies: (..., 2 * n * width)."""
    angles = x[..., None] * 100.0 ** -torch.linspace(0, 1, width, device=x.device)
    return torch.cat([angles.sin(), angles.cos()], -1).flatten(-2)


class Block(nn.Module):
    """A DiT block with adaLN: the time of a token shifts, scales and gates both halves."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation, self.qkv = nn.Linear(width, 6 * width), nn.Linear(width, 3 * width)
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BSC: Tensor, time_BSC: Tensor, attention) -> Tensor:
        shift, scale, gate, shift_2, scale_2, gate_2 = self.modulation(F.silu(time_BSC)).chunk(6, -1)
        qkv = self.qkv(self.norm(x_BSC) * (1 + scale) + shift)
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).unbind(-3)  # (B, S, H, D)
        x_BSC = x_BSC + gate * self.out(attention(q, k, v).flatten(-2))
        return x_BSC + gate_2 * self.down(F.gelu(self.up(self.norm(x_BSC) * (1 + scale_2) + shift_2)))


class DiT(nn.Module):
    def __init__(self, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.latent, self.place, self.time = (nn.Linear(n, width) for n in (CHANNELS, 3 * 32, 32))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.head = nn.Linear(width, CHANNELS)

    def forward(self, noisy_BSC: Tensor, place_BS3: Tensor, time_BS1: Tensor, attention) -> Tensor:
        x, time = self.latent(noisy_BSC) + self.place(waves(place_BS3, 16)), self.time(waves(100 * time_BS1, 16))
        for block in self.blocks:
            x = block(x, time, attention)
        return self.head(x)


def make_pack(args: argparse.Namespace, seed: int) -> tuple[list[int], list[Tensor]]:
    """[0, n0, n0 + n1, ...], and of each token the noisy latent, the velocity to predict, its place and its time."""
    draw = torch.Generator().manual_seed(seed)
    bounds, parts = [0], []
    for frames in torch.randint(1, args.frames + 1, (VIDEOS,), generator=draw).tolist():
        axes = [torch.arange(n).float() for n in (frames, args.side, args.side)]
        place = torch.cartesian_prod(*axes)
        latent = torch.sin(place.sum(1, keepdim=True) / 4 + torch.arange(CHANNELS))  # a wave that moves over frames
        noise, time = torch.randn(latent.shape, generator=draw), torch.rand(1, generator=draw).expand(len(place), 1)
        parts.append([(1 - time) * latent + time * noise, noise - latent, place, time])
        bounds.append(bounds[-1] + len(place))
    return bounds, [torch.cat(x) for x in zip(*parts)]


def backward(args: argparse.Namespace, model: DiT, pack: tuple, elements: int, group, device) -> Tensor:
    """This rank's share of the loss of a pack, which adds to the gradients."""
    bounds, tensors = pack
    block = args.block_frames * args.side**2
    mask = Mask.block_causal(bounds, block) if block else Mask.varlen(bounds)
    heads, head_dim = args.heads, args.width // args.heads
    plan = make_plan(mask, dist.get_world_size(group), num_heads_q=heads, num_heads_kv=heads, head_dim=head_dim)
    rows = [*tensors, torch.ones(bounds[-1], 1)]  # pad rows, where a plan has some, get 0
    noisy, velocity, place, time, is_real = (plan.shard(x.to(device), group)[None] for x in rows)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        predicted = model(noisy, place, time, lambda q, k, v: attention_BSHD(q, k, v, plan, group))
    loss = ((predicted.float() - velocity).square() * is_real).sum() / elements
    loss.backward()
    return loss.detach()


def train(args: argparse.Namespace, device: torch.device) -> None:
    world, cp_size = dist.get_world_size(), args.cp_size or dist.get_world_size()
    if world % cp_size:
        raise SystemExit(f"--cp-size is {cp_size}; give a divisor of the {world} ranks.")
    if args.packs % (replicas := world // cp_size):
        raise SystemExit(f"--packs is {args.packs}; give a multiple of the {replicas} replicas.")
    mesh = init_device_mesh(device.type, (replicas, cp_size), mesh_dim_names=("dp", "cp"))
    group, replica = mesh.get_group("cp"), mesh.get_local_rank("dp")
    torch.manual_seed(0)
    model = DiT(args.width, args.heads, args.blocks).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    for step in range(args.steps):
        packs = [make_pack(args, step * args.packs + i) for i in range(args.packs)]
        elements = CHANNELS * sum(bounds[-1] for bounds, _ in packs)  # of all ranks: their losses and gradients add up
        optimizer.zero_grad()
        own = packs[replica::replicas]
        loss = torch.stack([backward(args, model, pack, elements, group, device) for pack in own]).sum()
        sum_gradients(model)  # over dp and cp
        optimizer.step()
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"step {step + 1}  loss {loss.item():.7f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"cp-size": 0, "packs": 2, "frames": 6, "side": 4, "block-frames": 0, "steps": 8}
    for name, default in {**numbers, "width": 128, "heads": 2, "blocks": 2, "learning-rate": 3e-3}.items():
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
