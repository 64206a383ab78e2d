# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers: attention of packed documents over several ranks, and a Trainer for it.

    from magi_attention.integrations.transformers import ContextParallelTrainer, register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="magi")
    ContextParallelTrainer(model, TrainingArguments(...), train_dataset=tokenized, cp_size=4).train()

``class MyTrainer(ContextParallelMixin, SFTTrainer)`` does the same for a subclass of Trainer, such as TRL's. A loop of
one's own works with ``PackingCollator`` and ``model(**batch)``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from transformers import AttentionInterface, AttentionMaskInterface, Trainer
from transformers.trainer_utils import seed_worker

from magi_attention.api import attend
from magi_attention.comm.transport.base import SingleTransport
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.integrations.packing import LayerPlans, PackingCollator
from magi_attention.integrations.validate import of_layers

NAME = "magi"
_CHUNKED = "chunked_attention"


def register(name: str = NAME) -> None:
    """Makes ``attn_implementation=name`` known to transformers."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _no_mask)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    magi_plans: LayerPlans | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """What a layer of transformers calls: query (1, Hq, T, D), key and value (1, Hk, T, D); out (1, T, Hq, D).

    ``magi_plans`` comes with the batch, as an argument of the model. ``s_aux`` (Hq,) are sinks.

    Raises:
        ContractError: there are no plans, or more than one sequence.
        UnsupportedError: dropout, chunks, or a layer that is not causal.
    """
    if magi_plans is None:
        raise ContractError(
            "Attention 'magi' got no plans; call the model with a batch of PackingCollator. To generate, switch by "
            "model.set_attn_implementation('sdpa')."
        )
    if query.shape[0] != 1:
        raise ContractError(f"A batch has {query.shape[0]} rows; PackingCollator packs all of them into one.")
    if attention_mask is not None:
        raise ContractError("Attention 'magi' takes its mask from the plans; leave attention_mask out of the batch.")
    if dropout:
        raise UnsupportedError(f"Attention dropout is {dropout}; set attention_dropout to 0 in the model's config.")
    if not getattr(module, "is_causal", True):
        raise UnsupportedError(f"{type(module).__name__} is not causal; the plans of PackingCollator are.")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out, _ = attend(
        q, k, v, magi_plans.of(sliding_window), magi_plans.group, softmax_scale=scaling, softcap=softcap or 0.0,
        sink=None if s_aux is None else s_aux[None].to(torch.float32),
    )  # fmt: skip
    return out[None], None


def _no_mask(*, attention_mask: torch.Tensor | None = None, **unused: Any) -> None:
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ContractError("The batch is padded; PackingCollator packs documents without padding.")


def windows_of(config: Any) -> tuple[int, ...]:
    """The sliding windows of a model's layers, from its config."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = getattr(text, "layer_types", None)
    if kinds is not None and _CHUNKED in kinds:
        raise UnsupportedError("The model has layers with chunked attention, for which PackingCollator makes no plans.")
    window = getattr(text, "sliding_window", None)
    is_used = "sliding_attention" in kinds if kinds is not None else getattr(text, "use_sliding_window", True)
    return (window,) if window is not None and is_used else ()


class _Loader(DataLoader):
    """Has the epoch that a Trainer sets."""

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


