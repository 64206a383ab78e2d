# SPDX-License-Identifier: Apache-2.0
"""Evaluation and prediction of a Trainer over ranks that share sequences: each example once, in its own shape, in the
order of the data set, as from one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from transformers.trainer_utils import has_length

from magi_attention.errors import ContractError, UnsupportedError
from magi_attention.integrations.packing import LayerPlans


class BatchesInOrder:
    """A batch sampler: groups take one batch of the data set after another, so that results follow its order. Where the
    last round has fewer batches than groups, the first ones are repeated, so that all groups take as many steps."""

    def __init__(self, examples: int, batch_size: int, replicas: int, replica: int) -> None:
        self.examples, self.batch_size, self.replicas, self.replica = examples, batch_size, replicas, replica

    def __len__(self) -> int:
        return -(-self.examples // (self.batch_size * self.replicas))

    def __iter__(self) -> Iterator[list[int]]:
        batches = -(-self.examples // self.batch_size)
        for step in range(len(self)):
            start = (step * self.replicas + self.replica) % batches * self.batch_size
            yield list(range(start, min(start + self.batch_size, self.examples)))


class EvaluationMixin:
    """What ``ContextParallelMixin`` does in ``evaluate`` and ``predict``."""

    args: Any
    accelerator: Any
    cp_size: int
    cp_group: Any
    gather_function: Any
    _replicas: int
    _replica_group: Any
    _attention_check: Any
    _same_tokens: Any
    # The labels by which the loss of the present batch is divided; None in training. The examples that each group has
    # in it, 0 where it repeats a batch; and whether the loss is what is gathered next.
    _eval_items: torch.Tensor | None = None
    _eval_counts: tuple[int, ...] = ()
    _is_loss_next = False
    _examples_left: float = 0

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        if "inputs" in (self.args.include_for_metrics or ()):
            raise UnsupportedError("include_for_metrics has 'inputs', which ranks hold in parts; leave it out.")
        if self.args.batch_eval_metrics:
            raise UnsupportedError("batch_eval_metrics needs accelerate's data loader; leave it off.")
        dataset = getattr(dataloader, "dataset", None)
        self._examples_left = len(dataset) if has_length(dataset) else float("inf")
        self.gather_function = self._gather_replicas
        return super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any, Any]:
        """The loss of the group's batch; logits and labels, if they are wanted, (examples, tokens, ...) with -100 where
        an example has no token or its mask left it out. Labels are of the next token."""
        plans = plans_of(inputs)
        group_labels = self._count(inputs)
        # The loss is multiplied by the number of processes, so that the sum over the group is its mean by label.
        self._eval_items = group_labels * self.args.world_size
        try:
            with self._attention_check(*plans.all()):
                made = super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._eval_items = None
        loss, logits, labels = made
        if loss is not None and self.cp_size > 1:
            loss = loss.detach().clone()
            dist.all_reduce(loss, group=self.cp_group)
        self._eval_counts = self._counts(plans)
        self._is_loss_next = loss is not None
        return loss, self._whole(logits, plans), self._whole(labels, plans)

    def _count(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Labels of this batch in the group of ranks."""
        labels, plans = (inputs["shift_labels"] != -100).sum(), inputs["magi_plans"]
        gathered: list[torch.Tensor] = []

        def gather(mine: torch.Tensor) -> torch.Tensor:
            gathered.append(self.accelerator.gather(mine))
            return gathered[0]

        self._same_tokens.total(labels, [plans.digest], self.args.device, gather)
        first = self.args.process_index // self.cp_size * self.cp_size
        return gathered[0][first : first + self.cp_size, 0].sum()

    def _whole(self, x: Any, plans: LayerPlans) -> Any:
        """What ranks hold in parts, (1, T, ...) each, in the shape of the examples."""
        if x is None:
            return None
        if isinstance(x, (tuple, list)):
            return type(x)(self._whole(y, plans) for y in x)
        if x.dim() < 2 or x.shape[0] != 1:
            raise ContractError(
                f"The model gave a result of shape {tuple(x.shape)}, which has no row for each token; name it in "
                "ignore_keys (or the config's keys_to_ignore_at_inference)."
            )
        return plans.shape.unpack(plans.full.gather(x[0], self.cp_group))

    def _counts(self, plans: LayerPlans) -> tuple[int, ...]:
        """The examples of each group in this step. Batches are full but for the last of the data set."""
        full = self.args.eval_batch_size if self._replicas > 1 else plans.shape.count
        counts = tuple(int(min(max(self._examples_left - i * full, 0), full)) for i in range(self._replicas))
        self._examples_left -= sum(counts)
        return counts

    def _gather_replicas(self, x: Any) -> Any:
        """Results of all groups, one batch after another, without the batches that were repeated."""
        if self._is_loss_next:  # the mean over examples then weighs batches by their examples
            self._is_loss_next = False
            losses = [loss.expand(count) for loss, count in zip(self._of_replicas(x[:1], 1), self._eval_counts)]
            return torch.cat(losses)
        if isinstance(x, (tuple, list)):
            return type(x)(self._gather_replicas(y) for y in x)
        parts = self._of_replicas(x, max(self._eval_counts))
        return torch.cat([part[:count] for part, count in zip(parts, self._eval_counts)])

    def _of_replicas(self, x: torch.Tensor, rows: int) -> list[torch.Tensor]:
        """What each group has, padded to ``rows``."""
        if self._replicas == 1:
            return [x]
        mine = x.new_zeros((rows, *x.shape[1:]))
        mine[: len(x)] = x[:rows]
        parts = [torch.empty_like(mine) for _ in range(self._replicas)]
        dist.all_gather(parts, mine, group=self._replica_group)
        return parts


def plans_of(inputs: dict[str, Any]) -> LayerPlans:
    """The plans of a batch; a batch of another collator has none, and positions would count from 0 on each rank."""
    if "magi_plans" not in inputs or "position_ids" not in inputs:
        raise ContractError(
            f"A batch has {', '.join(inputs)}, and no magi_plans with position_ids; leave the data loaders and "
            "data_collator of ContextParallelTrainer in their places."
        )
    return inputs["magi_plans"]
