# SPDX-License-Identifier: Apache-2.0
"""torchtitan's Trainer on its own debug models with our attention, over gloo; started as ``train_tiny.py``.

It gives the loss and the norm of the gradients of each step, which one process gives too.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "frameworks"))
from torchtitan_on_cpu import IS_NEW, know_cpus  # noqa: E402

know_cpus()  # before torchtitan is imported

import torch.distributed as dist  # noqa: E402
from titan_parts import VOCABULARY, DenseAttention, DenseTrainer, Documents, Metrics, NoTokenizer  # noqa: E402
from titan_qwen import install_stand_ins, make_small  # noqa: E402
from torch.distributed.tensor import DTensor, distribute_tensor  # noqa: E402
from torchtitan.config import CompileConfig  # noqa: E402
from torchtitan.config.override import derive  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.distributed.utils import dist_sum  # noqa: E402
from torchtitan.models.common.attention import VarlenAttention  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402
from train_tiny import leave  # noqa: E402

from magi_attention.integrations.torchtitan import MagiTrainer, use_magi  # noqa: E402

LENGTH, ROWS, STEPS = 96, 2, 4
WINDOWS = [(15, 0), (-1, 0)]
POLICIES = {"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}


def config_of_model(settings: dict) -> Trainer.Config:
    """That of torchtitan for its debug model, with two layers."""
    name = settings.get("model", "llama3")
    registry = importlib.import_module(f"torchtitan.models.{name}")
    base = "llama3" if name == "qwen3_5" else name  # whose own reads images from the net
    config = getattr(importlib.import_module(f"torchtitan.models.{base}.config_registry"), f"{base}_debugmodel")()
    config.model_spec = registry.model_registry("debugmodel", attn_backend="varlen")
    if name == "qwen3_5":
        make_small(config.model_spec.model, VOCABULARY)
        return config
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    for layer, window in zip(config.model_spec.model.layers, WINDOWS):
        layer.attention.inner_attention = VarlenAttention.Config(window_size=window)
    return config


def backend_of(settings: dict) -> str:
    if settings.get("model") == "qwen3_5":
        return "partial_dtensor"
    return "spmd_types" if IS_NEW else "full_dtensor"


def make_config(settings: dict) -> Trainer.Config:
    config = config_of_model(settings)
    config.training = dataclasses.replace(
        config.training, local_batch_size=ROWS // settings.get("dp", 1), seq_len=LENGTH, steps=STEPS, max_norm=1e9,
        mixed_precision_param="float32", disable_cuda_graphs=True,
    )  # fmt: skip
    config.parallelism = dataclasses.replace(
        config.parallelism, spmd_backend=backend_of(settings),
        data_parallel_shard_degree=settings.get("dp", 1), tensor_parallel_degree=settings.get("tp", 1),
        context_parallel_degree=settings.get("cp", 1),
    )  # fmt: skip
    config.optimizer.param_groups[0].optimizer_kwargs["eps"] = 1e-3  # or rounding decides steps of small gradients
    config.dataloader, config.tokenizer = Documents.Config(), NoTokenizer.Config()
    config.metrics, config.dump_folder = Metrics.Config(log_freq=1), tempfile.mkdtemp()
    config.checkpoint.enable = False
    config.activation_checkpoint = POLICIES[settings.get("checkpointing", "none")]
    config.compile = CompileConfig(enable=settings.get("compile", False), components=["model"], backend="aot_eager")
    config.validator = dataclasses.replace(
        config.validator, enable=settings.get("evaluate", False), freq=STEPS, steps=2, dataloader=Documents.Config()
    )
    config.debug.spmd_typechecking = settings.get("typechecking", False)
    if not settings.get("dense"):
        return use_magi(config)
    for layer in filter(lambda layer: layer.attention is not None, config.model_spec.model.layers):
        layer.attention.inner_attention = derive(layer.attention.inner_attention, DenseAttention.Config)
    return derive(config, DenseTrainer.Config)


def fill(model: torch.nn.Module) -> None:
    """Weights that depend on their names only, whatever share of them a rank has."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            name = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
            whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
            whole = 0.05 * whole + float("norm" in name)
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(whole)


def watch(trainer: Trainer) -> list[dict[str, float]]:
    """Will have the loss and the gradient norm of each step, exactly: torchtitan's own norm, in float32, is off by more
    than what is asserted here, and its loss is multiplied by the ranks where torch 2.13 has summed it before."""
    steps: list[dict[str, float]] = []
    run, loss_mesh = trainer.fwd_bwd_fn, trainer.parallel_dims.get_optional_mesh("loss")

    def keep_loss(*args: Any) -> torch.Tensor:
        loss = run(*args)
        part = loss.detach()
        whole = part.full_tensor() if isinstance(part, DTensor) else dist_sum(part, loss_mesh)
        steps.append({"loss": float(whole)})
        return loss

    def keep_norm(*_: Any) -> None:
        grads = [p.grad for part in trainer.model_parts for p in part.parameters() if p.grad is not None]
        whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
        steps[-1]["grad_norm"] = float(sum(g.double().square().sum() for g in whole)) ** 0.5

    trainer.fwd_bwd_fn = keep_loss
    trainer.optimizers.register_step_pre_hook(keep_norm)
    return steps


def main(out: str, settings: dict) -> None:
    torch.set_num_threads(1)
    install_stand_ins()
    trainer = make_config(settings).build()
    for part in trainer.model_parts:
        fill(part)
    steps = watch(trainer)
    trainer.train()
    result = {"log": steps, "processes": dist.get_world_size(), "eval": trainer.metrics_processor.validated}
    result |= {"cp": trainer.parallel_dims.cp, "ours": isinstance(trainer, MagiTrainer), "tokens": trainer.ntokens_seen}
    if int(os.environ["RANK"]) == 0:
        Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
    leave()
