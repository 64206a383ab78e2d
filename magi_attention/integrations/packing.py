# SPDX-License-Identifier: Apache-2.0
"""A collator that packs documents into one sequence, plans it, and gives a rank of a context-parallel group its part.

It needs no process group, so workers of a DataLoader run it. All ranks of a group must get the same examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from magi_attention.api import Mask, Plan, make_plan
from magi_attention.config import DistAttnConfig
from magi_attention.errors import ContractError
from magi_attention.integrations.shared.examples import (
    IGNORE_INDEX,
    ExampleShape,
    digest_of,
    read_example,
    rows_of_batch,
)


class LayerPlans:
    """The plans of one packed sequence, all with the same tokens on each rank: ``full`` for layers that see whole
    documents; by window, and by chunk size, for layers that see less. ``group`` is what the calls of attention get.

    ``PackingCollator`` adds the ``shape`` of its examples, and a ``digest`` of their tokens and labels (0 for none).
    No dataclass and no container, because wrappers of models build those anew.
    """

    def __init__(
        self, full: Plan, windows: Mapping[int, Plan], group: Any = None, chunks: Mapping[int, Plan] | None = None,
        shape: ExampleShape | None = None, digest: int = 0,
    ) -> None:  # fmt: skip
        self.full, self.windows, self.group = full, windows, group
        self.chunks = {} if chunks is None else chunks
        self.shape, self.digest = shape, digest

    def in_group(self, group: Any) -> LayerPlans:
        """The same plans for calls in ``group``."""
        return LayerPlans(self.full, self.windows, group, self.chunks, self.shape, self.digest)

    def all(self) -> tuple[Plan, ...]:
        """Every plan: what ``AttentionCheck`` compares with."""
        return (self.full, *self.windows.values(), *self.chunks.values())

    def of(self, window: int | None, chunk: int | None = None) -> Plan:
        """The plan of a layer whose tokens see ``window`` tokens, themselves included, or those of their ``chunk``;
        None for no limit."""
        if chunk is not None:
            return self._found(self.chunks, chunk, "chunked attention", "chunks")
        return self.full if window is None else self._found(self.windows, window, "a sliding window", "windows")

    @staticmethod
    def _found(plans: Mapping[int, Plan], size: int, kind: str, argument: str) -> Plan:
        if size not in plans:
            raise ContractError(
                f"A layer has {kind} of {size}, and the batch was planned for {sorted(plans)}; give "
                f"{argument}=[{size}] where the plans are made (PackingCollator). Prefix trees have neither."
            )
        return plans[size]


def layer_plans(
    cu_seqlens: Sequence[int],
    cp_size: int,
    windows: Iterable[int] = (),
    config: DistAttnConfig | None = None,
    chunks: Iterable[int] = (),
) -> LayerPlans:
    """One dispatch of causal documents ``[0, n0, n0 + n1, ...]`` over ``cp_size`` ranks, and a plan for each window:
    in tokens that a token sees, itself included; and one for each chunk size: a token sees what is before it in its
    chunk, which are counted from the beginning of each document. ``config`` goes to ``make_plan``."""
    full = make_plan(Mask.varlen(cu_seqlens, causal=True), cp_size, config)
    masks = {w: Mask.varlen(cu_seqlens, window=(w - 1, 0)) for w in dict.fromkeys(windows)}
    chunked = {c: full.with_mask(Mask.varlen(_chunked(cu_seqlens, c), causal=True)) for c in dict.fromkeys(chunks)}
    return LayerPlans(full, {window: full.with_mask(mask) for window, mask in masks.items()}, chunks=chunked)


def _chunked(cu_seqlens: Sequence[int], size: int) -> list[int]:
    bounds = [at for begin, end in zip(cu_seqlens, cu_seqlens[1:]) for at in range(begin, end, size)]
    return [*bounds, cu_seqlens[-1]]


@dataclass(frozen=True)
class PackingCollator:
    """Examples to the part of rank ``cp_rank`` out of ``cp_size``.

    An example is a mapping with ``input_ids`` (n,), a list or a tensor, and if you like

    * ``labels`` (n,), not shifted, -100 where nothing is to be learned,
    * ``attention_mask`` (n,): tokens with 0 are left out, and so are their labels,
    * ``seq_lengths``, if the example is several documents already; or ``position_ids`` (n,), kept as they are, where
      each 0 begins a document,
    * the columns of ``per_token`` (n,), which are given to the model as ``input_ids`` are: integers as int64, weights
      and other floating-point numbers in their dtype (float32 for a list), 0 at pad rows.

    The batch has

    * ``input_ids``, ``position_ids`` (1, T): T tokens of this rank; positions count from 0 in every document,
    * ``labels`` and ``shift_labels`` (1, T), the same tensor: the label of the next token of the same document, else
      -100, so nothing needs shifting,
    * ``magi_plans``: the ``LayerPlans``,
    * with ``has_segments``, for kernels that carry a state: ``seq_idx`` (1, T) int32, ``cu_seq_lens_q`` and
      ``cu_seq_lens_k`` (S + 1,) int32, and the numbers ``max_length_q`` and ``max_length_k``, of the S parts of
      documents that this rank holds in one piece (``Fragments.segments``). On one rank these are the documents.

    ``windows`` are the sliding windows of the model's layers, in tokens that a token sees, itself included; ``chunks``
    the sizes of chunked attention. ``config`` goes to ``make_plan``. ``inner`` is another collator: examples go to it,
    and the rows of the padded or flattened batch that it makes are what is packed.

    Raises:
        ContractError: no tokens are left, or columns that do not fit together.
        UnsupportedError: a column of numbers that would be left out.
    """

    cp_size: int = 1
    cp_rank: int = 0
    windows: Sequence[int] = ()
    config: DistAttnConfig | None = None
    chunks: Sequence[int] = ()
    per_token: Sequence[str] = ()
    inner: Callable[[Sequence[Any]], Mapping[str, Any]] | None = None
    has_segments: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.cp_rank < self.cp_size:
            raise ContractError(f"cp_rank is {self.cp_rank} and cp_size {self.cp_size}; ranks count from 0.")
        for name, sizes in (("windows", self.windows), ("chunks", self.chunks)):
            if any(size < 1 for size in sizes):
                raise ContractError(f"{name} are {list(sizes)}; a token sees itself at least, so give 1 or more.")

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if not examples:
            raise ContractError("There are no examples to pack; a batch has at least one.")
        given = examples if self.inner is None else rows_of_batch(self.inner(examples))
        read = [read_example(x, self.per_token) for x in given]
        tokens, labels, positions, lengths = (
            np.concatenate([getattr(x, name) for x in read]) for name in ("tokens", "labels", "positions", "lengths")
        )
        if not len(tokens):
            raise ContractError("attention_mask leaves out all tokens of a batch; give examples with tokens.")
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
        plans = layer_plans(cu_seqlens.tolist(), self.cp_size, self.windows, self.config, self.chunks)
        plans.shape, plans.digest = ExampleShape.of(read), digest_of(read)

        # Pad rows repeat the last token and have no label.
        rows = plans.full.position_array(self.cp_rank)
        is_pad, rows = rows >= len(tokens), np.minimum(rows, len(tokens) - 1)
        shifted = np.append(labels[1:], IGNORE_INDEX)
        shifted[cu_seqlens[1:] - 1] = IGNORE_INDEX
        columns = {"input_ids": tokens[rows], "position_ids": positions[rows]}
        columns["labels"] = np.where(is_pad, IGNORE_INDEX, shifted[rows])
        for name in dict.fromkeys(name for x in read for name in x.extra):
            if any(name not in x.extra for x in read):
                raise ContractError(f"Some examples of a batch have {name!r} and others do not; give it to all.")
            columns[name] = _column_of([x.extra[name] for x in read], rows, is_pad)
        batch: dict[str, Any] = {name: torch.from_numpy(column)[None] for name, column in columns.items()}
        segments = _segments(plans.full, self.cp_rank) if self.has_segments else {}
        return {**batch, "shift_labels": batch["labels"], "magi_plans": plans, **segments}


def _column_of(parts: list[np.ndarray], rows: np.ndarray, is_pad: np.ndarray) -> np.ndarray:
    """A column of ``per_token`` in the order of ``rows``. Integers beside fractions take the dtype of these, which
    NumPy would make float64."""
    fractions = [part.dtype for part in parts if part.dtype.kind == "f"]
    if not fractions:
        return np.concatenate(parts)[rows]
    dtype = np.result_type(*fractions)
    return np.where(is_pad, dtype.type(0), np.concatenate([part.astype(dtype) for part in parts])[rows])


def _segments(plan: Plan, rank: int) -> dict[str, Any]:
    """What DataCollatorWithFlattening of transformers gives, of the segments of a rank."""
    bounds = plan.fragments().segments(rank)
    lengths = np.diff(bounds)
    index = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    cu, longest = torch.from_numpy(bounds.astype(np.int32)), int(lengths.max())
    of_kernels = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": longest, "max_length_k": longest}
    return {"seq_idx": torch.from_numpy(index)[None], **of_kernels}


__all__ = ["IGNORE_INDEX", "LayerPlans", "PackingCollator", "layer_plans"]
