# SPDX-License-Identifier: Apache-2.0
"""Ten steps of ``ContextParallelTrainer`` on GPUs, in half precision over float32 weights; started by torchrun or by
``accelerate launch``, whose config then says how many ranks share a sequence.

torchrun --nproc-per-node 2 tests/integrations/train_on_gpus.py OUT.json '{"bf16": true}'
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments

from magi_attention.integrations.transformers import ContextParallelTrainer, register


class WatchedTrainer(ContextParallelTrainer):
    """Keeps the plans, to look afterwards which kernels ran."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.plans: list = []

    def training_step(self, model, inputs, *args, **kwargs):
        self.plans.append(inputs["magi_plans"].full)
        return super().training_step(model, inputs, *args, **kwargs)

    def backends(self) -> list[str]:
        prepared = [x for plan in self.plans for runtime in plan._runtimes.values() for x in runtime._prepared.values()]
        return sorted({x.backend.name for x in prepared})


def make_documents() -> list[dict]:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(50, 700, (40,), generator=draw).tolist()
    return [{"input_ids": ((7 * torch.arange(n) + n) % 250).tolist()} for n in lengths]


def main(out: str, options: dict) -> None:
    register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="magi", dtype=torch.float32)
    arguments = TrainingArguments(
        tempfile.mkdtemp(), max_steps=10, logging_steps=1, per_device_train_batch_size=4, report_to=[],
        save_strategy="no", disable_tqdm=True, learning_rate=1e-3, **options,
    )  # fmt: skip
    trainer = WatchedTrainer(model, arguments, train_dataset=make_documents())
    trainer.train()
    losses = [x["loss"] for x in trainer.state.log_history if "loss" in x]
    found = {"losses": losses, "backends": trainer.backends(), "cp_size": trainer.cp_size}
    found["kind"] = str(trainer.accelerator.distributed_type)
    if int(os.environ.get("RANK", 0)) == 0:
        Path(out).write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
