# SPDX-License-Identifier: Apache-2.0
"""A collator that packs documents into one sequence, plans it, and gives a rank of a context-parallel group its part.

It needs no process group, so workers of a DataLoader run it. All ranks of a group must get the same examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from magi_attention.api import Mask, Plan, make_plan
from magi_attention.config import DistAttnConfig
from magi_attention.errors import ContractError

IGNORE_INDEX = -100


class LayerPlans:
    """The plans of one packed sequence, all with the same tokens on each rank: for layers that see whole documents, and
    by window for layers with one. ``group`` is what the calls of attention get.

    No dataclass and no container, because wrappers of models build those anew.
    """

    def __init__(self, full: Plan, windows: Mapping[int, Plan], group: Any = None) -> None:
        self.full, self.windows, self.group = full, windows, group

    def in_group(self, group: Any) -> LayerPlans:
        """The same plans for calls in ``group``."""
        return LayerPlans(self.full, self.windows, group)

    def of(self, window: int | None) -> Plan:
        """The plan of a layer whose tokens see ``window`` tokens, themselves included; None for no window."""
        if window is None:
            return self.full
        if window not in self.windows:
            raise ContractError(
                f"A layer has a sliding window of {window}, and the batch was planned for {sorted(self.windows)}; give "
                f"windows=[{window}] where the plans are made (PackingCollator). Prefix trees have no windows."
            )
        return self.windows[window]


def layer_plans(
    cu_seqlens: Sequence[int], cp_size: int, windows: Iterable[int] = (), config: DistAttnConfig | None = None
) -> LayerPlans:
    """One dispatch of causal documents ``[0, n0, n0 + n1, ...]`` over ``cp_size`` ranks, and a plan for each window:
    in tokens that a token sees, itself included. ``config`` goes to ``make_plan``."""
    full = make_plan(Mask.varlen(cu_seqlens, causal=True), cp_size, config)
    masks = {w: Mask.varlen(cu_seqlens, window=(w - 1, 0)) for w in dict.fromkeys(windows)}
    return LayerPlans(full, {window: full.with_mask(mask) for window, mask in masks.items()})


@dataclass(frozen=True)
class PackingCollator:
    """Examples to the part of rank ``cp_rank`` out of ``cp_size``.

    An example is a mapping with ``input_ids`` (n,), a list or a tensor, and if you like ``labels`` (n,), not shifted,
    -100 where nothing is to be learned; and ``seq_lengths``, if the example is several documents already. The batch has

    * ``input_ids``, ``position_ids`` (1, T): T tokens of this rank; positions count from 0 in every document,
    * ``labels`` and ``shift_labels`` (1, T), the same tensor: the label of the next token of the same document, else
      -100, so nothing needs shifting,
    * ``magi_plans``: the ``LayerPlans``.

    ``windows`` are the sliding windows of the model's layers, in tokens that a token sees, itself included. ``config``
    goes to ``make_plan``.
    """

    cp_size: int = 1
    cp_rank: int = 0
    windows: Sequence[int] = ()
    config: DistAttnConfig | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.cp_rank < self.cp_size:
            raise ContractError(f"cp_rank is {self.cp_rank} and cp_size {self.cp_size}; ranks count from 0.")
        if any(window < 1 for window in self.windows):
            raise ContractError(f"windows are {list(self.windows)}; a token sees itself at least, so give 1 or more.")

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if not examples:
            raise ContractError("There are no examples to pack; a batch has at least one.")
        tokens = np.concatenate([_ints(x, "input_ids") for x in examples])
        labels = np.concatenate([_labels(x) for x in examples])
        lengths = np.concatenate([_lengths(x) for x in examples])
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
        plans = layer_plans(cu_seqlens.tolist(), self.cp_size, self.windows, self.config)

        # Pad rows repeat the last token and have no label.
        rows = plans.full.position_array(self.cp_rank)
        is_pad, rows = rows >= len(tokens), np.minimum(rows, len(tokens) - 1)
        starts = np.repeat(cu_seqlens[:-1], lengths)
        shifted = np.append(labels[1:], IGNORE_INDEX)
        shifted[cu_seqlens[1:] - 1] = IGNORE_INDEX
        local = np.where(is_pad, IGNORE_INDEX, shifted[rows])
        ids, positions, targets = (torch.from_numpy(x)[None] for x in (tokens[rows], rows - starts[rows], local))
        batch = {"input_ids": ids, "position_ids": positions, "labels": targets, "shift_labels": targets}
        return {**batch, "magi_plans": plans}


def _ints(example: Mapping[str, Any], name: str) -> np.ndarray:
    if name not in example:
        raise ContractError(f"An example has {', '.join(map(repr, example))}; it needs {name!r}, tokenize it first.")
    made = np.asarray(example[name], dtype=np.int64)
    if made.ndim != 1 or not len(made):
        raise ContractError(f"{name} of an example has shape {made.shape}; give one dimension and at least one token.")
    return made


def _labels(example: Mapping[str, Any]) -> np.ndarray:
    tokens, labels = len(_ints(example, "input_ids")), example.get("labels")
    made = _ints(example, "input_ids" if labels is None else "labels").copy()
    for name in ("completion_mask", "assistant_masks"):  # 1 where something is to be learned
        if example.get(name) is not None:
            made[_ints(example, name) == 0] = IGNORE_INDEX
    if len(made) != tokens:
        raise ContractError(f"An example has {tokens} input_ids and {len(made)} labels; give as many of both.")
    return made


def _lengths(example: Mapping[str, Any]) -> np.ndarray:
    tokens = len(_ints(example, "input_ids"))
    if example.get("seq_lengths") is None:
        return np.array([tokens])
    lengths = _ints(example, "seq_lengths")
    if (lengths < 1).any() or lengths.sum() != tokens:
        raise ContractError(f"seq_lengths are {lengths.tolist()} and there are {tokens} input_ids; they must add up.")
    return lengths


__all__ = ["IGNORE_INDEX", "LayerPlans", "PackingCollator", "layer_plans"]
