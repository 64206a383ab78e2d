# SPDX-License-Identifier: Apache-2.0
"""Heads in parts. Rows of a plan by head groups: (T, G * H, ...) with all groups of a token beside one another, and
(G * T, H, ...). Head chunks: (T, H / C, ...), one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from magi_attention.errors import ContractError, UnsupportedError


def rows_by_group(x: torch.Tensor, groups: int) -> torch.Tensor:
    """(T, G * H, ...) as (G * T, H, ...), one group behind the other; ``x`` itself for one group."""
    return x if groups == 1 else x.unflatten(1, (groups, -1)).transpose(0, 1).flatten(0, 1)


def heads_by_token(x: torch.Tensor, groups: int) -> torch.Tensor:
    """The inverse of ``rows_by_group``, contiguous."""
    return x if groups == 1 else x.unflatten(0, (groups, -1)).transpose(0, 1).flatten(1, 2)


def check_head_chunks(chunks: int, k: torch.Tensor, has_dropout: bool, head_groups: int) -> None:
    """Raises ``ContractError`` unless ``chunks`` divides the heads of k, ``UnsupportedError`` where none can be cut."""
    if k.shape[1] % chunks:
        raise ContractError(f"head_chunks is {chunks}, no divisor of the {k.shape[1]} kv heads; give one of them.")
    if has_dropout:
        raise UnsupportedError("Dropout draws by the number of a head, which chunks do not know; set head_chunks to 1.")
    if head_groups > 1:
        raise UnsupportedError(
            "Head groups have ranks of their own, so there is nothing to cut in chunks; set head_chunks to 1, or unset "
            "MAGI_ATTENTION_FLATTEN_HEAD_GROUPS."
        )


def head_chunks_of(chunks: int, *tensors: torch.Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Views of dimension 1, the heads of each tensor, chunk by chunk; None stays None."""
    for i in range(chunks):
        yield tuple(
            None if x is None else x[:, i * x.shape[1] // chunks : (i + 1) * x.shape[1] // chunks] for x in tensors
        )
