# SPDX-License-Identifier: Apache-2.0
"""Trains tiny models by ``ContextParallelTrainer``, one after another, and writes what they logged; to be started by
torchrun or accelerate.

torchrun --nproc-per-node 2 tests/integrations/train_tiny.py OUT.json '[{"model": "llama", "arguments": {...}}]'
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_models import make_documents, make_model
from transformers import TrainingArguments, set_seed

from magi_attention.integrations.transformers import ContextParallelTrainer, register


def train(settings: dict) -> dict:
    set_seed(0)
    model = make_model(settings["model"], "magi")
    folder = settings.get("folder") or tempfile.mkdtemp()
    given = {"save_strategy": "no", "logging_steps": 1, **settings.get("arguments", {})}
    arguments = TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=4, per_device_eval_batch_size=4,
        report_to=[], learning_rate=3e-3, disable_tqdm=True, **given,
    )  # fmt: skip
    trainer = ContextParallelTrainer(
        model, arguments, train_dataset=make_documents(64), eval_dataset=make_documents(8, seed=1),
        cp_size=settings.get("cp_size"),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=settings.get("resume"))
    result = {"log": trainer.state.log_history}
    if settings.get("evaluate"):
        result["eval"] = trainer.evaluate()
        result["predicted"] = trainer.predict(make_documents(4, seed=2)).predictions.tolist()
    torch.compiler.reset()
    return result


def main(out: str, cases: list[dict]) -> None:
    register()
    torch.set_num_threads(1)
    result = {"cases": [train(settings) for settings in cases], "processes": int(os.environ.get("WORLD_SIZE", 1))}
    if int(os.environ.get("RANK", 0)) == 0:
        Path(out).write_text(json.dumps(result))


def leave() -> None:
    """Ends the process without the destructors of libraries: with or without us, a Trainer over gloo aborts in them in
    one run out of four."""
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
    leave()
