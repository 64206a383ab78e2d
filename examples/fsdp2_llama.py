# SPDX-License-Identifier: Apache-2.0
"""Trains a Llama with FSDP2 and context parallelism on packed text, in native PyTorch.

    torchrun --nproc-per-node 4 examples/fsdp2_llama.py --config 1b --cp 2 --seq-len 32768 --compile --out runs/fsdp2
    torchrun --nproc-per-node 2 examples/fsdp2_llama.py --config tiny --device cpu --steps 20 --out runs/fsdp2
    python examples/fsdp2_llama.py --plot runs/fsdp2/curve.json runs/other/curve.json --out runs/fsdp2

``--cp`` ranks share a sequence; the rest is data parallel. Parameters are sharded over all ranks. With
``--attention sdpa``, which needs ``--cp 1``, it is the same model with torch's attention, document by document.

A step: pack -> Mask -> plan_async -> shard -> blocks with attend() -> loss on sharded labels -> FSDP2 sums gradients.
Plans of the next step are made while a step runs. ``--accumulate 8`` packs of each group are one step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent / "llama"))
from data import Batch, ahead, packed_batches  # noqa: E402
from model import Block, Llama, ModelConfig, rotary_tables  # noqa: E402
from weights import load_weights, read_config  # noqa: E402

from magi_attention.api import Mask, Plan, attend, kernel_tiles, plan_async, set_gradient_sum  # noqa: E402

CONFIGS = {
    "tiny": ModelConfig(width=64, num_layers=2, num_heads_q=4, num_heads_kv=2, head_dim=16, hidden=128),
    "1b": ModelConfig(width=2048, num_layers=16, num_heads_q=32, num_heads_kv=8, head_dim=64, hidden=8192),
    "llama3-8b": ModelConfig(4096, 32, 32, 8, 128, 14336, 128256, 5e5),
    "qwen3-8b": ModelConfig(4096, 36, 32, 8, 128, 12288, 151936, 1e6, 1e-6, has_qk_norm=True),
}


def config_of(args: argparse.Namespace) -> ModelConfig:
    return read_config(Path(args.weights)) if args.weights else CONFIGS[args.config]


class PlannedBlock(Block):
    """The plan is an argument, so a compiled block serves every plan."""

    def forward(self, x_TC: Tensor, cos: Tensor, sin: Tensor, plan: Plan, group: dist.ProcessGroup | None) -> Tensor:
        return super().forward(x_TC, cos, sin, lambda q, k, v: attend(q, k, v, plan, group)[0])


class SdpaBlock(Block):
    """torch's attention of each document; ``plan`` is a plan for one rank."""

    def forward(self, x_TC: Tensor, cos: Tensor, sin: Tensor, plan: Plan, group: None) -> Tensor:
        return super().forward(x_TC, cos, sin, lambda q, k, v: by_document(q, k, v, plan))


@torch.compiler.disable
def by_document(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, plan: Plan) -> Tensor:
    out = torch.zeros_like(q_THD)
    bounds = list(plan.cu_seqlens)
    for begin, end in zip(bounds, bounds[1:]):
        q, k, v = (x[begin:end].transpose(0, 1)[None] for x in (q_THD, k_THD, v_THD))
        out[begin:end] = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    return out


class PackedLlama(Llama):
    """Llama whose forward takes a plan; its weights are not set yet.

    ``recomputes``: activations of blocks are computed again in the backward.
    """

    def __init__(self, config: ModelConfig, block: type[Block], recomputes: bool) -> None:
        super().__init__(config, None)
        self.recomputes = recomputes
        for one in self.blocks:
            one.__class__ = block  # the same parameters with another forward

    def forward(self, tokens_T: Tensor, positions_T: Tensor, plan: Plan, group: dist.ProcessGroup | None) -> Tensor:
        """Logits (T, vocabulary)."""
        cos, sin = rotary_tables(positions_T, self.config.head_dim, self.config.rope_base)
        x_TC = self.embedding(tokens_T)
        cos, sin = cos.to(x_TC.dtype), sin.to(x_TC.dtype)
        for block in self.blocks:
            if self.recomputes:
                x_TC = checkpoint(block, x_TC, cos, sin, plan, group, use_reentrant=False)
            else:
                x_TC = block(x_TC, cos, sin, plan, group)
        return self.head(self.norm(x_TC))


