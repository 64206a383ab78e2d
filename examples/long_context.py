# SPDX-License-Identifier: Apache-2.0
"""Trains a Llama on sequences that are long for the memory: everything that grows with the sequence is bounded.

    torchrun --nproc-per-node 4 examples/long_context.py --config qwen3-8b --seq-len 262144 --out runs/long
    torchrun --nproc-per-node 2 examples/long_context.py --config tiny --device cpu --seq-len 4096 --out runs/long

As examples/fsdp2_llama.py, whose model, data and optimizer these are, and in addition

* inputs of blocks are all that stays between forward and backward, in host memory (checkpoint, save_on_cpu);
* the MLP takes ``--mlp-chunk`` tokens at a time, and the loss ``--logits-chunk``, so no rank has all of its logits;
* ``--head-chunks`` parts of the kv heads travel and are computed one after the other;
* the memory of a step is predicted before the first one (``plan.memory``).
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsdp2_llama import CONFIGS, PackedLlama, PlannedBlock, Trainer, choose_device, make_parser, run
from model import Block, rotary_tables
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from magi_attention.api import Mask, ModelShape, Plan, TrainingSetup, attend, make_plan


class LongBlock(PlannedBlock):
    """``mlp_chunk`` tokens go through the MLP at a time; each such part is computed again in the backward."""

    mlp_chunk = 8192

    def mlp(self, x_TC: Tensor) -> Tensor:
        gate, up = self.gate_up(self.mlp_norm(x_TC)).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)

    def forward(self, x_TC: Tensor, cos: Tensor, sin: Tensor, plan: Plan, group: dist.ProcessGroup | None) -> Tensor:
        x_TC = self.attend(x_TC, cos, sin, lambda q, k, v: attend(q, k, v, plan, group)[0])
        parts = [x + checkpoint(self.mlp, x, use_reentrant=False) for x in x_TC.split(self.mlp_chunk)]
        return torch.cat(parts)


class LongLlama(PackedLlama):
    """Its forward gives the sum of the losses, so that logits of all tokens are never there."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(CONFIGS[args.config], args.seed, LongBlock, True)
        self.logits_chunk, self.is_offloaded = args.logits_chunk, args.activations == "offloaded"
        for block in self.blocks:
            block.mlp_chunk = args.mlp_chunk

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, labels_T: Tensor, plan: Plan, group: dist.ProcessGroup | None
    ) -> Tensor:
        cos, sin = rotary_tables(positions_T, self.config.head_dim, self.config.rope_base)
        x_TC = self.embedding(tokens_T)
        cos, sin = cos.to(x_TC.dtype), sin.to(x_TC.dtype)
        for block in self.blocks:
            # Tables are arguments by name, which checkpoint keeps as they are: one copy serves all blocks.
            with save_on_cpu(pin_memory=x_TC.is_cuda) if self.is_offloaded else nullcontext():
                x_TC = checkpoint(block, x_TC, cos=cos, sin=sin, plan=plan, group=group, use_reentrant=False)
        return self.loss_sum(self.norm(x_TC), labels_T)

    def loss_sum(self, x_TC: Tensor, labels_T: Tensor) -> Tensor:
        def of_chunk(x: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.head(x).float(), labels, reduction="sum")

        chunks = zip(x_TC.split(self.logits_chunk), labels_T.split(self.logits_chunk))
        return torch.stack([checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks]).sum()


class LongTrainer(Trainer):
    def make_model(self, block: type[Block]) -> PackedLlama:
        if dist.get_rank() == 0:
            print(predicted(self.args))
        return LongLlama(self.args)

    def loss_sum(self, tokens: Tensor, positions: Tensor, labels: Tensor, plan: Plan) -> Tensor:
        return self.model(tokens, positions, labels, plan, self.place.cp_group)


def predicted(args: argparse.Namespace) -> str:
    """A sentence on the memory of a step with one document, the most that packed ones take."""
    c = CONFIGS[args.config]
    shape = ModelShape(c.width, c.num_layers, c.num_heads_q, c.num_heads_kv, c.head_dim, c.hidden, c.vocabulary)
    world, here = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    setup = TrainingSetup(
        shards=world, element_bytes=2 if args.dtype == "bf16" else 4, activations=args.activations,
        mlp_chunk=args.mlp_chunk, logits_chunk=args.logits_chunk, head_chunks=args.head_chunks,
        is_one_launch=args.device == "cuda" and world == here,
    )  # fmt: skip
    use = make_plan(Mask.causal(args.seq_len), args.cp).memory(shape, setup)
    return (
        f"{shape.num_parameters / 1e9:.2f}B parameters, {use.tokens:,} tokens a rank: predicted "
        f"{use.peak_bytes / 1e9:.2f} GB on the GPU and {use.host_bytes / 1e9:.2f} GB on the host, for each rank"
    )


def arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--activations", choices=("checkpointed", "offloaded"), default="offloaded", help="inputs of blocks")
    add("--mlp-chunk", type=int, default=8192, help="tokens of an MLP at a time")
    add("--logits-chunk", type=int, default=2048, help="tokens with logits at a time")
    add("--head-chunks", type=int, default=1, help="parts of the kv heads, one after the other")
    args = parser.parse_args()
    args.device, args.attention, args.recompute = choose_device(args), "magi", True
    return args


if __name__ == "__main__":
    arguments_given = arguments()
    os.environ["MAGI_ATTENTION_HEAD_CHUNKS"] = str(arguments_given.head_chunks)
    run(arguments_given, LongTrainer)