class ContextParallelMixin:
    """Put before a Trainer class. ``cp_size`` ranks share a sequence: a divisor of the number of processes, by default
    that number. ``per_device_train_batch_size`` examples make one sequence.

    The Trainer's own arithmetic holds, since each rank has labels of its own: the loss is divided by the labels of all
    ranks and multiplied by their number, so that averaged gradients are those of one process with the whole batch.
    """

    args: Any  # what a Trainer has
    model: Any
    accelerator: Any
    train_dataset: Any
    eval_dataset: Any
    label_smoother: Any
    model_accepts_loss_kwargs: bool
    _train_batch_size: int

    def __init__(self, *args: Any, cp_size: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        world, rank = self.args.world_size, self.args.process_index
        self.cp_size = world if cp_size is None else cp_size
        self._check(world)
        self.cp_group = None  # all processes
        if 1 < self.cp_size < world:
            groups = [list(range(first, first + self.cp_size)) for first in range(0, world, self.cp_size)]
            self.cp_group, _ = dist.new_subgroups_by_enumeration(groups)
        elif self.cp_size < world:
            self.cp_group = SingleTransport()
        self._replicas, self._replica = world // self.cp_size, rank // self.cp_size
        windows = windows_of(self.model.config)
        self.data_collator = PackingCollator(self.cp_size, rank % self.cp_size, windows)

    def _check(self, world: int) -> None:
        model, args = self.accelerator.unwrap_model(self.model), self.args
        if self.cp_size < 1 or world % self.cp_size:
            raise ContractError(f"cp_size is {self.cp_size}; give a divisor of the {world} processes.")
        if (name := model.config._attn_implementation) != NAME:
            raise ContractError(
                f"The model's attention is {name!r}; call register() and load it with attn_implementation={NAME!r}."
            )
        for finding in of_layers(model, model.config.get_text_config(), self.cp_size):
            if finding.level == "error":
                raise UnsupportedError(f"{finding.text} {finding.remedy}")
        if args.n_gpu > 1:
            raise ContractError("One process drives several GPUs; start one for each by torchrun or accelerate launch.")
        if not args.average_tokens_across_devices:
            raise ContractError("Ranks hold parts of a sequence; leave average_tokens_across_devices at True.")
        if not self.model_accepts_loss_kwargs:
            raise UnsupportedError(f"{type(model).__name__} takes no num_items_in_batch, by which ranks share a loss.")
        if self.label_smoother is not None:
            raise UnsupportedError("label_smoothing_factor shifts labels within a rank; leave it at 0.")
        if (parallel := getattr(self.accelerator, "parallelism_config", None)) is not None and parallel.cp_enabled:
            raise ContractError("accelerate's own context parallelism is on; leave it out of its ParallelismConfig.")

    def get_train_dataloader(self) -> DataLoader:
        if self.train_dataset is None:
            raise ContractError("There is no train_dataset; give one to the Trainer.")
        return self._loader(self.train_dataset, self._train_batch_size, is_training=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        known = self.eval_dataset if eval_dataset is None else eval_dataset
        chosen = self.eval_dataset[known] if isinstance(known, str) else known
        if chosen is None:
            raise ContractError("There is no eval_dataset; give one to the Trainer or to evaluate().")
        return self._loader(chosen, self.args.eval_batch_size, is_training=False)

    def _loader(self, dataset: Any, batch_size: int, is_training: bool) -> DataLoader:
        """All ranks of a group get the same examples. accelerate would give each process others."""
        args, extra = self.args, {}
        if isinstance(dataset, IterableDataset):
            if self._replicas > 1:
                raise UnsupportedError(
                    f"An IterableDataset cannot be divided among {self._replicas} groups; give a dataset with "
                    "a length, or leave cp_size out."
                )
        else:
            extra["drop_last"] = args.dataloader_drop_last
            extra["sampler"] = DistributedSampler(
                dataset, self._replicas, self._replica, shuffle=is_training, drop_last=args.dataloader_drop_last,
                seed=args.seed if args.data_seed is None else args.data_seed,
            )  # fmt: skip
        workers = args.dataloader_num_workers
        if workers:
            extra["prefetch_factor"] = args.dataloader_prefetch_factor
            extra["persistent_workers"] = args.dataloader_persistent_workers
            extra["worker_init_fn"] = partial(seed_worker, num_workers=workers, rank=self._replica)
        return _Loader(
            dataset, batch_size, collate_fn=self.data_collator, num_workers=workers,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(), **extra,
        )  # fmt: skip

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = super()._prepare_inputs(inputs)
        return {**inputs, "magi_plans": inputs["magi_plans"].in_group(self.cp_group), "use_cache": False}

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Logits and labels, if they are wanted, of the whole sequence in its order; labels are of the next token."""
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)
        if logits is None or labels is None:
            return loss, logits, labels
        plan = inputs["magi_plans"].full
        whole: Callable[[torch.Tensor], torch.Tensor] = lambda x: plan.gather(x[0], self.cp_group)[None]  # noqa: E731
        return loss, whole(logits), whole(labels)


class ContextParallelTrainer(ContextParallelMixin, Trainer):
    """``transformers.Trainer`` for packed documents over ``cp_size`` ranks."""


__all__ = ["NAME", "ContextParallelMixin", "ContextParallelTrainer", "attention", "register", "windows_of"]
