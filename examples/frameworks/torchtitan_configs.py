# SPDX-License-Identifier: Apache-2.0
"""Configs of torchtitan 0.3.0 with our attention. The debug model needs no file that torchtitan's wheel does not have.

Run in this folder. 8 GPUs, 4 of them share a sequence, so there are 2 replicas:

    torchrun --nproc-per-node 8 -m torchtitan.train --module torchtitan_configs --config llama3_debugmodel_magi \\
        --parallelism.context_parallel_degree 4

2 processes on CPUs, which torchtitan itself does not know:

    torchrun --nproc-per-node 2 torchtitan_on_cpu.py --module torchtitan_configs --config llama3_debugmodel_magi \\
        --parallelism.context_parallel_degree 2
"""

import tempfile
from dataclasses import replace
from pydoc_data.topics import topics

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.llama3 import config_registry

from magi_attention.integrations.torchtitan import use_magi


def llama3_8b_magi():
    return use_magi(config_registry.llama3_8b())


def llama3_debugmodel_magi():
    config = config_registry.llama3_debugmodel()
    config.hf_assets_path = byte_tokenizer()
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="python_help")
    config.training = replace(config.training, local_batch_size=2, seq_len=256)
    return use_magi(config)


def byte_tokenizer():
    """A folder with a tokenizer.json that knows bytes. Each rank makes its own, so none reads a file half written."""
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    folder = tempfile.mkdtemp()
    tokenizer.save(f"{folder}/tokenizer.json")
    return folder


DATASETS["python_help"] = DatasetConfig(  # paragraphs of Python's help are documents of 3 to 2,000 bytes
    path="pydoc_data.topics",
    loader=lambda path: Dataset.from_dict({"text": "\n\n".join(topics.values()).split("\n\n")}),
    sample_processor=lambda sample: sample["text"],
)
