# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning with TRL, packed, over processes that share each packed sequence; TRL itself refuses that.

    torchrun --nproc-per-node 2 examples/frameworks/trl_sft.py

8 GPUs, as 2 groups of 4 that share sequences:

    torchrun --nproc-per-node 8 examples/frameworks/trl_sft.py --cp-size 4 --max-length 32768
"""

import argparse
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from magi_attention.integrations.transformers import ContextParallelMixin, register

parser = argparse.ArgumentParser()
parser.add_argument("--cp-size", type=int)  # by default all processes share each sequence
parser.add_argument("--max-length", type=int, default=128)
args = parser.parse_args()


class PackedSFTTrainer(ContextParallelMixin, SFTTrainer):
    pass


register()
words = Tokenizer(WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
words.pre_tokenizer = Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2")
texts = [" ".join(f"w{(7 * i + n) % 64}" for i in range(5 + n % 50)) for n in range(200)]
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
torch.manual_seed(0)
trainer = PackedSFTTrainer(
    AutoModelForCausalLM.from_config(config, attn_implementation="magi", dtype=torch.float32),
    SFTConfig(
        tempfile.mkdtemp(), packing=True, max_length=args.max_length, max_steps=8, per_device_train_batch_size=2,
        learning_rate=3e-3, logging_steps=1, use_cpu=not torch.cuda.is_available(), bf16=torch.cuda.is_available(),
        report_to=[], save_strategy="no", disable_tqdm=True,
    ),  # fmt: skip
    train_dataset=Dataset.from_dict({"text": texts}),
    processing_class=tokenizer,
    cp_size=args.cp_size,
)
trainer.train()
if trainer.is_world_process_zero():
    for entry in trainer.state.log_history:
        if "grad_norm" in entry:
            print(f"step {entry['step']}  loss {float(entry['loss']):.7f}")