@dataclass
class Place:
    """Where this rank stands: ``cp`` of its group, ``replica`` among the groups."""

    device: torch.device
    mesh: DeviceMesh
    cp_group: dist.ProcessGroup | None
    replica: int

    @classmethod
    def make(cls, device: str, cp: int) -> Place:
        world = dist.get_world_size()
        if cp < 1 or world % cp:
            raise SystemExit(f"--cp is {cp}; give a divisor of the {world} ranks.")
        mesh = init_device_mesh(device, (world // cp, cp), mesh_dim_names=("dp", "cp"))
        where = torch.device(device, int(os.environ.get("LOCAL_RANK", 0)) if device == "cuda" else None)
        return cls(where, mesh, mesh.get_group("cp"), mesh.get_local_rank("dp"))


class Trainer:
    """Model, optimizer and data of a rank."""

    def __init__(self, args: argparse.Namespace, place: Place) -> None:
        self.args, self.place = args, place
        block = SdpaBlock if args.attention == "sdpa" else PlannedBlock
        with torch.device("meta"):  # a rank has memory for its shards alone
            self.model = self.make_model(block)
        low = torch.bfloat16 if args.dtype == "bf16" else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
        everyone = place.mesh["dp", "cp"]._flatten("fsdp")
        for one in self.model.blocks:
            if args.compile:
                one.compile(fullgraph=args.attention == "magi")
            fully_shard(one, mesh=everyone, mp_policy=policy)
        fully_shard(self.model, mesh=everyone, mp_policy=policy)
        self.model.to_empty(device=place.device)
        if args.weights:
            load_weights(self.model, Path(args.weights))
        else:
            self.model.draw_weights(args.seed)
        set_gradient_sum(self.model)  # ranks hold other tokens of one batch
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95))
        shape = config_of(args)
        self.heads = {name: getattr(shape, name) for name in ("num_heads_q", "num_heads_kv", "head_dim")}
        is_planned_here = args.attention == "magi"
        self.kernels = kernel_tiles(place.device, low, group=place.cp_group, **self.heads) if is_planned_here else None
        self.read_from(0)

    def make_model(self, block: type[Block]) -> PackedLlama:
        return PackedLlama(config_of(self.args), block, self.args.recompute)

    def loss_sum(self, tokens: Tensor, positions: Tensor, labels: Tensor, plan: Plan) -> Tensor:
        logits = self.model(tokens, positions, plan, self.place.cp_group)
        return F.cross_entropy(logits.float(), labels, reduction="sum")

    def read_from(self, step: int) -> None:
        """Batches of the steps behind ``step``, each with its plan, which is made a step ahead."""
        args = self.args
        # Ranks of a group draw the same sequence, other groups another one.
        seed = args.seed + 1000 * self.place.replica
        batches = packed_batches(args.data, args.seq_len, seed, args.max_document, args.tokenizer)
        ready = ((batch, self.plan(batch)) for batch in islice(batches, step * args.accumulate, None))
        self.done, self.batches = step, ahead(ready, args.accumulate)

    def borders(self, batch: Batch) -> tuple[int, ...]:
        """Where its documents begin, and where the last one ends."""
        return batch.cu_seqlens

    def plan(self, batch: Batch) -> Future[Plan]:
        mask, place = Mask.varlen(self.borders(batch), causal=True), self.place
        rank = place.mesh.get_local_rank("cp")
        return plan_async(mask, self.args.cp, rank=rank, kernels=self.kernels, **self.heads)

    def loss(self, batch: Batch, plan: Future[Plan]) -> Tensor:
        """The sum over the labels of this rank."""
        place, made = self.place, plan.result()
        tokens = made.shard(batch.tokens.to(place.device), group=place.cp_group)
        labels = made.labels(tokens, group=place.cp_group)
        positions = made.positions(place.cp_group, place.device, per_document=True)
        return self.loss_sum(tokens, positions, labels, made)

    def step(self) -> Tensor:
        """The mean loss over all labels of the step, whichever rank, group and pack they are of."""
        packs = list(islice(self.batches, self.args.accumulate))
        # A token has a label if another one of its document follows. Ranks of a group count the same ones.
        count = torch.tensor(sum(len(b.tokens) + 1 - len(self.borders(b)) for b, _ in packs), device=self.place.device)
        dist.all_reduce(count)
        count //= self.args.cp
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.place.device)
        for number, (batch, plan) in enumerate(packs, 1):
            self.model.set_requires_gradient_sync(self.args.reduce_each_pack or number == len(packs))
            loss = self.loss(batch, plan) / count
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.done += 1
        dist.all_reduce(total)
        return total

    def save(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        checkpoints.save({"model": model, "optimizer": optimizer, "done": self.done}, checkpoint_id=folder)

    def resume(self, folder: Path) -> None:
        """Continues behind the step at which ``folder`` was written, with the batches of the steps to come."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "done": 0}
        checkpoints.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.read_from(state["done"])


def train(args: argparse.Namespace, trainer: Trainer) -> dict:
    """What is written as curve.json."""
    place, out, losses, seconds = trainer.place, Path(args.out), [], []
    tokens = args.seq_len * args.accumulate * (dist.get_world_size() // args.cp)
    if args.resume:
        trainer.resume(Path(args.resume))
    while trainer.done < args.steps:
        begin = time.perf_counter()
        losses.append(trainer.step().item())
        seconds.append(time.perf_counter() - begin)
        if dist.get_rank() == 0:
            print(f"step {trainer.done}/{args.steps}  loss {losses[-1]:.4f}  {tokens / seconds[-1]:,.0f} tokens/s")
        if args.save_every and trainer.done % args.save_every == 0:
            trainer.save(out / f"step-{trainer.done}")
    warm = sorted(seconds[len(seconds) // 2 :])
    memory = torch.cuda.max_memory_allocated() if place.device.type == "cuda" else None
    return {
        "losses": losses, "seconds": seconds, "tokens_per_second": tokens / warm[len(warm) // 2], "peak_bytes": memory,
        "parameters": sum(p.numel() for p in trainer.model.parameters()), "ranks": dist.get_world_size(),
        "torch": torch.__version__, "gpu": torch.cuda.get_device_name() if memory else None, "arguments": vars(args),
    }  # fmt: skip


def plot(files: list[str], out: Path) -> None:
    """Loss curves of several runs, and how far each is from the first, as loss_curves.png."""
    import matplotlib.pyplot as plt

    curves = [json.loads(Path(file).read_text()) for file in files]
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    for curve in curves:
        a, losses = curve["arguments"], curve["losses"]
        where = f"{a['attention']}, ranks: {curve['ranks']}, cp: {a['cp']}"
        name = f"{where}, {curve['tokens_per_second']:,.0f} tokens/s"
        above.plot(range(1, len(losses) + 1), losses, label=name)
        below.plot(range(1, len(losses) + 1), [x - y for x, y in zip(losses, curves[0]["losses"])])
    above.set_ylabel("loss")
    above.legend()
    below.set_ylabel("difference from the first")
    below.set_xlabel("step")
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "loss_curves.png", dpi=120)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"it is {number}; give 1 or more.")
    return number


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Options of training, which examples/long_context.py has, too."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", required=True, help="folder for curve.json and checkpoints")
    add("--config", choices=CONFIGS, default="tiny")
    add("--weights", help="folder of a Llama or Qwen3 of Hugging Face, in place of --config and random weights")
    add("--tokenizer", help="a tokenizer.json for the text; without it, bytes are tokens")
    add("--cp", type=int, help="ranks that share a sequence; all of them without it")
    add("--device", choices=("cpu", "cuda"), help="GPUs if there are any; the CPU for --config tiny alone")
    add("--dtype", choices=("bf16", "fp32"), default="bf16", help="of parameters in forward and backward")
    add("--data", help="text file or folder; the standard library's sources without it")
    add("--steps", type=positive, default=20)
    add("--seq-len", type=positive, default=8192)
    add("--accumulate", type=positive, default=1, help="packs of each group for a step of the optimizer")
    add("--reduce-each-pack", action="store_true", help="so that gradients stay sharded; else once a step")
    add("--max-document", type=positive, default=4096, help="bytes; longer ones are cut")
    add("--learning-rate", type=float, default=3e-4)
    add("--seed", type=int, default=0)
    add("--compile", action="store_true", help="compile each block")
    add("--save-every", type=int, default=0, help="steps between checkpoints; none without it")
    add("--resume", help="folder of a checkpoint")
    return parser


def arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--attention", choices=("magi", "sdpa"), default="magi")
    add("--recompute", action="store_true", help="compute activations again in the backward")
    add("--plot", nargs="+", metavar="CURVE", help="only draw these curves")
    args = parser.parse_args()
    if not args.plot:
        args.device = choose_device(args)
    return args


def choose_device(args: argparse.Namespace) -> str:
    """As asked for, else what is here; a sentence before anything is made where that cannot be meant."""
    has_gpu = torch.cuda.is_available()
    if args.device == "cuda" and not has_gpu:
        raise SystemExit("--device cuda, but torch sees no GPU; `magi doctor` says why. --device cpu takes none.")
    if args.device is None and args.config != "tiny" and not args.weights and not has_gpu:
        size = "some 15" if args.config == "1b" else "more than 130"
        raise SystemExit(
            f"There is no GPU, and --config {args.config} takes {size} GB of memory on the CPU and minutes a step. "
            "Give --config tiny, or --device cpu if you mean it."
        )
    return args.device or ("cuda" if has_gpu else "cpu")


def run(args: argparse.Namespace, trainer_of: type[Trainer]) -> None:
    """Trains in a process group of its own, and writes curve.json."""
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    os.environ.setdefault("RANK", "0")  # without torchrun, one process
    for name, value in (("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29501")):
        os.environ.setdefault(name, value)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    try:
        args.cp = dist.get_world_size() if args.cp is None else args.cp
        if args.attention == "sdpa" and args.cp != 1:
            raise SystemExit("--attention sdpa does not share a sequence; give --cp 1.")
        result = train(args, trainer_of(args, Place.make(args.device, args.cp)))
        if dist.get_rank() == 0:
            Path(args.out).mkdir(parents=True, exist_ok=True)
            (Path(args.out) / "curve.json").write_text(json.dumps(result, indent=1) + "\n")
        gc.collect()  # nothing may keep a group alive beyond its end
        dist.barrier()
    finally:
        with suppress(ValueError):
            dist.destroy_process_group()


def main() -> None:
    args = arguments()
    if args.plot:
        plot(args.plot, Path(args.out))
    else:
        run(args, Trainer)


if __name__ == "__main__":
    main()
