# SPDX-License-Identifier: Apache-2.0
"""Parts that torchtitan is configured with in tests: documents, dense attention, and no tokenizer."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from titan_qwen import masks_of
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.distributed.full_dtensor import parallelize_inputs
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer

VOCABULARY = 2048  # of torchtitan's debug models


class Documents(BaseDataLoader):
    """Rows of packed documents of any length, the same in every run. Rows go to data-parallel ranks in turn."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        infinite: bool = True

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        self.ranks, self.rank, self.length, self.rows = dp_world_size, dp_rank, seq_len, local_batch_size

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        while True:
            rows = [self.row(generator) for _ in range(self.rows * self.ranks)][self.rank :: self.ranks]
            tokens, positions, labels = (torch.stack(x) for x in zip(*rows))
            yield {"input": tokens, "positions": positions}, labels

    def row(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The first document may have begun in the row before."""
        starts = torch.randint(1, self.length, (3,), generator=generator)
        before = int(torch.randint(0, 2, (), generator=generator)) * 5
        at = torch.arange(self.length)
        begin = torch.stack([torch.where(at >= start, start, -before) for start in starts]).amax(0)
        tokens = torch.randint(0, VOCABULARY, (self.length + 1,), generator=generator)
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
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


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
    """Attention of one process by a dense mask: what ours is compared with. ``attention_masks`` are positions."""

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
        if self.model_config.layers[0].attention is None:
            batch[2].update(attention_masks=masks_of(positions), special_tokens={"image_id": -1, "video_id": -1})
        return batch
