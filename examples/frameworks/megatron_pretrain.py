# SPDX-License-Identifier: Apache-2.0
"""Pretrains a small GPT of Megatron-Core on packed documents, over context- and data-parallel ranks.

Each rank holds two chunks of every document, as Megatron shares them out, and `use_magi` puts this package's attention
into the layers. This line starts two processes on CPUs, which share each sequence:

    torchrun --nproc-per-node 2 examples/frameworks/megatron_pretrain.py

This one starts 8 GPUs, as 2 replicas of 4 ranks that share a sequence:

    torchrun --nproc-per-node 8 examples/frameworks/megatron_pretrain.py --cp-size 4 --tokens 16384 --longest 4096

It needs megatron-core, whose wheel asks for Python 3.12. Losses are the same for any number of ranks, up to rounding.
On GPUs the model is in bfloat16, and the optimizer keeps its parameters in float32.
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from magi_attention.api import AttentionCheck
from magi_attention.integrations.megatron import use_magi

VOCABULARY = 128


def make_documents(args: argparse.Namespace, seed: int) -> list[Tensor]:
    """Documents of ``args.tokens`` tokens together. Each counts from a random token in steps of its own, so the next
    token can be learned from the last two."""
    draw = torch.Generator().manual_seed(seed)
    documents, left = [], args.tokens
    while left:
        length = min(left, int(torch.randint(2, args.longest + 1, (), generator=draw)))
        first, step = torch.randint(1, VOCABULARY, (2,), generator=draw)
        documents.append((first + step % 4 * torch.arange(length)) % VOCABULARY)
        left -= length
    return documents


def pack(documents: list[Tensor], cp_size: int, cp_rank: int, device: torch.device) -> tuple[dict, Tensor]:
    """This rank's inputs of the model, and which of its tokens have a next one, (1, tokens)."""
    unit = 2 * cp_size  # each document is cut into as many chunks, of which a rank has the r-th and the r-th last
    rows, real, padded = [], [0], [0]
    for document in documents:
        length = -(-len(document) // unit) * unit
        position = torch.arange(length).clamp(max=len(document) - 1)
        has_next = position < len(document) - 1
        tokens = torch.cat([document, document.new_zeros(length + 1 - len(document))])
        columns = torch.stack([tokens[:-1], tokens[1:], position, has_next])
        chunks = columns.chunk(unit, 1)
        rows += [chunks[cp_rank], chunks[unit - 1 - cp_rank]]
        real.append(real[-1] + len(document))
        padded.append(padded[-1] + length)
    tokens, labels, position_ids, has_next = torch.cat(rows, 1)[:, None].to(device)
    cu, cu_padded = (torch.tensor(x, dtype=torch.int32, device=device) for x in (real, padded))
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, cu_seqlens_q_padded=cu_padded,
        cu_seqlens_kv_padded=cu_padded,
    )  # fmt: skip
    inputs = {"input_ids": tokens, "position_ids": position_ids, "labels": labels, "packed_seq_params": packed}
    return {**inputs, "attention_mask": None}, has_next


def make_model(args: argparse.Namespace, device: torch.device) -> GPTModel:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = TransformerConfig(
        num_layers=args.layers, hidden_size=args.width, num_attention_heads=args.width // 64,
        num_query_groups=args.width // 128, attention_dropout=0.0, hidden_dropout=0.0, use_cpu_initialization=True,
        context_parallel_size=parallel_state.get_context_parallel_world_size(), params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
    )  # fmt: skip
    spec = use_magi(get_gpt_layer_local_spec())
    model = GPTModel(config, spec, VOCABULARY, args.longest, position_embedding_type="learned_absolute")
    return model.to(device, dtype)  # norms and positions, too, as Megatron's Float16Module does


def sum_gradients(model: GPTModel, masters: list[Tensor], tokens: Tensor) -> None:
    """Gradients of the mean loss over the tokens of all ranks, in float32. Megatron's DistributedDataParallel sums over
    the same group, and needs GPUs."""
    flat = torch.cat([p.grad.float().flatten() for p in model.parameters()])
    dist.all_reduce(flat, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    for master, gradient in zip(masters, (flat / tokens).split([x.numel() for x in masters])):
        master.grad = gradient.view_as(master)


def train(args: argparse.Namespace, device: torch.device) -> None:
    world, cp_size = dist.get_world_size(), args.cp_size or dist.get_world_size()
    if world % cp_size:
        raise SystemExit(f"--cp-size is {cp_size}; give a divisor of the {world} ranks.")
    if args.sequences % (replicas := world // cp_size):
        raise SystemExit(f"--sequences is {args.sequences}; give a multiple of the {replicas} replicas.")
    parallel_state.initialize_model_parallel(context_parallel_size=cp_size)
    cp_rank, replica = parallel_state.get_context_parallel_rank(), parallel_state.get_data_parallel_rank()
    model = make_model(args, device)
    check = AttentionCheck(model)
    masters = [p.detach().float().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=args.learning_rate)
    for step in range(args.steps):
        total = torch.zeros(2, device=device)  # loss and tokens
        for i in range(replica, args.sequences, replicas):
            inputs, has_next = pack(make_documents(args, step * args.sequences + i), cp_size, cp_rank, device)
            with check():  # all attention went by a plan
                loss = (model(**inputs).float() * has_next).sum()
            loss.backward()
            total += torch.stack([loss.detach(), has_next.sum()])
        dist.all_reduce(total)
        sum_gradients(model, masters, total[1])
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters):
                parameter.copy_(master)
        model.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1}  loss {(total[0] / total[1]).item():.7f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"cp-size": 0, "sequences": 2, "tokens": 256, "longest": 64, "steps": 8, "width": 128, "layers": 2}
    for name, default in {**numbers, "learning-rate": 3e-3}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args, is_gpu = parser.parse_args(), torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_gpu else "gloo")
    train(args, device)
    gc.collect()  # nothing may keep a group alive beyond its end
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
