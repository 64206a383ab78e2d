# SPDX-License-Identifier: Apache-2.0
"""A training loop of one's own with a model of transformers, on documents that processes share.

    torchrun --nproc-per-node 2 examples/frameworks/hf_loop.py

8 GPUs, as 2 groups of 4 that share sequences:

    torchrun --nproc-per-node 8 examples/frameworks/hf_loop.py --cp-size 4
"""

import argparse
import os

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from magi_attention.api import AttentionCheck, sum_gradients
from magi_attention.integrations.packing import PackingCollator
from magi_attention.integrations.transformers import register, windows_of

parser = argparse.ArgumentParser()
parser.add_argument("--cp-size", type=int, default=0)  # by default all processes share each sequence
args = parser.parse_args()
is_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_gpu else torch.device("cpu")
if is_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if is_gpu else "gloo")
rank, cp_size = dist.get_rank(), args.cp_size or dist.get_world_size()
replica, replicas = rank // cp_size, dist.get_world_size() // cp_size
cp_group, _ = dist.new_subgroups(cp_size)
register()
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, attn_implementation="magi", dtype=torch.float32).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
collator = PackingCollator(cp_size, rank % cp_size, windows_of(config))
check = AttentionCheck(model)
documents = [{"input_ids": ((7 * torch.arange(5 + n) + n) % 64).tolist()} for n in range(64)]
for step in range(8):
    mine = documents[8 * step : 8 * step + 8][replica::replicas]  # the same examples on all ranks of a group
    batch = collator(mine)
    plans = batch.pop("magi_plans").in_group(cp_group)
    batch = {name: x.to(device) for name, x in batch.items()}
    labels = (batch["labels"] != -100).sum()
    dist.all_reduce(labels)
    with check(*plans.all()), torch.autocast(device.type, torch.bfloat16, enabled=is_gpu):
        loss = model(**batch, magi_plans=plans, num_items_in_batch=labels, use_cache=False).loss
    loss.backward()
    sum_gradients(model, dist.group.WORLD)  # over all ranks: each divided by the labels of all
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if rank == 0:
        print(f"step {step + 1}  loss {total.item():.7f}")
dist.destroy_process_group()
