# SPDX-License-Identifier: Apache-2.0
"""Trains a Llama on sequences that are long for the memory: everything that grows with the sequence is bounded.

    torchrun --nproc-per-node 4 examples/long_context.py --config qwen3-8b --seq-len 262144 --out runs/long
    torchrun --nproc-per-node 2 examples/long_context.py --config tiny --device cpu --seq-len 4096 --out runs/long
    torchrun --nproc-per-node 2 examples/long_context.py --config qwen3-8b --layers 4 --one-sequence --seq-len 131072 \
        --out runs/long

As examples/fsdp2_llama.py, whose model, data and optimizer these are, and in addition

* inputs of blocks are all that stays between forward and backward, in host memory, copied beside the blocks
  (llama/offload.py), and with ``--keeps-attention`` what attention gave, so that it is not computed again;
* the MLP takes ``--mlp-chunk`` tokens at a time, and the loss ``--logits-chunk`` (llama/loss_in_chunks.py), so no rank
  has all of its logits;
* ``--head-chunks`` parts of the kv heads travel and are computed one after the other;
* the memory of a step is predicted before the first one (``plan.memory``), and what to switch on is said where it is
  not enough.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsdp2_llama import (
    Batch,
    PackedLlama,
    PlannedBlock,
    Trainer,
    choose_device,
    config_of,
    make_parser,
    positive,
    run,
)
from loss_in_chunks import LOSSES, make_loss
from model import Block, ModelConfig, rotary_tables
from offload import OffloadedInputs
from torch import Tensor
from torch.utils.checkpoint import checkpoint, noop_context_fn

from magi_attention.api import Mask, ModelShape, Plan, TrainingSetup, attend, keep_attention, make_plan


class LongBlock(PlannedBlock):
    """``mlp_chunk`` tokens go through the MLP at a time; each such part is computed again in the backward.

    A block that is computed again only has to give those parts their inputs (``inputs_alone``); what the MLP makes of
    them would be for nobody.
    """

    mlp_chunk = 8192
    gives_inputs_alone = False

    def mlp(self, x_TC: Tensor) -> Tensor:
        gate, up = self.gate_up(self.mlp_norm(x_TC)).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: dist.ProcessGroup | None) -> Tensor:
        return attend(q, k, v, plan, group)[0]

    def forward(self, x_TC: Tensor, cos: Tensor, sin: Tensor, plan: Plan, group: dist.ProcessGroup | None) -> Tensor:
        x_TC = self.attend(x_TC, cos, sin, lambda q, k, v: self.attention(q, k, v, plan, group))
        # A compiled block has the same operations each time.
        is_short = not torch.compiler.is_compiling() and self.gives_inputs_alone
        mlp = torch.zeros_like if is_short else self.mlp
        parts = [x + checkpoint(mlp, x, use_reentrant=False) for x in x_TC.split(self.mlp_chunk)]
        return torch.cat(parts)


@contextmanager
def inputs_alone(also: AbstractContextManager) -> Iterator[None]:
    """Blocks are computed again, in the context ``also``."""
    LongBlock.gives_inputs_alone = True
    try:
        with also:
            yield
    finally:
        LongBlock.gives_inputs_alone = False


class LongLlama(PackedLlama):
    """Its forward gives the sum of the losses, so that logits of all tokens are never there."""

    def __init__(self, args: argparse.Namespace, block: type[LongBlock] = LongBlock) -> None:
        super().__init__(shape_of(args), block, True)
        self.loss_sum, self.about_loss = make_loss(args.loss, args.logits_chunk)
        self.is_offloaded, self.keeps_attention = args.activations == "offloaded", args.keeps_attention
        for block in self.blocks:
            block.mlp_chunk = args.mlp_chunk

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, labels_T: Tensor, plan: Plan, group: dist.ProcessGroup | None
    ) -> Tensor:
        cos, sin = rotary_tables(positions_T, self.config.head_dim, self.config.rope_base)
        x_TC = self.embedding(tokens_T)
        cos, sin = cos.to(x_TC.dtype), sin.to(x_TC.dtype)
        offloaded = OffloadedInputs(x_TC.device) if self.is_offloaded else None
        contexts = keep_attention if self.keeps_attention else noop_context_fn
        if offloaded and self.keeps_attention:
            contexts = partial(keep_attention, offloaded.pack, offloaded.unpack)

        def contexts_of_block() -> tuple[AbstractContextManager, AbstractContextManager]:
            forward, again = contexts()
            return forward, inputs_alone(again)

        with offloaded or nullcontext():
            # Tables are arguments by name, which checkpoint keeps as they are: one copy serves all blocks.
            one_for_all = {"cos": cos, "sin": sin, "plan": plan, "group": group}
            for block in self.blocks:
                x_TC = checkpoint(block, x_TC, use_reentrant=False, context_fn=contexts_of_block, **one_for_all)
        return self.loss_sum(self.norm(x_TC), self.head.weight, labels_T)


class LongTrainer(Trainer):
    def make_model(self, block: type[Block]) -> PackedLlama:
        model = LongLlama(self.args)
        if dist.get_rank() == 0:
            print(predicted(self.args), model.about_loss)
        return model

    def borders(self, batch: Batch) -> tuple[int, ...]:
        return (0, len(batch.tokens)) if self.args.one_sequence else super().borders(batch)

    def loss_sum(self, tokens: Tensor, positions: Tensor, labels: Tensor, plan: Plan) -> Tensor:
        return self.model(tokens, positions, labels, plan, self.place.cp_group)

    def step(self) -> Tensor:
        try:
            return super().step()
        except torch.OutOfMemoryError as error:
            raise SystemExit(f"The memory of a GPU is not enough: {remedies(self.args)} torch says: {error}") from error


def remedies(args: argparse.Namespace) -> str:
    """What of this program makes a step smaller and is not switched on."""
    ways = [
        ("--activations offloaded", args.activations != "offloaded"),
        ("no --keeps-attention", args.keeps_attention and args.activations != "offloaded"),
        (f"--mlp-chunk {args.mlp_chunk // 4}", args.mlp_chunk > 2048),
        (f"--logits-chunk {args.logits_chunk // 4}", args.logits_chunk > 512),
        ("--reduce-each-pack", args.accumulate > 1 and not args.reduce_each_pack),
        ("--head-chunks 4 (a divisor of the kv heads)", args.head_chunks == 1),
        ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF" not in os.environ),
    ]
    found = [name for name, is_off in ways if is_off]
    return f"give {', '.join(found) or 'a smaller --seq-len'}, or use more GPUs."


def shape_of(args: argparse.Namespace) -> ModelConfig:
    config = config_of(args)
    return replace(config, num_layers=args.layers or config.num_layers)


def shape_and_setup(args: argparse.Namespace) -> tuple[ModelShape, TrainingSetup]:
    """What ``plan.memory`` takes."""
    c = shape_of(args)
    sizes = c.width, c.num_layers, c.num_heads_q, c.num_heads_kv, c.head_dim, c.hidden, c.vocabulary
    shape = ModelShape(*sizes, has_qk_norm=c.has_qk_norm)
    world, here = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    setup = TrainingSetup(
        shards=world, element_bytes=2 if args.dtype == "bf16" else 4, activations=args.activations,
        keeps_attention=args.keeps_attention, mlp_chunk=args.mlp_chunk, logits_chunk=args.logits_chunk,
        head_chunks=args.head_chunks, accumulates_gradients=args.accumulate > 1,
        defers_reduction=args.accumulate > 1 and not args.reduce_each_pack,
        loss="torch" if args.loss in (None, "torch") and hasattr(F, "linear_cross_entropy") else "checkpointed",
        is_one_launch=args.device == "cuda" and world == here,
    )  # fmt: skip
    return shape, setup


def predicted(args: argparse.Namespace) -> str:
    """A sentence on the memory of a step with one document, the most that packed ones take."""
    shape, setup = shape_and_setup(args)
    use = make_plan(Mask.causal(args.seq_len), args.cp).memory(shape, setup)
    return (
        f"{shape.num_parameters / 1e9:.2f}B parameters, {use.tokens:,} tokens a rank: predicted "
        f"{use.peak_bytes / 1e9:.2f} GB on the GPU and {use.host_bytes / 1e9:.2f} GB on the host, for each rank."
    )


def make_long_parser(description: str | None) -> argparse.ArgumentParser:
    """Options of training, which benchmarks/long_train.py has, too."""
    parser = make_parser(description)
    add = parser.add_argument
    add("--layers", type=positive, help="blocks of the model; those of --config without it")
    add("--one-sequence", action="store_true", help="one causal document for each step, in place of packed ones")
    add("--activations", choices=("checkpointed", "offloaded"), default="offloaded", help="inputs of blocks")
    add("--keeps-attention", action="store_true", help="checkpoints have out and lse of attention, too")
    add("--mlp-chunk", type=positive, default=8192, help="tokens of an MLP at a time")
    add("--logits-chunk", type=positive, default=2048, help="tokens with logits at a time")
    add("--loss", choices=LOSSES, help="what computes the loss; torch's linear_cross_entropy where torch has it")
    add("--head-chunks", type=positive, default=1, help="parts of the kv heads, one after the other")
    return parser


def arguments() -> argparse.Namespace:
    args = make_long_parser(__doc__).parse_args()
    args.device, args.attention, args.recompute = choose_device(args), "magi", True
    return args


if __name__ == "__main__":
    arguments_given = arguments()
    os.environ["MAGI_ATTENTION_HEAD_CHUNKS"] = str(arguments_given.head_chunks)
    run(arguments_given, LongTrainer)
