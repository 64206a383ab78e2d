# SPDX-License-Identifier: Apache-2.0
"""Plans of the layout that Megatron-Core gives to context-parallel ranks, for packed documents and for one sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from magi_attention.api import Plan
from magi_attention.errors import ContractError
from magi_attention.integrations.shared.thd_documents import DocumentCache, Documents
from magi_attention.integrations.zigzag import zigzag_plan

_documents = DocumentCache()  # layers share it


def plan_of_batch(
    packed: Any, rows: int, cp_group: Any, is_causal: bool = True, window: tuple[int, int] | None = None
) -> tuple[Plan, Any]:
    """The plan of a sequence of which this rank has ``rows`` tokens, and its group, None for one rank.

    ``packed`` are the PackedSeqParams of the batch, or None for one document. ``ContractError`` for documents that end
    elsewhere than the sequence.
    """
    group = cp_group if packed is None or packed.cp_group is None else packed.cp_group
    cp_size = 1 if group is None else group.size()
    found = Documents((0, rows * cp_size)) if packed is None else _documents.read(packed)
    end = found.bounds[-1]
    if end != rows * cp_size:
        each = f", with each document a multiple of {2 * cp_size} tokens" if cp_size > 1 else ""
        raise ContractError(
            f"{found.name} ends at {end}, but the sequence has {cp_size} x {rows} tokens; give "
            f"cu_seqlens_q_padded that counts all pads in{each}."
        )
    return zigzag_plan(found.bounds, cp_size, is_causal, window, found.lengths), group


def mix_rows(
    mix: Callable[[torch.Tensor, Plan, Any], torch.Tensor], x: torch.Tensor, packed: Any, cp_group: Any
) -> torch.Tensor:
    """``mix(row (S, C), plan, group)`` of each sequence of ``x (S, B, C)``. ``ContractError`` for packed documents in
    several rows."""
    if packed is not None and x.shape[1] != 1:
        raise ContractError(f"Packed documents come in {x.shape[1]} rows; pack them into one.")
    plan, group = plan_of_batch(packed, x.shape[0], cp_group)
    return torch.stack([mix(x[:, b], plan, group) for b in range(x.shape[1])], dim=1)
