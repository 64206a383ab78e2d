# SPDX-License-Identifier: Apache-2.0
"""``ContextParallelMixin``: training of a Trainer of transformers over ranks that share sequences."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from transformers import Trainer
from transformers.trainer_utils import seed_worker

from magi_attention.api import AttentionCheck
from magi_attention.comm.transport.base import SingleTransport
from magi_attention.config import DispatchConfig, DistAttnConfig
from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.integrations.packing import PackingCollator
from magi_attention.integrations.shared.layer_kinds import chunks_of, parts_without_text, windows_of
from magi_attention.integrations.shared.recurrent_layers import MOST_FRAGMENTS, has_known
from magi_attention.integrations.transformers.checks import check_class, check_started, check_trainer
from magi_attention.integrations.transformers.evaluation import BatchesInOrder, EvaluationMixin, plans_of
from magi_attention.integrations.transformers.loss import LossOfOwnShift
from magi_attention.integrations.transformers.recurrent import use_recurrent_layers
from magi_attention.integrations.transformers.same_tokens import SameTokens

# Columns of examples that PackingCollator reads, whether or not the model has arguments of these names.
_COLUMNS = {"input_ids", "labels", "attention_mask", "position_ids", "seq_lengths", "completion_mask",
            "assistant_masks"}  # fmt: skip


class _Loader(DataLoader):
    """Has the epoch that a Trainer sets."""

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


class ContextParallelMixin(EvaluationMixin):
    """Put before a Trainer class. ``cp_size`` ranks share a sequence: a divisor of the number of processes, by default
    that of accelerate's ParallelismConfig, or all. ``per_device_train_batch_size`` examples make one sequence.

    The Trainer's own arithmetic holds, since each rank has labels of its own: the loss is divided by the labels of all
    ranks and multiplied by their number, so that averaged gradients are those of one process with the whole batch.
    In every step the attention of every layer, and that ranks hold the same tokens, is checked.

    A ``data_collator`` that makes padded or flattened batches is kept: what it makes is packed. A
    ``compute_loss_func(outputs, labels, num_items_in_batch)`` shifts labels, as transformers documents it, and
    divides the sum by ``num_items_in_batch``. A subclass with a ``compute_loss`` of its own that does neither says
    ``computes_loss_by_shard = True``.
    """

    args: Any  # what a Trainer has
    model: Any
    accelerator: Any
    train_dataset: Any
    eval_dataset: Any
    compute_loss_func: Any
    _train_batch_size: int
    computes_loss_by_shard = False

    def __init__(self, *args: Any, cp_size: int | None = None, **kwargs: Any) -> None:
        check_class(type(self))
        collator = _given(super().__init__, "data_collator", args, kwargs)
        super().__init__(*args, **kwargs)
        world, rank = self.args.world_size, self.args.process_index
        model = self.accelerator.unwrap_model(self.model)
        check_started(world)
        self.cp_size = self._cp_size(cp_size, world)
        use_recurrent_layers(model)
        check_trainer(self, model, self.cp_size)
        self._make_groups(world, rank)
        self._same_tokens = SameTokens(self.cp_size)
        self._attention_check = AttentionCheck(model, exclude=parts_without_text(model))
        if self.compute_loss_func is not None:
            self.compute_loss_func = LossOfOwnShift(self.compute_loss_func)
        self._arguments = set(inspect.signature(model.forward).parameters)
        if isinstance(collator, PackingCollator):
            collator = collator.inner
        per_token = sorted(name for name in self._arguments - _COLUMNS if name.endswith("token_type_ids"))
        self.data_collator = PackingCollator(
            self.cp_size, rank % self.cp_size, windows_of(model.config), _few_fragments(model), chunks_of(model.config),
            per_token, collator, has_segments=True,
        )  # fmt: skip

    def _cp_size(self, asked: int | None, world: int) -> int:
        parallel = getattr(self.accelerator, "parallelism_config", None)
        configured = parallel.cp_size if parallel is not None and parallel.cp_enabled else None
        if asked is not None and configured is not None and asked != configured:
            raise ContractError(f"cp_size is {asked}, and ParallelismConfig says {configured}; give it once.")
        size = next((x for x in (asked, configured) if x is not None), world)
        if size < 1 or world % size:
            raise ContractError(f"cp_size is {size}; give a divisor of the {world} processes.")
        return size

    def _make_groups(self, world: int, rank: int) -> None:
        """``cp_group`` shares sequences; ``_replica_group`` holds the ranks with the same part of other sequences."""
        self._replicas, self._replica = world // self.cp_size, rank // self.cp_size
        self.cp_group: Any = None  # all processes
        self._replica_group: Any = None
        if self.cp_size == 1:
            self.cp_group = SingleTransport()
        elif self._replicas > 1:
            groups = [list(range(first, first + self.cp_size)) for first in range(0, world, self.cp_size)]
            self.cp_group, _ = dist.new_subgroups_by_enumeration(groups)
            others = [list(range(first, world, self.cp_size)) for first in range(self.cp_size)]
            self._replica_group, _ = dist.new_subgroups_by_enumeration(others)

    # ---- batches --------------------------------------------------------------------------------------------

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

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        return self._loader(test_dataset, self.args.eval_batch_size, is_training=False)

    def _loader(self, dataset: Any, batch_size: int, is_training: bool) -> DataLoader:
        """All ranks of a group get the same examples. accelerate would give each process others."""
        args, extra = self.args, {}
        if isinstance(dataset, IterableDataset):
            if self._replicas > 1:
                raise UnsupportedError(
                    f"An IterableDataset cannot be divided among {self._replicas} groups; give a dataset with "
                    "a length, or leave cp_size out."
                )
            extra["batch_size"] = batch_size
        elif is_training:
            extra.update(batch_size=batch_size, drop_last=args.dataloader_drop_last)
            extra["sampler"] = DistributedSampler(
                dataset, self._replicas, self._replica, shuffle=True, drop_last=args.dataloader_drop_last,
                seed=args.seed if args.data_seed is None else args.data_seed,
            )  # fmt: skip
        else:
            extra["batch_sampler"] = BatchesInOrder(len(dataset), batch_size, self._replicas, self._replica)
        workers = args.dataloader_num_workers
        if workers:
            extra["prefetch_factor"] = args.dataloader_prefetch_factor
            extra["persistent_workers"] = args.dataloader_persistent_workers
            extra["worker_init_fn"] = partial(seed_worker, num_workers=workers, rank=self._replica)
        return _Loader(
            dataset, collate_fn=self._collate, num_workers=workers,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(), **extra,
        )  # fmt: skip

    def _collate(self, examples: Any) -> dict[str, Any]:
        """As transformers, without the columns that the model does not take, unless it is told to keep all."""
        collator = self.data_collator
        is_own = isinstance(collator, PackingCollator) and collator.inner is None
        if is_own and self.args.remove_unused_columns:
            known = _COLUMNS | self._arguments
            examples = [{name: x for name, x in example.items() if name in known} for example in examples]
        return collator(examples)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        plans = plans_of(inputs)
        inputs = super()._prepare_inputs(inputs)  # type: ignore[misc]
        return {**inputs, "magi_plans": plans.in_group(self.cp_group), "use_cache": False}

    def _prepare_context_parallel_inputs(self, model: Any, inputs: dict[str, Any]) -> Any:
        """accelerate's own division of a batch is not wanted: the collator has divided it."""
        return nullcontext, inputs

    # ---- steps ----------------------------------------------------------------------------------------------

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """The loss that it gives is the mean over all ranks: the Trainer sums up that of its own rank at the end."""
        with self._attention_check(*plans_of(inputs).all()):
            loss = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        return self.accelerator.reduce(loss, "mean")

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self._eval_items is not None:  # TRL passes none in evaluation
            kwargs["num_items_in_batch"] = self._eval_items
        result = super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        self._same_tokens.check()
        return result

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | None:
        """The labels of all ranks, which hold different ones; beside them travel the digests of their tokens."""
        if self._eval_items is not None:
            return self._eval_items
        if not batch_samples:
            return None
        labels = sum((batch["shift_labels"] != -100).sum() for batch in batch_samples)
        digests = [batch["magi_plans"].digest for batch in batch_samples]
        return self._same_tokens.total(labels, digests, device, self.accelerator.gather)

    def get_cp_size(self) -> int:
        return getattr(self, "cp_size", 1)  # asked before it is known, too


class ContextParallelTrainer(ContextParallelMixin, Trainer):
    """``transformers.Trainer`` for packed documents over ``cp_size`` ranks."""


def _few_fragments(model: torch.nn.Module) -> DistAttnConfig | None:
    """For models whose layers pass states: each of a rank's ranges of tokens takes one more summary of it."""
    return DistAttnConfig(DispatchConfig(max_fragments=MOST_FRAGMENTS)) if has_known(model) else None


def _given(init: Any, name: str, args: tuple, kwargs: dict) -> Any:
    return inspect.signature(init).bind_partial(*args, **kwargs).arguments.get(name) if args or kwargs else None
