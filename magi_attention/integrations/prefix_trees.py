# SPDX-License-Identifier: Apache-2.0
"""A collator for reinforcement learning with groups of responses: each prompt once, followed by its responses.

A response sees its prompt and itself, and no other response. So what a model computes is what it computes where each
response stands behind a copy of its prompt, and the copies are saved. All ranks of a group must get the same examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from magi_attention.api import Mask, make_plan
from magi_attention.common.scalars import as_int_array
from magi_attention.config import DistAttnConfig
from magi_attention.errors import ContractError
from magi_attention.integrations.packing import LayerPlans


@dataclass(frozen=True)
class PrefixTreeBatch:
    """The part of one rank. ``inputs`` are arguments of the model: ``input_ids`` and ``position_ids`` (1, T),
    ``magi_plans``.

    A target is a token of a response. Each belongs to the rank that holds the row whose logits predict it; the last
    token of a prompt predicts the first token of each response. For the targets of this rank, ``targets`` (N,) are
    their ids and ``rows`` (N,) those local rows; ``responses`` and ``steps`` (N,) say which token of which response
    each is. ``lengths`` (R,) are the tokens of all responses, in the order of the examples.
    """

    inputs: dict[str, Any]
    rows: torch.Tensor
    targets: torch.Tensor
    responses: torch.Tensor
    steps: torch.Tensor
    lengths: tuple[int, ...]

    def log_probs(self, logits: torch.Tensor) -> torch.Tensor:
        """(N,) of the targets, from ``logits`` (T, V) of this rank; float32, or float64 for float64 logits."""
        if logits.dim() != 2 or len(logits) != self.inputs["input_ids"].shape[1]:
            tokens = self.inputs["input_ids"].shape[1]
            raise ContractError(f"logits have shape {tuple(logits.shape)}; give ({tokens}, vocabulary).")
        logits = logits if logits.dtype == torch.float64 else logits.float()
        rows, targets = self.rows.to(logits.device), self.targets.to(logits.device)
        return logits[rows, targets] - logits.logsumexp(1)[rows]

    def gather(self, values: torch.Tensor, group: Any = None) -> torch.Tensor:
        """(R, longest response) from ``values`` (N,) of every rank, 0 behind the end of a response; without gradient.

        ``group`` is a process group, None for the default one or, if there is none, this process alone.
        """
        whole = values.new_zeros(len(self.lengths), max(self.lengths))
        whole[self.responses.to(values.device), self.steps.to(values.device)] = values.detach()
        if group is not None or dist.is_initialized():
            dist.all_reduce(whole, group=group)
        return whole


@dataclass(frozen=True)
class PrefixTreeCollator:
    """Examples to the ``PrefixTreeBatch`` of rank ``cp_rank`` out of ``cp_size``.

    An example is a mapping with ``prompt_ids`` (n,) and ``response_ids``, a list of one or more (m,). Positions go on
    from the prompt's length in each of its responses. ``config`` goes to ``make_plan``.
    """

    cp_size: int = 1
    cp_rank: int = 0
    config: DistAttnConfig | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.cp_rank < self.cp_size:
            raise ContractError(f"cp_rank is {self.cp_rank} and cp_size {self.cp_size}; ranks count from 0.")

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> PrefixTreeBatch:
        parts, parents = _nodes(examples)
        sizes = np.array([len(part) for part in parts])
        tokens, starts = np.concatenate(parts), np.cumsum(sizes) - sizes
        is_response, above = parents >= 0, np.maximum(parents, 0)
        offsets = np.where(is_response, sizes[above], 0)  # position of the first token of each node
        node = np.repeat(np.arange(len(sizes)), sizes)
        step = np.arange(len(tokens)) - starts[node]
        plan = make_plan(Mask.prefix_tree(sizes, parents), self.cp_size, self.config)

        held = plan.position_array(self.cp_rank)  # ascending; pad rows repeat the last token
        rows = np.minimum(held, len(tokens) - 1)
        ids, positions = (torch.from_numpy(x[rows])[None] for x in (tokens, step + offsets[node]))

        target = np.flatnonzero(is_response[node])
        last_of_prompt = (starts + sizes - 1)[above[node[target]]]
        predictor = np.where(step[target] == 0, last_of_prompt, target - 1)
        at = np.minimum(np.searchsorted(held, predictor), len(held) - 1)
        is_here = held[at] == predictor
        target, at = target[is_here], at[is_here]
        number = np.cumsum(is_response) - 1  # of the responses
        found = (at, tokens[target], number[node[target]], step[target])
        inputs = {"input_ids": ids, "position_ids": positions, "magi_plans": LayerPlans(plan, {})}
        return PrefixTreeBatch(inputs, *(torch.from_numpy(x) for x in found), tuple(sizes[is_response].tolist()))


def _nodes(examples: Sequence[Mapping[str, Any]]) -> tuple[list[np.ndarray], np.ndarray]:
    """Tokens of all prompts and responses, each prompt before its responses, and the node above each, -1 for none."""
    parts: list[np.ndarray] = []
    parents: list[int] = []
    for number, example in enumerate(examples):
        if not {"prompt_ids", "response_ids"} <= example.keys():
            raise ContractError(f"Example {number} has {', '.join(example)}; it needs prompt_ids and response_ids.")
        prompt, responses = example["prompt_ids"], example["response_ids"]
        root = len(parts)
        parts += [_ids(prompt, "prompt_ids"), *(_ids(x, "A response") for x in responses)]
        parents += [-1] + [root] * len(responses)
    if max(parents, default=-1) < 0:
        raise ContractError("There is no response in the examples; give at least one.")
    return parts, np.array(parents)


def _ids(tokens: Any, name: str) -> np.ndarray:
    made = as_int_array(tokens, name)
    if made.ndim != 1 or not len(made):
        raise ContractError(f"{name} has shape {made.shape}; give one dimension and at least one token.")
    return made


__all__ = ["PrefixTreeBatch", "PrefixTreeCollator"]
