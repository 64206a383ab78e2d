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

# torchtitan takes the device that torch names and asks it about memory; on a machine without GPUs torch names none.
torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda device=None: "CPU"
torch.cpu.get_device_properties = lambda device=None: type("CPU", (), {"total_memory": 2**34})
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None
torch.cpu.memory_stats = lambda device=None: {}
torch.cpu.current_device = lambda: 0

import torch.distributed as dist  # noqa: E402

if not hasattr(dist, "set_timeout"):  # torch 2.13
    dist.set_timeout = lambda timeout, group: None

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.tensor import DTensor, distribute_tensor  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import CompileConfig  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.distributed.full_dtensor import parallelize_inputs  # noqa: E402
from torchtitan.distributed.utils import dist_sum  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402
from train_tiny import leave  # noqa: E402

from magi_attention.integrations.torchtitan import use_magi  # noqa: E402

LENGTH, ROWS, STEPS = 96, 2, 5
POLICIES = {"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}


class Documents(BaseDataLoader):
    """Rows of packed documents of any length, the same in every run. Rows go to data-parallel ranks in turn."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        infinite: bool = True

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any):
        self.ranks, self.rank, self.length, self.rows = dp_world_size, dp_rank, seq_len, local_batch_size

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        while True:
            rows = [self.row(generator) for _ in range(self.rows * self.ranks)][self.rank :: self.ranks]
            tokens, positions, labels = (torch.stack(x) for x in zip(*rows))
            yield {"input": tokens, "positions": positions}, labels

    def row(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """The first document may have begun in the row before."""
        starts = torch.randint(0, self.length, (4,), generator=generator)
        first = int(torch.randint(0, 2, (), generator=generator)) * 5
        at = torch.arange(self.length)
        begin = torch.stack([torch.where(at >= s, s, -first) for s in starts]).amax(0)
        tokens = torch.randint(0, 2048, (self.length + 1,), generator=generator)
        labels = tokens[1:].clone()
        labels[starts - 1] = -100
        return tokens[:-1], at - begin, labels

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 2048


class Metrics(MetricsProcessor):
    """Keeps the losses of the validator."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.validated: list[float] = []

    def log_validation(self, loss: float, step: int, extra_metrics: Any = None) -> None:
        self.validated.append(loss)


class DenseAttention(Module):
    """Attention of one process by a dense mask: what ours is compared with."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        window_size: tuple[int, int] = (-1, 0)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.left = config.window_size[0]

    def forward(
        self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks, scale=None, enable_gqa=False, out_transform=None
    ) -> torch.Tensor:
        groups = q_BLNH.shape[2] // k_BLNH.shape[2]
        k, v = (x.repeat_interleave(groups, 2) for x in (k_BLNH, v_BLNH))
        at = torch.arange(q_BLNH.shape[1])
        begin = at - attention_masks  # of the document of each token
        seen = (begin[:, :, None] == begin[:, None]) & (at[:, None] >= at)
        if self.left >= 0:
            seen &= at[:, None] - at <= self.left
        scores = torch.einsum("blnh,bknh->bnlk", q_BLNH, k) * (scale or q_BLNH.shape[-1] ** -0.5)
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        out = torch.einsum("bnlk,bknh->blnh", scores.softmax(-1), v)
        return out if out_transform is None else out_transform(out, scores.logsumexp(-1).transpose(1, 2))


class DenseTrainer(Trainer):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def post_dataloading_process(self, input_dict, labels):
        positions = input_dict["positions"]
        batch = input_dict["input"], labels, {"positions": positions}
        if self.parallel_dims.spmd_backend == "full_dtensor":
            batch = parallelize_inputs(self.parallel_dims, *batch)
        batch[2]["attention_masks"] = positions
        return batch


def make_config(settings: dict) -> Trainer.Config:
    name = settings.get("model", "llama3")
    registry = importlib.import_module(f"torchtitan.models.{name}")
    configs = importlib.import_module(f"torchtitan.models.{name}.config_registry")
    config = getattr(configs, f"{name}_debugmodel")()
    config.model_spec = registry.model_registry("debugmodel", attn_backend=settings.get("attention", "flex"))
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.training = dataclasses.replace(
        config.training, local_batch_size=ROWS // settings.get("dp", 1), seq_len=LENGTH, steps=STEPS, max_norm=1e9,
        mixed_precision_param=settings.get("dtype", "float32"), disable_cuda_graphs=True,
    )  # fmt: skip
    config.parallelism = dataclasses.replace(
        config.parallelism, context_parallel_degree=settings.get("cp", 1), data_parallel_shard_degree=settings.get("dp", 1),
        tensor_parallel_degree=settings.get("tp", 1), pipeline_parallel_schedule="1F1B",
        pipeline_parallel_degree=settings.get("pp", 1), spmd_backend=settings.get("backend", "spmd_types"),
    )  # fmt: skip
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
    for layer in config.model_spec.model.layers:
        window = getattr(layer.attention.inner_attention, "window_size", (-1, 0))
        layer.attention.inner_attention = DenseAttention.Config(window_size=window)
    return DenseTrainer.Config(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config)})


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
    than what is asserted here, and its loss is multiplied by the ranks where torch 2.13 sums it before."""
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
    trainer = make_config(settings).build()
    for part in trainer.model_parts:
        fill(part)
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # the same sum by an operation that gloo has
    steps = watch(trainer)
    trainer.train()
    result = {"log": steps, "eval": trainer.metrics_processor.validated, "processes": dist.get_world_size()}
    if int(os.environ["RANK"]) == 0:
        Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
    leave()
