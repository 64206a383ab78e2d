# SPDX-License-Identifier: Apache-2.0
"""Trains a small Qwen3-Next, three layers of gated delta rule and one of attention, on documents that processes share.

    torchrun --nproc-per-node 2 examples/frameworks/hf_hybrid.py

8 GPUs, as 2 groups of 4 that share sequences:

    torchrun --nproc-per-node 8 examples/frameworks/hf_hybrid.py --cp-size 4 --hidden 1024 --longest 8192
"""

import argparse
import tempfile

import torch
from transformers import AutoModelForCausalLM, Qwen3NextConfig, TrainingArguments

from magi_attention.integrations.transformers import ContextParallelTrainer, register

parser = argparse.ArgumentParser()
parser.add_argument("--cp-size", type=int)  # by default all processes share each sequence
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--longest", type=int, default=60)
args = parser.parse_args()


def make_documents(count, seed):
    """Each token follows from the one before, so the model has something to learn."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, args.longest, (count,), generator=draw).tolist()
    return [{"input_ids": ((7 * torch.arange(n) + n) % 64).tolist()} for n in lengths]


register()  # attn_implementation="magi", also of from_pretrained
heads = args.hidden // 16
config = Qwen3NextConfig(
    vocab_size=64, hidden_size=args.hidden, intermediate_size=2 * args.hidden, num_hidden_layers=4,
    num_attention_heads=heads, num_key_value_heads=2, head_dim=16, linear_num_value_heads=heads,
    linear_num_key_heads=heads // 2, linear_key_head_dim=16, linear_value_head_dim=16, num_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=args.hidden, shared_expert_intermediate_size=args.hidden,
)  # fmt: skip
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, attn_implementation="magi", dtype=torch.float32)
trainer = ContextParallelTrainer(
    model,
    TrainingArguments(
        tempfile.mkdtemp(), max_steps=8, per_device_train_batch_size=4, learning_rate=3e-3, logging_steps=1,
        use_cpu=not torch.cuda.is_available(), bf16=torch.cuda.is_available(), report_to=[], save_strategy="no",
        disable_tqdm=True,
    ),  # fmt: skip
    train_dataset=make_documents(64, seed=0),
    cp_size=args.cp_size,
)
trainer.train()
if trainer.is_world_process_zero():
    for entry in trainer.state.log_history:
        if "grad_norm" in entry:
            print(f"step {entry['step']}  loss {float(entry['loss']):.7f}")
