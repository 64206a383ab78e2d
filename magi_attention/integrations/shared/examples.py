# SPDX-License-Identifier: Apache-2.0
"""Reads examples of a dataset, or the padded batch of another collator, for ``PackingCollator``; and gives what was
computed for packed tokens back in the examples' own shape."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from magi_attention.errors import ContractError, UnsupportedError

IGNORE_INDEX = -100
# What an example may have. The last ones come from collators that flatten, whose position_ids say the same.
_MASKS = ("completion_mask", "assistant_masks")  # 1 where something is to be learned
_KNOWN = {"input_ids", "labels", "attention_mask", "position_ids", "seq_lengths", *_MASKS,
          "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}  # fmt: skip


@dataclass(frozen=True)
class Example:
    """The tokens of an example that are not masked out: ``tokens``, ``labels`` (-100 for none), ``positions`` in their
    documents (n,), ``lengths`` of these documents. ``kept`` (n,) are their places among its ``width`` tokens. ``extra``
    are further columns, (n,) each."""

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    lengths: np.ndarray
    kept: np.ndarray
    width: int
    extra: dict[str, np.ndarray]


@dataclass(frozen=True)
class ExampleShape:
    """Where the tokens of a packed batch stood: token i in row ``rows[i]`` and column ``columns[i]`` of (``count``,
    ``width``)."""

    rows: np.ndarray
    columns: np.ndarray
    count: int
    width: int

    @classmethod
    def of(cls, examples: Sequence[Example]) -> ExampleShape:
        rows = np.repeat(np.arange(len(examples)), [len(x.tokens) for x in examples])
        columns = np.concatenate([x.kept for x in examples])
        return cls(rows, columns, len(examples), max(x.width for x in examples))

    def unpack(self, x: torch.Tensor, fill: float = IGNORE_INDEX) -> torch.Tensor:
        """(T, ...) of all packed tokens to (count, width, ...); ``fill`` where no token was."""
        made = x.new_full((self.count, self.width, *x.shape[1:]), fill)
        rows, columns = (torch.from_numpy(i).to(x.device) for i in (self.rows, self.columns))
        made[rows, columns] = x[: len(rows)]
        return made


def digest_of(examples: Sequence[Example]) -> int:
    """A number below 2**62 of the tokens and labels, by which ranks find out that they hold different ones."""
    seen = hashlib.blake2b(digest_size=8)
    for x in examples:
        seen.update(x.tokens.tobytes())
        seen.update(x.labels.tobytes())
    return int.from_bytes(seen.digest(), "little") >> 2


def read_example(example: Mapping[str, Any], per_token: Sequence[str] = ()) -> Example:
    """``example`` without the tokens that its ``attention_mask`` leaves out; see ``PackingCollator``."""
    if not isinstance(example, Mapping):
        raise ContractError(f"An example is a {type(example).__name__}; give a dict, {{'input_ids': tokens}}.")
    _check_columns(example, per_token)
    tokens = _ints(example, "input_ids")
    width = len(tokens)
    kept = np.flatnonzero(_mask(example, width))
    lengths = _document_lengths(example, width, kept)
    positions = np.arange(len(kept)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    if example.get("position_ids") is not None:
        positions = _column(example, "position_ids", width)[kept]
    given = [name for name in per_token if example.get(name) is not None]
    extra = {name: _of_tokens(_numbers(example, name), name, width)[kept] for name in given}
    return Example(tokens[kept], _labels(example, tokens)[kept], positions, lengths, kept, width, extra)


def rows_of_batch(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The examples of what another collator made: tensors of shape (examples, tokens)."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if ids is None or np.ndim(ids) != 2:
        has = ", ".join(map(repr, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise ContractError(f"The data collator made {has}; it has to give input_ids (examples, tokens).")
    names = [name for name in batch if name not in _KNOWN or np.ndim(batch[name]) == 2]
    for name in names:
        if np.shape(batch[name])[:1] != (len(ids),):
            raise UnsupportedError(
                f"The data collator made {name!r} of shape {np.shape(batch[name])} for {len(ids)} examples; only what "
                "has a value for each token can be packed and shared out over ranks. Leave it out."
            )
    return [{name: batch[name][i] for name in names} for i in range(len(ids))]


def _check_columns(example: Mapping[str, Any], per_token: Sequence[str]) -> None:
    """Text and None are no input of a model; numbers are, and would be missed."""
    for name, value in example.items():
        if name in _KNOWN or name in per_token or value is None:
            continue
        try:
            is_number = isinstance(value, torch.Tensor) or np.issubdtype(np.asarray(value).dtype, np.number)
        except ValueError:  # lists of unequal lengths
            is_number = False
        if is_number:
            raise UnsupportedError(
                f"An example has {name!r} of shape {np.shape(value)}, which would be left out. If it has a value for "
                f"each token and the model takes it, say per_token=[{name!r}]; else remove the column. Images and "
                "other inputs that are not by token cannot be packed."
            )


def _numbers(example: Mapping[str, Any], name: str) -> np.ndarray:
    """Integers as int64; floating-point numbers in their own dtype, float32 for those of a list and for bfloat16."""
    if name not in example:
        raise ContractError(f"An example has {', '.join(map(repr, example))}; it needs {name!r}, tokenize it first.")
    value = example[name]
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        made = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    else:
        made = np.asarray(value)
        if not isinstance(value, np.ndarray) and made.dtype == np.float64:
            made = made.astype(np.float32)
    if made.dtype.kind not in "iubf":
        raise ContractError(f"{name} of an example is {made.dtype}, not numbers; tokenize it first.")
    if made.ndim != 1 or not len(made):
        raise ContractError(f"{name} of an example has shape {made.shape}; give one dimension and at least one token.")
    return made if made.dtype.kind == "f" else made.astype(np.int64)


def _ints(example: Mapping[str, Any], name: str) -> np.ndarray:
    made = _numbers(example, name)
    whole = made.astype(np.int64)
    if (whole != made).any():
        raise ContractError(f"{name} of an example holds {made[whole != made][0]}; give integers.")
    return whole


def _column(example: Mapping[str, Any], name: str, tokens: int) -> np.ndarray:
    return _of_tokens(_ints(example, name), name, tokens)


def _of_tokens(made: np.ndarray, name: str, tokens: int) -> np.ndarray:
    if len(made) != tokens:
        raise ContractError(f"An example has {tokens} input_ids and {len(made)} {name}; give as many of both.")
    return made


def _mask(example: Mapping[str, Any], tokens: int) -> np.ndarray:
    if example.get("attention_mask") is None:
        return np.ones(tokens, dtype=bool)
    made = _column(example, "attention_mask", tokens)
    if not np.isin(made, (0, 1)).all():
        raise ContractError(
            f"attention_mask of an example has values {np.unique(made)[:4].tolist()}; give 0 and 1, and the lengths of "
            "documents in it as seq_lengths."
        )
    return made == 1


def _labels(example: Mapping[str, Any], tokens: np.ndarray) -> np.ndarray:
    made = (tokens if example.get("labels") is None else _column(example, "labels", len(tokens))).copy()
    for name in _MASKS:
        if example.get(name) is not None:
            made[_column(example, name, len(tokens)) == 0] = IGNORE_INDEX
    return made


def _document_lengths(example: Mapping[str, Any], width: int, kept: np.ndarray) -> np.ndarray:
    """Lengths of the documents in an example, in tokens that are kept; ``seq_lengths``, or a position 0 begins each."""
    if example.get("seq_lengths") is not None:
        lengths = _ints(example, "seq_lengths")
        if (lengths < 1).any() or lengths.sum() != width:
            raise ContractError(f"seq_lengths are {lengths.tolist()}; they must add up to the {width} input_ids.")
        begins = np.cumsum(lengths) - lengths
    elif example.get("position_ids") is not None:
        begins = np.flatnonzero(_column(example, "position_ids", width) == 0)
    else:
        begins = np.zeros(1, dtype=np.int64)
    counts = np.diff(np.searchsorted(kept, [0, *begins[begins > 0], width]))
    return counts[counts > 0]
