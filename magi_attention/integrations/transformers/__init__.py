# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers: attention of packed documents over several ranks, and a Trainer for it.

    from magi_attention.integrations.transformers import ContextParallelTrainer, register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="magi")
    ContextParallelTrainer(model, TrainingArguments(...), train_dataset=tokenized, cp_size=4).train()

``class MyTrainer(ContextParallelMixin, SFTTrainer)`` does the same for a subclass of Trainer, such as TRL's. A loop of
one's own works with ``PackingCollator`` and ``model(**batch)``.
"""

from magi_attention.integrations.shared.layer_kinds import chunks_of, windows_of
from magi_attention.integrations.transformers.interface import NAME, attention, full_sequences, register
from magi_attention.integrations.transformers.recurrent import use_recurrent_layers
from magi_attention.integrations.transformers.trainer import ContextParallelMixin, ContextParallelTrainer

__all__ = [
    "NAME",
    "ContextParallelMixin",
    "ContextParallelTrainer",
    "attention",
    "chunks_of",
    "full_sequences",
    "register",
    "use_recurrent_layers",
    "windows_of",
]
