# SPDX-License-Identifier: Apache-2.0
"""TRL's SFTTrainer with packing=True over ranks; started as ``train_tiny.py``."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from tiny_models import VOCABULARY, make_documents, make_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from train_tiny import leave
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from magi_attention.integrations.transformers import ContextParallelMixin, register


class PackedSFTTrainer(ContextParallelMixin, SFTTrainer):
    pass


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2")


def main(out: str, settings: dict) -> None:
    register()
    torch.set_num_threads(1)
    texts = [{"text": " ".join(f"w{t}" for t in x["input_ids"])} for x in make_documents(120)]
    arguments = SFTConfig(
        tempfile.mkdtemp(), use_cpu=True, bf16=False, packing=True, max_length=128, per_device_train_batch_size=2,
        logging_steps=1, report_to=[], learning_rate=3e-3, save_strategy="no", disable_tqdm=True, dataset_num_proc=None,
        **settings["arguments"],
    )  # fmt: skip
    trainer = PackedSFTTrainer(
        make_model(settings["model"], "magi"), arguments, train_dataset=Dataset.from_list(texts),
        processing_class=make_tokenizer(),
    )  # fmt: skip
    trainer.train()
    longest = max(map(len, trainer.train_dataset["seq_lengths"]))
    result = {"log": trainer.state.log_history, "processes": arguments.world_size, "documents": longest}
    if int(os.environ.get("RANK", 0)) == 0:
        Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
    leave()
